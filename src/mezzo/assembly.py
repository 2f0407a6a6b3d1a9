"""From a RunConfig to the parts of a run: task, examples, engine, trainer. The one place that knows them all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mezzo import noise, rounding, starts
from mezzo.config import RunConfig
from mezzo.defaults import with_defaults
from mezzo.engines import open_engine
from mezzo.engines.base import Engine, EngineSpec
from mezzo.engines.hub import Family, family_of, load_config, load_tokenizer, longest_input
from mezzo.errors import ConfigError, DataError, JournalError, ModelError
from mezzo.evaluation import Evaluation, Examined, evaluate, evaluate_texts
from mezzo.files import write_atomically
from mezzo.limits import pairs
from mezzo.space import Space
from mezzo.tasks import Encoder, MLMConfig, Task, bundled_data, get_task, k_shot, load_examples
from mezzo.tasks.tokens import Tokens
from mezzo.types import Example, Prompt, Readout

HELD_OUT = 0.1
"""Share of the training data that becomes dev when no dev data is given."""
LARGEST_HELD_OUT = 500


@dataclass(frozen=True)
class Splits:
    """Examples by use. Without test data, dev is reported, and says so."""

    train: list[Example]
    dev: list[Example]
    test: list[Example]
    tested_apart: bool = True


@dataclass(frozen=True)
class Parts:
    """A task met a tokenizer: everything that is known before weights are loaded."""

    config: RunConfig
    family: Family
    task: Task
    encoder: Encoder
    tokenizer: Any
    vocabulary: int | None = None
    """How many tokens the model knows."""

    @property
    def classes(self) -> int:
        return self.encoder.readout.classes

    @property
    def readout(self) -> Readout:
        return self.encoder.readout

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def evaluate(self, engine: Engine, examples: Sequence[Example]) -> Evaluation:
        return self.examine(engine, examples).evaluation

    def examine(self, engine: Engine, examples: Sequence[Example]) -> Examined:
        """The task's own metric, of predictions or of generated answers, with the answers."""
        prompts = self.encode(examples)
        if self.task.kind == "generation":
            return evaluate_texts(engine, prompts, self.readout, self.decode, self.config.max_new_tokens)
        more = [self.encode(examples, draw) for draw in range(1, self.config.demonstrations)]
        return evaluate(engine, prompts, self.readout, self.task.metric, more)

    def encode(self, examples: Sequence[Example], draw: int = 0) -> tuple[Prompt, ...]:
        """Prompts; `draw` numbers the sampling of demonstrations."""
        prompts = self.encoder.batch(examples, draw).prompts if examples else ()
        self.refuse_foreign(token for p in prompts for ids in (p.ids, *p.candidates) for token in ids)
        return prompts

    def refuse_foreign(self, tokens: Iterable[int]) -> None:
        """A token that the model has no row for would be read from anywhere, or not at all."""
        largest = max(tokens, default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise ModelError(
                f"the tokenizer of {self.config.model} makes token {largest}, and the model knows {self.vocabulary}: "
                "they do not belong together"
            )


def prepare(config: RunConfig, task: Task | None = None) -> Parts:
    """Resolve the configuration against model and task; every mistake that needs no weights is found here.

    `task` stands for what the configuration names: a task object, or that of a journal's header.
    """
    config = config.replace(**_absolute(config))
    model_config = load_config(config.model, config.remote_code)
    family = family_of(model_config)
    config = with_defaults(config, family)
    if config.quantize and config.space not in ("lora", "prefix"):
        raise ConfigError(
            f"a quantised base stays as it is: --quantize goes with --space lora or prefix, not {config.space!r}"
        )
    longest = longest_input(model_config)
    if config.space == "prefix" and longest is not None and config.prefix_tokens > longest:
        raise ConfigError(
            f"--prefix-tokens {config.prefix_tokens} is more than the {longest} tokens {config.model} can read"
        )
    task = task or task_of(config, family)
    tokenizer = load_tokenizer(config.model, config.remote_code)
    encoder = Encoder(
        task,
        tokenizer,
        max_length=_length(config, task, longest, tokenizer),
        demonstrations=splits_of(config, task).train if config.demonstrations else (),
        readout=cast(Any, config.readout),
        vocabulary=config.objective == "vocabulary_cross_entropy",
        seed=config.seed,
    )
    if config.objective == "vocabulary_cross_entropy" and encoder.readout.kind != "words":
        raise ConfigError(
            f"vocabulary_cross_entropy reads label words; this task's readout is {encoder.readout.kind!r}"
        )
    size = getattr(model_config, "vocab_size", None)
    parts = Parts(config, family, task, encoder, tokenizer, size if isinstance(size, int) else None)
    parts.refuse_foreign((*encoder.readout.words, padding_id(tokenizer)))
    return parts


def _length(config: RunConfig, task: Task, longest: int | None, tokenizer: Any) -> int | None:
    """The tokens a prompt may have: as asked, else the task's, and never more than the model or its tokenizer takes."""
    if longest is None:
        return config.max_length
    if config.max_length is not None and config.max_length > longest:
        raise ConfigError(f"--max-length {config.max_length} is more than the {longest} tokens {config.model} can read")
    doubled = 2 if config.demonstrations else 1
    most = min(longest, Tokens(tokenizer).limit or longest)
    return config.max_length or (most if task.max_length * doubled > longest else None)


def _absolute(config: RunConfig) -> dict[str, str]:
    """Local paths as they are found from any folder: a run is resumed and verified from elsewhere too."""
    named = {name: getattr(config, name) for name in ("model", "train", "dev", "test")}
    return {name: os.path.abspath(path) for name, path in named.items() if path and os.path.exists(path)}


def task_of(config: RunConfig, family: Family) -> Task:
    """The task with the run's own template and words in place of its own."""
    mapping = pairs("words", config.words or (), "negative=bad,positive=good")
    return MLMConfig(config.template, cast(Any, mapping) or None).apply(get_task(config.task or "reviews", family))


def splits_of(config: RunConfig, task: Task) -> Splits:
    """Train, dev and test examples, from the files named or from what the package carries."""
    train_source = config.train or bundled_data(task.name, "train")
    if train_source is None:
        raise ConfigError(f"task {task.name!r} has no bundled data: pass --train FILE (and --test FILE)")
    train = load_examples(train_source, task, split="train", **reading(config, config.train))
    seed = config.seed if config.data_seed is None else config.data_seed
    bundled = config.train is None
    dev_source = config.dev or (bundled_data(task.name, "dev") if bundled else None)
    test_source = config.test or (bundled_data(task.name, "test") if bundled else None)
    dev: list[Example] = []
    if config.k:
        train, dev = k_shot(train, config.k, seed % 2**32, labels=task.labels)
    if dev_source:
        dev = load_examples(dev_source, task, split="dev", **reading(config, config.dev))
    elif not config.k:
        train, dev = _held_out(train, seed)
    test = load_examples(test_source, task, split="test", **reading(config, config.test)) if test_source else dev
    cut = config.eval_limit
    return Splits(some(train, config.train_limit), some(dev, cut), some(test, cut), test_source is not None)


def reading(config: RunConfig, given: object = True) -> dict[str, Any]:
    """How data that the user gave is read: what integer labels mean, which column is which, how text is encoded."""
    if not given:  # it comes with the package
        return {}
    return {"id_order": config.id_order, "encoding": config.encoding, "columns": columns_of(config)}


def columns_of(config: RunConfig) -> dict[str, str]:
    """Task column → column of the data, where the user says it."""
    return pairs("columns", config.columns, "text=body,label=stars")


def some(examples: list[Example], limit: int | None) -> list[Example]:
    """At most `limit` examples from all over the list, in its order: files are often sorted by label."""
    if limit is None or limit >= len(examples):
        return examples
    return [examples[place] for place in sorted(noise.order(0, "limit", len(examples))[:limit].tolist())]


def saved_rows(rows: dict[str, Any], config: RunConfig, task: Task | None) -> dict[str, str]:
    """Examples given in Python as files beside the run, named by their content: a run can be resumed only from files."""
    task = task or task_of(config, family_of(load_config(config.model, config.remote_code)))
    folder = _beside(config)
    named, paths = columns_of(config), {}
    for name, source in rows.items():
        found = load_examples(source, task, split=name, id_order=config.id_order, columns=named)
        lines = [json.dumps(_row(example, task, named), ensure_ascii=False) for example in found]
        data = "".join(line + "\n" for line in lines).encode()
        path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}.jsonl"
        write_atomically(path, data)
        paths[name] = str(path)
    return paths


