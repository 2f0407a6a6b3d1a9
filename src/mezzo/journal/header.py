"""The first line of a journal as a typed value: all that is needed, beside the base model, to rebuild and resume a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from mezzo.errors import JournalError
from mezzo.method import noise, rounding
from mezzo.types import Family, MicroBatch, TensorKind, TrainedTensor

MAX_CLASSES = 100_000
MAX_PAD = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a run was. `base` is the digest of the base model, `data` that of the encoded training examples, `start` that of
    the initial values of a prefix, which neither the base model nor the seed determines."""

    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    samples: int = 1
    base: str = ""
    start: str = ""
    family: Family = "masked"
    classes: int = 0
    tensors: tuple[TrainedTensor, ...] = ()
    noise: str = noise.VERSION
    dtype: str = "float32"
    rounding: str = rounding.VERSION
    micro_batch: MicroBatch = field(default_factory=lambda: MicroBatch(rows=1))
    data: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rebuilds(self) -> bool:
        """Whether the journal's moves lead from the base model to the weights: those of a gradient run are kept instead."""
        return self.config.get("method") != "adam"

    def to_dict(self) -> dict[str, Any]:
        """As the journal stores it."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "start" or self.start}
        values["unit"] = asdict(values.pop("micro_batch"))
        values["tensors"] = [{**asdict(tensor), "shape": list(tensor.shape)} for tensor in self.tensors]
        return values


def parse_header(values: Mapping[str, Any], source: object) -> Header:
    """A header from stored values, which may come from anybody: JournalError where a field is missing or cannot be meant."""
    try:
        parsed = {name: parse(values[name]) for name, parse in PARSERS.items()}
        return Header(**parsed, start=_digest(values.get("start", "")), micro_batch=_micro_batch(values["unit"]))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise JournalError(f"{source}: the header lacks what a rebuild needs: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{str(value)[:40]!r} is not an object")
    return dict(value)


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch("([0-9a-f]{64})?", value):
        raise ValueError(f"{str(value)[:40]!r} is not a SHA-256")
    return value


def _count(value: Any, at_most: int = 2**63 - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= at_most:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{str(value)[:40]!r} is not one of {', '.join(choices)}")
    return value


def _tensor(row: Mapping[str, Any]) -> TrainedTensor:
    shape = tuple(_count(size) for size in row["shape"])
    kind = _choice(row["kind"], get_args(TensorKind))
    return TrainedTensor(str(row["name"]), shape, kind, _count(row["rank"]), bool(row["decay"]))


def _micro_batch(values: Mapping[str, Any]) -> MicroBatch:
    rows, members, pad_to = (_count(values[name]) for name in ("rows", "members", "pad_to"))
    waste = float(values.get("waste", 1.0))
    if min(rows, members, pad_to) < 1 or pad_to > MAX_PAD or not 0 <= waste <= 1:
        raise ValueError(f"micro-batches of {dict(values)}")
    return MicroBatch(rows, members, pad_to, waste)


PARSERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("config", "engine", "task"), _mapping),
    **dict.fromkeys(("seed", "samples"), _count),
    **dict.fromkeys(("base", "noise", "dtype", "rounding", "data"), str),
    "family": lambda value: _choice(value, get_args(Family)),
    "classes": lambda value: _count(value, at_most=MAX_CLASSES),
    "tensors": lambda rows: tuple(_tensor(row) for row in rows),
}
