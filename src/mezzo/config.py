"""Every option of a run, once: name, default, help. The command line, TOML files and keyword arguments all read this table.

A `RunConfig` is resolved and then frozen. `None` means "decide for me": the model, space and data decide, and the resolved
value is what the run folder keeps.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo import limits
from mezzo.errors import ConfigError, nearest


def option(group: str, default: Any, help: str) -> Any:
    return field(default=default, metadata={"group": group, "help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run does. Fields are grouped as `mezzo train --help` and the tables of a TOML file group them."""

    model: str = option("model", "mezzo/roberta-mini", "bundled name, local folder or hub name")
    engine: str = option("model", "torch", "what runs the model: torch, sglang")
    device: str = option("model", "auto", "cpu, cuda, or auto: a GPU if there is one")
    dtype: str = option(
        "model", "float32", "type of the weights: float32, bfloat16, float16; a CPU computes in float32"
    )
    quantize: str | None = option(
        "model", None, "keep the frozen base in 8bit or 4bit, by bitsandbytes; with --space lora or prefix"
    )
    micro_batch: int | None = option(
        "model", None, "examples in one forward; less needs less memory [16 on a CPU, else the whole batch]"
    )
    cache_mb: float = option(
        "model",
        256.0,
        "memory to keep what frozen lower layers make of each example, with --layers or a head; 0 keeps nothing",
    )
    threads: int | None = option("model", None, "CPU threads [all cores, or OMP_NUM_THREADS]")
    tp: int = option("model", 1, "ranks that SGLang splits the model over (tensor parallelism)")
    url: tuple[str, ...] = option(
        "model", (), "SGLang servers to use instead of starting one; several share each batch"
    )
    remote_code: bool = option("model", False, "allow code that comes with a hub model to run")

    workers: int | None = option(
        "workers", None, "processes that share each step's forward passes [none: this process]"
    )
    ray_address: str | None = option(
        "workers", None, "let Ray run the workers: an address, auto, or local for a Ray of its own"
    )
    worker_timeout: float | None = option(
        "workers", None, "seconds after which a silent worker is replaced [by measured times]"
    )
    check_workers: int = option("workers", 100, "steps between comparisons of the workers' weights and scores; 0 never")
    backend: str = option("workers", "gloo", "how the ranks of torchrun talk: gloo, nccl")

    task: str | None = option("task", None, "task name or TOML file; see 'mezzo tasks' [reviews with the bundled data]")
    train: str | None = option("task", None, "training data: jsonl, json, csv, tsv, txt, parquet, or a k-shot folder")
    dev: str | None = option("task", None, "data that chooses the best checkpoint [a part of train is held out]")
    test: str | None = option("task", None, "data for the reported accuracy [dev]")
    k: int | None = option("task", None, "train on k examples per label, and hold out k more per label as dev")
    data_seed: int | None = option("task", None, "seed of the k-shot sample [the run's seed]")
    id_order: str | None = option(
        "task", None, "whose numbering integer labels follow, where sources differ: hub, lm-bff"
    )
    columns: tuple[str, ...] = option(
        "task", (), "which column of the data is which of the task's, e.g. text=body,label=stars [found by name]"
    )
    encoding: str = option("task", "utf-8", "how the data files encode text, e.g. latin-1")
    template: str | None = option("task", None, "prompt, e.g. '{text} It was [MASK].' [the task's]")
    words: tuple[str, ...] | None = option("task", None, "label words, e.g. negative=bad,positive=good [the task's]")
    max_length: int | None = option(
        "task", None, "tokens of a prompt at most; sentences are cut, the template never [the task's]"
    )
    demonstrations: int = option(
        "task", 0, "solve one example per label beside each prompt; evaluation averages this many draws of them"
    )
    readout: str = option("task", "auto", "auto, words (label words), head (fresh classification head) or candidates")
    train_limit: int | None = option("task", None, "use at most this many training examples")
    eval_limit: int | None = option("task", None, "use at most this many dev and test examples")

    space: str | None = option(
        "space", None, "what is trained: full, matrices, lora, prefix, head, a pattern [lora, or the bundled model's]"
    )
    rank: int = option("space", 8, "rank of LoRA")
    alpha: float = option("space", 16.0, "LoRA's scale; its product is multiplied by alpha/rank")
    targets: tuple[str, ...] = option("space", (), "linear layers LoRA attaches to, or all-linear [query and value]")
    prefix_tokens: int = option("space", 5, "length of a prefix: trained keys and values per layer")
    only: tuple[str, ...] = option("space", (), "of the space, train only tensors that match these patterns")
    layers: str = option("space", "", "of the space, train only these layers, e.g. 4: for the upper ones")
    noise: str | None = option(
        "space",
        None,
        "direction: rademacher (±1), gaussian or lowrank (±1 factors on matrices) [rademacher; lowrank in bfloat16 or on sglang]",
    )
    noise_rank: int = option("space", 8, "rank of lowrank noise")

    objective: str = option(
        "method", "cross_entropy", "cross_entropy, vocabulary_cross_entropy, accuracy, f1, matthews, or module:function"
    )
    max_new_tokens: int = option("method", 16, "tokens to generate where the objective or the metric reads text")
    steps: int | None = option("method", None, "training steps [1000]")
    batch_size: int | None = option("method", None, "examples a step [64 for masked, 16 for causal models]")
    lr: float | None = option("method", None, "learning rate [by model and space]")
    schedule: str | None = option("method", None, "learning rate over time: constant, linear, cosine [constant]")
    warmup: int = option("method", 0, "steps of linear warm-up")
    eps: float | None = option("method", None, "size of the perturbation [by model and space]")
    samples: int = option("method", 1, "directions a step; each costs two forward passes")
    weight_decay: float | None = option("method", None, "decay of the trained tensors [by model and space]")
    decay: str = option("method", "all", "what decays: all, or matrices (biases and norms do not)")
    clip: float = option("method", 0.0, "largest slope, in absolute value; 0 does not clip")
    seed: int = option("method", 0, "seed of the directions, the batches and fresh weights")

    out: str | None = option("run", None, "run folder [runs/TASK-SPACE-N]")
    eval_every: int | None = option("run", None, "steps between evaluations on dev [a tenth of the run]")
    patience: int = option("run", 0, "stop after this many evaluations without improvement; 0 never")
    time_limit: float | None = option("run", None, "stop after this many minutes; the run can be resumed")
    snapshot_minutes: float = option("run", 5.0, "minutes between snapshots, which make resuming faster")
    track: tuple[str, ...] = option("run", (), "also log to tensorboard, wandb or trackio, where installed")

    def replace(self, **changes: Any) -> RunConfig:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return {
            f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in dataclasses.fields(self)
        }


