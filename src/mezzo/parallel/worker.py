"""A worker: one engine at one position of the journal that serves a driver's requests, the same for every transport."""

from __future__ import annotations

import dataclasses
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mezzo.engines.base import Engine, EngineSpec, ResettableEngine
from mezzo.errors import JournalError, MezzoError, RunFailed
from mezzo.parallel.messages import UNIT_WORK, Failure, Reply, Request, WorkerFacts, WorkerSpec, deserialize, serialize
from mezzo.replay.replay import replay
from mezzo.replay.snapshots import Snapshots


class Worker:
    """Holds an engine and brings it to the position at which a request is computed."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.engine = _open_engine(spec)
        self.position = 0

    def facts(self) -> WorkerFacts:
        engine = self.engine
        merges = bool(getattr(engine, "merges_units", False))
        facts = (engine.micro_batch, engine.trained, engine.base_digest, engine.describe(), merges, os.getpid())
        return WorkerFacts(*facts)

    def compute(self, request: Request) -> Any:
        self._replay(request)
        if request.kind == "catch_up":
            return None
        method = getattr(self.engine, request.kind)
        if request.kind not in UNIT_WORK:
            return method(*request.arguments)
        calls, micro_batch, *options = request.arguments
        self.engine.micro_batch = micro_batch
        return [method(call.batch, call.probes, *options) for call in calls]

    def _replay(self, request: Request) -> None:
        """Apply the request's updates; for a range from step 0 on, an engine that has moved returns to the base model."""
        span = request.replay
        if span.start == 0 and self.position > 0:
            self._return_to_base()
        if span.start != self.position:
            raise JournalError(f"a worker at step {self.position} was sent the updates from step {span.start} on")
        folder = span.snapshot_folder if span.start == 0 else None
        replay(self.engine, span.updates, span.marks, Snapshots(Path(folder)) if folder else None)
        self.position = span.stop

    def _return_to_base(self) -> None:
        """Open the engine again where it cannot be reset."""
        if not (isinstance(self.engine, ResettableEngine) and self.engine.reset()):
            self.engine.close()
            self.engine = _open_engine(self.spec)
        self.position = 0


def _open_engine(spec: WorkerSpec) -> Engine:
    return spec.engine.open(_assign_device(spec))


def _assign_device(spec: WorkerSpec) -> EngineSpec:
    """Spread the workers of one machine over its GPUs, or over its cores where the engine does not do so itself."""
    from mezzo.engines.torch.loading import gpu_count

    engine_spec = spec.engine_spec
    if engine_spec.device in ("auto", "cuda") and (count := gpu_count()):
        return dataclasses.replace(engine_spec, device=f"cuda:{spec.number * engine_spec.tp % count}")
    if spec.engine.pins_cores:
        _restrict_to_cores(spec.number, max(engine_spec.tp, engine_spec.threads or 1))
    return engine_spec


def _restrict_to_cores(number: int, count: int) -> None:
    """Give each worker cores of its own: otherwise all workers would pin their threads to the same ones."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(number * count + core) % len(cores)] for core in range(count)})


class WorkerServer:
    """Turns the bytes of a request into the bytes of its reply, or of the failure that occurred.

    `number` is the worker's number on this machine, if the driver cannot know it.
    """

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self.worker: Worker | None = None
        self.is_usable = True
        """False after a fatal failure."""

    def handle(self, data: bytes) -> bytes:
        start = time.perf_counter()
        try:
            value = self._compute(deserialize(data))
            reply: Reply | Failure = Reply(value, time.perf_counter() - start)
        except MezzoError as error:
            is_fatal = self.worker is None or isinstance(error, JournalError)  # its position is unknown
            reply = Failure(type(error).__name__, str(error), is_fatal)
        except Exception as error:
            reply = Failure("RunFailed", f"{type(error).__name__}: {error}", fatal=True)
        self.is_usable = isinstance(reply, Reply) or not reply.fatal
        return serialize(reply)

    def _compute(self, message: WorkerSpec | Request) -> Any:
        if isinstance(message, WorkerSpec):
            self.close()
            number = message.number if self.number is None else self.number
            self.worker = Worker(dataclasses.replace(message, number=number))
            return self.worker.facts()
        if self.worker is None:
            raise RunFailed("a worker was asked to compute before its engine was loaded")
        return self.worker.compute(message)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.engine.close()
            self.worker = None


def serve_requests(connection: Connection) -> None:
    """Reply to requests until the driver has gone."""
    server = WorkerServer()
    try:
        while server.is_usable:
            connection.send_bytes(server.handle(connection.recv_bytes()))
    except (EOFError, OSError):
        pass
    finally:
        server.close()