def saved_task(task: Task, config: RunConfig) -> str:
    """A task given in Python as a file beside the run, so that the run's config.json names it."""
    data = (json.dumps(task.as_dict(), indent=2, ensure_ascii=False) + "\n").encode()
    path = _beside(config) / f"task-{hashlib.sha256(data).hexdigest()[:12]}.json"
    write_atomically(path, data)
    return os.path.abspath(path)


def _beside(config: RunConfig) -> Path:
    return (Path(config.out).parent if config.out else Path("runs")) / "data"


def _row(example: Example, task: Task, named: dict[str, str]) -> dict[str, Any]:
    """An example as a line of data: its label by name, so that no order of ids is needed to read it back."""
    row = dict(example.fields)
    if task.kind != "generation":
        row[task.label_column] = task.labels[example.label] if task.kind == "classification" else example.label
    return {named.get(column, column): value for column, value in row.items()}


def _held_out(train: list[Example], seed: int) -> tuple[list[Example], list[Example]]:
    count = min(LARGEST_HELD_OUT, int(len(train) * HELD_OUT))
    if count < 1:
        raise DataError(f"{len(train)} training examples are too few to hold any out; pass --dev FILE")
    shuffled = noise.order(seed, "held out", len(train))
    dev = {int(index) for index in shuffled[:count]}
    return [e for i, e in enumerate(train) if i not in dev], [e for i, e in enumerate(train) if i in dev]