def options() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(RunConfig)


def from_mapping(values: Mapping[str, Any], source: str = "option") -> RunConfig:
    """A RunConfig from flat keys or from group tables, each value converted and checked."""
    config = RunConfig(**flatten(values, source))
    limits.check(config)
    return config


def flatten(values: Mapping[str, Any], source: str = "option") -> dict[str, Any]:
    """Group tables opened up, so that a table named `task` and an option named `task` do not get in each other's way."""
    flat: dict[str, Any] = {}
    groups = {f.metadata["group"] for f in options()}
    for key, value in values.items():
        if key in groups and isinstance(value, Mapping):
            for inner, inner_value in value.items():
                _put(flat, inner, inner_value, f"{key}.{inner}", key, source)
        else:
            _put(flat, key, value, key, None, source)
    return flat


def calls_somebody(name: str, value: Any) -> bool:
    """Whether an option sends prompts and weights over the network, or lets a cluster hand code to this machine."""
    return bool(value) and (name == "url" or (name == "ray_address" and value not in ("local", "auto")))


def from_file(path: Path, given: Collection[str] = ()) -> dict[str, Any]:
    """The options of a TOML file, or of the `config.json` of a run (or its folder): that run again, in a new folder.

    A file may come from a stranger: what runs code or calls somebody is refused in it, unless it is among the `given`.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # what both readers raise, and text that is not UTF-8
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no options: a configuration is an object of names and values")
    if path.suffix == ".json":
        values = {name: value for name, value in values.items() if value is not None and name != "out"}
    flat = {name: value for name, value in flatten(values).items() if name not in given}
    for name, value in flat.items():
        runs_code = (name == "remote_code" and value) or (name == "objective" and ":" in value)
        if runs_code or calls_somebody(name, value):
            what = {"objective": " MODULE:FUNCTION", "remote_code": ""}.get(name, " ADDRESS")
            raise ConfigError(
                f"{path}: {name} is not taken from a file, which may come from a stranger: "
                f"give --{name.replace('_', '-')}{what} beside it if you trust it"
            )
    return flat


def convert(name: str, value: Any) -> Any:
    """A value as its option wants it: command-line text is parsed, TOML types are checked."""
    kind = _hints()[name]
    arms = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in arms:
        return None
    wanted = next(arm for arm in arms if arm is not type(None))
    if wanted is str and value == "" and RunConfig.__dataclass_fields__[name].default != "":
        raise ConfigError(f"{name} is empty: give a value, or leave it out")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name} holds a NUL character")
    try:
        return _convert(value, wanted)
    except (TypeError, ValueError, OverflowError):
        word = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
            wanted, "a list of words"
        )
        raise ConfigError(f"{name} must be {word}, not {value!r}") from None


def _convert(value: Any, wanted: Any) -> Any:
    if typing.get_origin(wanted) is tuple:
        if isinstance(value, Mapping):
            return tuple(f"{key}={word}" for key, word in value.items())
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(str(part).strip() for part in parts)
    if wanted is bool:
        if isinstance(value, str):
            return (
                {"true": True, "false": False, "1": True, "0": False}[value.lower()]
                if value.lower() in _BOOLS
                else _fail()
            )
        return value if isinstance(value, bool) else _fail()
    if isinstance(value, bool) or (wanted is str and not isinstance(value, (str, Path))):
        _fail()
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if wanted is int and not isinstance(value, (str, int)):
        _fail()
    return wanted(value)


_BOOLS = ("true", "false", "1", "0")


def _fail() -> typing.NoReturn:
    raise ValueError


def _hints() -> dict[str, Any]:
    return typing.get_type_hints(RunConfig)


def _put(flat: dict[str, Any], name: str, value: Any, shown: str, group: str | None, source: str) -> None:
    known = {f.name: f.metadata["group"] for f in options()}
    name = name.replace("-", "_")
    if name not in known or (group is not None and known[name] != group):
        choices = known if group is None else [n for n, g in known.items() if g == group]
        hint = "" if name in ELSEWHERE else nearest(name, choices)
        raise ConfigError(f"unknown {source} {shown!r}{hint or nearest_option(name)}")
    flat[name] = convert(name, value)


def nearest_option(word: str) -> str:
    """`; did you mean 'lr'?` for a misspelt name, and for what other programs call the same option."""
    name = word.replace("-", "_")
    return f"; did you mean {ELSEWHERE[name]!r}?" if name in ELSEWHERE else nearest(name, [f.name for f in options()])


ELSEWHERE = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "zo_eps": "eps",
    "max_steps": "steps",
    "num_steps": "steps",
    "epochs": "steps",
    "num_train_epochs": "steps",
    "per_device_train_batch_size": "batch_size",
    "lr_scheduler_type": "schedule",
    "model_path": "model",
    "model_name_or_path": "model",
    "task_name": "task",
    "train_file": "train",
    "train_dataset": "train",
    "validation_file": "dev",
    "eval_dataset": "test",
    "num_k": "k",
    "max_seq_length": "max_length",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "output_dir": "out",
    "eval_steps": "eval_every",
    "report_to": "track",
}
"""What others call our options."""
