"""What travels between a driver and its workers. Everything is a value; weights never are, except for a snapshot."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mezzo.engines.base import EngineSpec
from mezzo.types import MicroBatch, TrainedTensor, Update


@dataclass(frozen=True, slots=True)
class Post:
    """How a worker starts: which engine, made of what. `number` tells workers of one machine apart."""

    factory: str
    spec: EngineSpec
    number: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker says of itself once its engine is up."""

    micro_batch: MicroBatch
    trained: tuple[TrainedTensor, ...]
    base_digest: str
    describe: Mapping[str, Any]
    joins_units: bool
    pid: int


@dataclass(frozen=True, slots=True)
class Route:
    """The way to a position of the journal: its updates from step `start` on.

    A way from the start may be shortened by a snapshot whose digest the journal has marked, where the folder can be read.
    """

    start: int = 0
    updates: tuple[Update, ...] = ()
    marks: Mapping[int, str] = field(default_factory=dict)
    snapshots: str | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.updates)


@dataclass(frozen=True, slots=True)
class Order:
    """Go there, then answer this."""

    route: Route
    question: str
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any
    seconds: float
    """What answering took the worker; the rest of the driver's wait is the way and the queue."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no answer. `kind` is the name of one of mezzo's errors."""

    kind: str
    text: str
    fatal: bool = False
    """The worker ends itself: its process cannot be trusted any more."""


def packed(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def unpacked(data: bytes) -> Any:
    return pickle.loads(data)
