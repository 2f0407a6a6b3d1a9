"""From a RunConfig to the parts of a run: its task met a tokenizer, its engine, the header of its journal."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mezzo.config import RunConfig
from mezzo.engines import open_engine
from mezzo.engines.base import Engine, EngineSpec
from mezzo.engines.hf_hub import family_of, load_config, load_tokenizer, longest_input
from mezzo.errors import ConfigError, JournalError, ModelError
from mezzo.evaluation.evaluate import Evaluation, Examined, evaluate, evaluate_texts
from mezzo.method import noise, rounding
from mezzo.method.space import Space
from mezzo.replay import prefix_start
from mezzo.runs.datasets import splits_of, task_of
from mezzo.runs.defaults import with_defaults
from mezzo.tasks import Encoder, Task
from mezzo.tasks.tokens import Tokens
from mezzo.types import Example, Family, Prompt, Readout


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
    def padding_id(self) -> int:
        """What rows are padded with: where a tokenizer has no token for that, its end of text, behind which nothing follows."""
        found = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((int(one) for one in found if one is not None), 0)

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
    parts.refuse_foreign((*encoder.readout.words, parts.padding_id))
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
        **prefix_start.kept(engine),
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
            "rows": engine.micro_batch.rows,
            "members": engine.micro_batch.members,
            "pad_to": engine.micro_batch.pad_to,
            "waste": engine.micro_batch.waste,
        },
        "data": data_digest(train),
        "engine": engine.describe(),
        "task": parts.task.as_dict(),
    }


def check_header(header: dict[str, Any], parts: Parts, train: Sequence[Prompt]) -> None:
    """A resumed run must see the same noise and the same data."""
    if header.get("noise") != noise.VERSION:
        raise JournalError(f"the run uses noise {header.get('noise')!r}; this mezzo makes {noise.VERSION!r}")
    if parts.config.dtype in rounding.DTYPES and header.get("rounding") != rounding.VERSION:
        raise JournalError(f"the run rounds by {header.get('rounding')!r}; this mezzo by {rounding.VERSION!r}")
    if header.get("data") != data_digest(train):
        raise JournalError("the training data has changed since the run began; restore it, or start a new run")


def data_digest(prompts: Sequence[Prompt]) -> str:
    total = hashlib.sha256()
    for prompt in prompts:
        total.update(repr((prompt.ids, prompt.label, prompt.position, prompt.candidates)).encode())
    return total.hexdigest()
