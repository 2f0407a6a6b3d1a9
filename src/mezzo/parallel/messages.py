"""What travels between a driver and its workers. Only a reply that holds a snapshot carries weights."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mezzo import errors
from mezzo.engines.base import EngineSpec
from mezzo.engines.registry import EngineInfo
from mezzo.errors import MezzoError, RunFailed
from mezzo.types import MicroBatch, TrainedTensor, Update

# A method of the engine, or `catch_up`: replay the updates and no more.
RequestKind = Literal["score", "generate", "check", "digest", "state", "catch_up"]
# Requests whose arguments are engine calls, the micro-batch and further options.
UNIT_WORK: tuple[RequestKind, ...] = ("score", "generate")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How a worker starts its engine. `number` tells the workers of one machine apart."""

    engine: EngineInfo
    """`module:function` that opens the engine."""
    engine_spec: EngineSpec
    number: int = 0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker reports about itself once its engine is loaded."""

    micro_batch: MicroBatch
    trained: tuple[TrainedTensor, ...]
    base_digest: str
    description: Mapping[str, Any]
    merges_units: bool
    pid: int

    def has_same_base(self, other: WorkerFacts) -> bool:
        return (self.base_digest, self.trained) == (other.base_digest, other.trained)


@dataclass(frozen=True, slots=True)
class ReplayRange:
    """The journal's updates from step `start` on, which a worker applies before it answers.

    From step 0, a worker that can read the snapshot folder may start from a snapshot whose digest the journal has marked.
    """

    start: int = 0
    updates: tuple[Update, ...] = ()
    marks: Mapping[int, str] = field(default_factory=dict)
    snapshot_folder: str | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.updates)


@dataclass(frozen=True, slots=True)
class Request:
    """Replay these updates, then compute this."""

    replay: ReplayRange
    kind: RequestKind
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    value: Any
    seconds: float
    """Time the worker spent on it; the rest of the driver's wait is transfer and queueing."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no reply. `error` is the name of one of mezzo's errors."""

    error: str
    message: str
    fatal: bool = False
    """The worker's state is unknown: it must not be used again."""

    def to_exception(self) -> MezzoError:
        return getattr(errors, self.error, RunFailed)(self.message)


def parse_reply(data: bytes) -> Reply:
    """The reply in these bytes; raise the exception that a failure stands for."""
    reply = deserialize(data)
    if isinstance(reply, Failure):
        raise reply.to_exception()
    if not isinstance(reply, Reply):
        raise RunFailed("a worker sent an invalid reply; the journal holds the run up to here")
    return reply


def serialize(message: Any) -> bytes:
    return pickle.dumps(message, protocol=5)


def deserialize(data: bytes) -> Any:
    return pickle.loads(data)
