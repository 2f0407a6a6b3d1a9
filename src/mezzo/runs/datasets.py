"""The task and the examples that a configuration names; and data given in Python, saved as files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mezzo.config import OPTIONS, RunConfig
from mezzo.engines.hf_hub import family_of, load_config
from mezzo.errors import ConfigError, DataError, TaskError
from mezzo.journal.atomic_files import write_atomically
from mezzo.method import noise
from mezzo.runs.defaults import SETTINGS, model_settings
from mezzo.tasks import (
    MLMConfig,
    Task,
    bundled_data,
    find_split,
    get_task,
    has_splits,
    is_k_shot,
    k_shot,
    list_tasks,
    load_examples,
    name_split,
)
from mezzo.types import Example, Family

# What is trained where neither a task nor data is named.
DEFAULT_TASK = "questions"
# What a reward of the user's own is given where no task is named.
REWARD_TASK = "prompts"
# Share of the training data that becomes dev when no dev data is given.
HELD_OUT = 0.1
LARGEST_HELD_OUT = 500


@dataclass(frozen=True)
class Splits:
    """Examples by use. Without test data, the figures of dev are reported as such."""

    train: list[Example]
    dev: list[Example]
    test: list[Example]
    has_test: bool = True
    skipped: int = 0
    """Rows without a label that were left out."""


def find_task(config: RunConfig, family: Family) -> Task:
    """The configured task, with the run's template and label words where they are given."""
    mapping = OPTIONS["words"].split_pairs(config.words)
    task = _read_task(config.task or DEFAULT_TASK, family)
    return MLMConfig(config.template, cast(Any, mapping) or None).apply(task, config.id_order)


def with_model_task(config: RunConfig) -> RunConfig:
    """The configuration with the task that an exported model carries, unless one is named."""
    own = model_settings(config.model)
    if config.task or "task" not in own:
        return config
    readout = own.get("readout", config.readout) if config.readout == OPTIONS["readout"].default else config.readout
    return config.replace(task=json.dumps(own["task"], ensure_ascii=False), readout=readout)


def describe_assumed_task(config: RunConfig, reward: bool = False) -> str:
    """Which task is assumed where none is named, and why. `reward`: the objective is a reward of the user's own."""
    if own := model_settings(config.model).get("task"):
        return f"the task is {own['name']!r}, as {Path(config.model) / SETTINGS} says"
    assumed = REWARD_TASK if reward else DEFAULT_TASK
    return f"no task is named: {assumed!r} is assumed (--task NAME; 'mezzo tasks' lists them)"


def assume_prompts(config: RunConfig) -> dict[str, str]:
    """The task of a user's own reward, unless the model carries one."""
    return {} if "task" in model_settings(config.model) else {"task": REWARD_TASK}


def match_family(task: Mapping[str, Any] | Task, family: Family, model: str) -> Task:
    """A task given in Python, for the model's family: a dict without one takes it, any other must have it."""
    stated = get_task({"family": family, **task} if isinstance(task, Mapping) else task)
    if stated.family == family:
        return stated
    known = any((each.name, each.family) == (stated.name, family) for each in list_tasks())
    remedy = f"take get_task({stated.name!r}, {family!r})" if known else f"give it family={family!r} and a template"
    raise TaskError(f"task {stated.name!r} is for {stated.family} models, and {model} is {family}; {remedy}")


def write_task(task: Task) -> str:
    """A task as the value of the option `task`: the run's config.json then holds all of it."""
    return json.dumps(task.as_dict(), ensure_ascii=False)


def _read_task(spec: str, family: Family) -> Task:
    if not spec.startswith("{"):
        return get_task(spec, family)
    try:
        return get_task(json.loads(spec), family)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"--task begins with '{{', but is not valid JSON: {error}") from None


def load_splits(config: RunConfig, task: Task, unlabelled: bool = False) -> Splits:
    """Train, dev and test examples, from the files named or from what the package carries. `unlabelled`: rows without a label
    or an answer are used too, as a reward needs none."""
    bundled = config.train is None
    given = {"train": config.train, "dev": config.dev, "test": config.test}
    sources = {name: source or (bundled_data(task.name, name) if bundled else None) for name, source in given.items()}
    if sources["train"] is None:
        raise ConfigError(f"task {task.name!r} has no bundled data: pass --train FILE (and --test FILE)")
    named = {name: source for name, source in sources.items() if source}
    read = {name: load_labelled(source, task, name, config, given[name], unlabelled) for name, source in named.items()}
    examples = {name: found for name, (found, _) in read.items()}
    train = examples["train"]
    if not unlabelled:
        _refuse_one_class(train, task, sources["train"])
    dev = examples.get("dev", [])
    answered = sum(example.label >= 0 for example in train)
    if unlabelled and config.k and task.kind == "generation" and answered < 2 * config.k:
        raise ConfigError(
            f"--k {config.k} needs {2 * config.k} rows with a right answer, to train on and as dev, and there are {answered}: "
            "take --train-limit and --dev instead"
        )
    if config.k:
        seed = config.seed if config.data_seed is None else config.data_seed
        train, sampled = k_shot(train, config.k, seed % 2**32, labels=task.labels)
        dev = dev or sampled
    elif not dev:
        train, dev = hold_out(train, config.data_seed or 0)
    cut = config.eval_limit
    return Splits(
        take_some(train, config.train_limit),
        take_some(dev, cut),
        take_some(examples.get("test", dev), cut),
        "test" in examples,
        sum(skipped for _, skipped in read.values()),
    )