def space_of(config: RunConfig) -> Space:
    assert config.space is not None
    return Space(
        kind=config.space,
        rank=config.rank,
        alpha=config.alpha,
        targets=config.targets,
        tokens=config.prefix_tokens,
        only=config.only,
        layers=config.layers,
        noise_rank=config.noise_rank if config.noise == "lowrank" else 0,
        decay=config.decay,
    )


PREFIX_TEXT = (
    "It was late when the train came in. A few people stood on the platform with their bags, looking for a face they knew, "
    "and an old man with a dog walked slowly up and down. The rain had stopped, the lamps were lit, and from the small "
    "station house came the sound of a radio on which somebody was telling a story about the sea. Nobody listened to it. "
    "When the doors opened, everyone began to talk at once: about the journey, the weather, the price of a cup of tea."
)
"""An ordinary text, whose keys and values a prefix starts from. The seed decides where in it."""


def _prefix_ids(config: RunConfig) -> tuple[int, ...]:
    """As many tokens of the text as the prefix is long."""
    ids = load_tokenizer(config.model, config.remote_code)(PREFIX_TEXT, add_special_tokens=False)["input_ids"]
    if not ids:
        return ()
    ids = ids * -(-2 * config.prefix_tokens // len(ids))
    start = int(noise.order(config.seed, "prefix", len(ids) - config.prefix_tokens + 1)[0])
    return tuple(ids[start : start + config.prefix_tokens])


def padding_id(tokenizer: Any) -> int:
    """What rows are padded with: where a tokenizer has no token for that, its end of text, which no prompt continues behind."""
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(one) for one in found if one is not None), 0)


def engine_for(config: RunConfig, family: Family, classes: int, pad_id: int) -> Engine:
    """The run's engine in this process, its trained tensors at the base."""
    return open_engine(config.engine, spec_of(config, family, classes, pad_id))


def spec_of(config: RunConfig, family: Family, classes: int, pad_id: int) -> EngineSpec:
    return EngineSpec(
        model=config.model,
        family=family,
        space=space_of(config),
        rows=config.micro_batch or config.batch_size or 64,
        fewer_rows=config.micro_batch is None,
        classes=classes,
        noise_kind="gaussian" if config.noise == "gaussian" else "rademacher",
        seed=config.seed,
        pad_id=pad_id,
        cache_mb=config.cache_mb,
        prefix_ids=_prefix_ids(config) if config.space == "prefix" else (),
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        remote_code=config.remote_code,
        quantize=config.quantize,
        tp=config.tp,
        urls=config.url,
    )


def header_of(parts: Parts, engine: Engine, train: Sequence[Prompt]) -> dict[str, Any]:
    """Everything a stranger needs, beside the base model, to make sense of the records."""
    config = parts.config
    return {
        "config": config.to_dict(),
        "seed": config.seed,
        "samples": config.samples,
        "base": engine.base_digest,
        **starts.kept(engine),
        "family": parts.family,
        "classes": parts.classes,
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "kind": t.kind, "rank": t.rank, "decay": t.decay}
            for t in engine.trained
        ],
        "noise": noise.VERSION,
        "dtype": config.dtype,
        "rounding": rounding.VERSION,
        "unit": {
            "rows": engine.unit.rows,
            "members": engine.unit.members,
            "pad_to": engine.unit.pad_to,
            "waste": engine.unit.waste,
        },
        "data": data_digest(train),
        "engine": engine.describe(),
        "task": parts.task.as_dict(),
    }


def check_header(header: dict[str, Any], parts: Parts, train: Sequence[Prompt]) -> None:
    """A resumed run must see the same noise and the same data."""
    if header.get("noise") != noise.VERSION:
        raise JournalError(f"the run uses noise {header.get('noise')!r}; this mezzo makes {noise.VERSION!r}")
    if parts.config.dtype in rounding.SHORT and header.get("rounding") != rounding.VERSION:
        raise JournalError(f"the run rounds by {header.get('rounding')!r}; this mezzo by {rounding.VERSION!r}")
    if header.get("data") != data_digest(train):
        raise JournalError("the training data has changed since the run began; restore it, or start a new run")


def data_digest(prompts: Sequence[Prompt]) -> str:
    total = hashlib.sha256()
    for prompt in prompts:
        total.update(repr((prompt.ids, prompt.label, prompt.position, prompt.candidates)).encode())
    return total.hexdigest()