def load_labelled(
    source: Any, task: Task, split: str, config: RunConfig, given: object = True, unlabelled: bool = False
) -> tuple[list[Example], int]:
    """The examples of a source, and how many rows were left out because they have no label."""
    options = reading_options(config, given)
    labels_needed = not (config.skip_unlabelled or unlabelled)
    found = load_examples(source, task, split=split, labelled=labels_needed, **options)
    if unlabelled and not config.skip_unlabelled:
        return found, 0
    labelled = [example for example in found if example.label >= 0]
    if not labelled:
        raise DataError(f"{source}: no row has a label; give data that has some")
    return labelled, len(found) - len(labelled)


def splits_beside_train(config: RunConfig) -> dict[str, str]:
    """The files of a folder given as --train that are dev and test too, unless these are given or sampled: both of a k-shot
    folder, and dev of any other, whose test file often has no labels."""
    folder = Path(config.train or "")
    if not config.train or config.k or not folder.is_dir():
        return {}
    splits = ("dev", "test") if is_k_shot(folder) else ("dev",)
    found = {split: find_split(folder, split) for split in splits if getattr(config, split) is None}
    return {split: str(path) for split, path in found.items() if path is not None}


def splits_with_train(source: Any, config: RunConfig) -> dict[str, Any]:
    """What comes with the training data, unless it is given or sampled: dev and test of a dictionary of datasets, or the files
    of a folder. A test split without labels, as those of GLUE, is left out."""
    found: dict[str, Any] = dict(splits_beside_train(config))
    if config.k:
        return found
    if has_splits(source):
        named = {split: name_split(source, split) for split in ("dev", "test")}
        found = {split: source[name] for split, name in named.items() if name is not None}
    elif config.train and Path(config.train).is_dir() and (file := find_split(Path(config.train), "test")):
        found["test"] = str(file)
    found = {split: part for split, part in found.items() if getattr(config, split) is None}
    if "test" in found and not is_k_shot(Path(config.train or "")):
        task = find_task(config, family_of(load_config(config.model, config.remote_code)))
        try:
            load_labelled(found["test"], task, "test", config)
        except DataError:
            del found["test"]
    return found


def reading_options(config: RunConfig, given: object = True) -> dict[str, Any]:
    """How the user's data is read: what integer labels mean, which column is which, the encoding; nothing for bundled data."""
    if not given:
        return {}
    return {"id_order": config.id_order, "encoding": config.encoding, "columns": column_names(config)}


def column_names(config: RunConfig) -> dict[str, str]:
    """Task column → column of the data, as the user named them."""
    return OPTIONS["columns"].split_pairs(config.columns)


def take_some(examples: list[Example], limit: int | None) -> list[Example]:
    """At most `limit` examples, drawn from the whole list in its order: files are often sorted by label."""
    if limit is None or limit >= len(examples):
        return examples
    return [examples[place] for place in sorted(noise.order(0, "limit", len(examples))[:limit].tolist())]


def save_rows(rows: dict[str, Any], config: RunConfig) -> dict[str, str]:
    """Examples given in Python as files beside the run, named by their content: a run can be resumed only from files."""
    task = find_task(config, family_of(load_config(config.model, config.remote_code)))
    folder = _data_folder(config)
    named, paths = column_names(config), {}
    for name, source in rows.items():
        # Whether texts to generate need right answers depends on the objective, and is checked when the files are read.
        labelled = not config.skip_unlabelled and task.kind != "generation"
        found = load_examples(source, task, split=name, id_order=config.id_order, columns=named, labelled=labelled)
        lines = [json.dumps(_to_row(example, task, named), ensure_ascii=False, default=str) for example in found]
        data = "".join(line + "\n" for line in lines).encode()
        path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}.jsonl"
        write_atomically(path, data)
        paths[name] = str(path)
    return paths


def _data_folder(config: RunConfig) -> Path:
    return (Path(config.out).parent if config.out else Path("runs")) / "data"


def _to_row(example: Example, task: Task, named: dict[str, str]) -> dict[str, Any]:
    """An example as a line of data: its label by name, so that no order of ids is needed to read it back."""
    row = dict(example.fields)
    if example.label < 0 and task.kind != "generation":
        row[task.label_column] = None
    elif task.kind == "classification":
        row[task.label_column] = task.labels[example.label]
    elif task.kind == "choice":  # a row may name several right answers
        row.setdefault(task.label_column, example.label)
    return {named.get(column, column): value for column, value in row.items()}


def hold_out(examples: list[Example], seed: int = 0) -> tuple[list[Example], list[Example]]:
    """Examples without, and with, a tenth of every label. It does not depend on the run's seed: runs can be compared.

    A label with several examples has one among those held out, as far as there is room, and one among the others.
    """
    count = min(LARGEST_HELD_OUT, int(len(examples) * HELD_OUT))
    if count < 1:
        raise DataError(f"{len(examples)} training examples are too few to hold any out; pass --dev FILE")
    places: dict[int, list[int]] = {}
    for place in noise.order(seed, "held out", len(examples)).tolist():
        places.setdefault(examples[place].label, []).append(place)
    # By its share of the label that comes before it, so that taking the first few takes the same share of each.
    ranked = sorted((i / len(each), -len(each), place) for each in places.values() for i, place in enumerate(each[:-1]))
    dev = {place for *_, place in ranked[:count]}
    return [e for i, e in enumerate(examples) if i not in dev], [e for i, e in enumerate(examples) if i in dev]


def _refuse_one_class(examples: list[Example], task: Task, source: object) -> None:
    labels = {example.label for example in examples}
    if task.kind == "classification" and len(labels) == 1:
        raise DataError(
            f"{source}: all {len(examples)} rows have the label {task.labels[labels.pop()]!r}; "
            "training needs rows of at least two labels"
        )
