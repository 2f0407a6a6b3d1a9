"""A worker: one engine, one position of the journal, and the answers to a driver's orders. The same for every transport."""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mezzo.engines import ENGINES
from mezzo.engines.base import Engine, EngineSpec
from mezzo.engines.microbatch import EngineCall
from mezzo.errors import JournalError, MezzoError
from mezzo.parallel.messages import Answer, Facts, Failed, Order, Post, Route, packed, unpacked
from mezzo.replay.replay import replay
from mezzo.replay.snapshots import Snapshots
from mezzo.types import Batch, MicroBatch, Scores


class Worker:
    """Holds an engine and brings it to where an order is asked."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.engine = _opened(post)
        self.position = 0

    def facts(self) -> Facts:
        engine = self.engine
        joins = bool(getattr(engine, "joins_units", False))
        return Facts(engine.micro_batch, engine.trained, engine.base_digest, engine.describe(), joins, os.getpid())

    def answer(self, order: Order) -> Any:
        self.go(order.route)
        return getattr(self, f"on_{order.question}")(*order.values)

    def go(self, route: Route) -> None:
        """Follow a route; one that starts behind this worker's position begins at the base model again."""
        if route.start == 0 and self.position > 0:
            self.engine.close()
            self.engine, self.position = _opened(self.post), 0
        if route.start != self.position:
            raise JournalError(f"a worker at step {self.position} was sent the updates from step {route.start} on")
        snapshots = Snapshots(Path(route.snapshots)) if route.snapshots and route.start == 0 else None
        replay(self.engine, route.updates, route.marks, snapshots)
        self.position = route.end

    # ---- questions

    def on_score(self, pieces: Sequence[EngineCall], micro_batch: MicroBatch) -> list[Scores]:
        self.engine.micro_batch = micro_batch
        return [self.engine.score(piece.batch, piece.probes) for piece in pieces]

    def on_generate(
        self, pieces: Sequence[EngineCall], micro_batch: MicroBatch, tokens: int
    ) -> list[list[list[tuple[int, ...]]]]:
        self.engine.micro_batch = micro_batch
        return [self.engine.generate(piece.batch, piece.probes, tokens) for piece in pieces]

    def on_check(self, batch: Batch, eps: float) -> None:
        self.engine.check(batch, eps)

    def on_digest(self) -> str:
        return self.engine.digest()

    def on_state(self) -> dict[str, npt.NDArray[np.generic]]:
        return self.engine.state()

    def on_describe(self) -> dict[str, Any]:
        return self.engine.describe()

    def on_move(self) -> None:
        """The route was all there was to do."""


def _opened(post: Post) -> Engine:
    module, _, function = post.factory.partition(":")
    engine: Engine = getattr(importlib.import_module(module), function)(_placed(post))
    return engine


def _placed(post: Post) -> EngineSpec:
    """Workers of one machine share its GPUs out among themselves."""
    from mezzo.engines.torch.loading import gpu_count

    spec = post.spec
    if spec.device in ("auto", "cuda") and (count := gpu_count()):
        return dataclasses.replace(spec, device=f"cuda:{post.number * spec.tp % count}")
    if post.factory == ENGINES["sglang"]:
        _take_cores(post.number, max(spec.tp, spec.threads or 1))
    return spec


def _take_cores(number: int, count: int) -> None:
    """SGLang pins its threads to the first cores that it may use; were these the same for all workers, one core would do all."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(number * count + core) % len(cores)] for core in range(count)})


class Service:
    """A worker behind bytes: what is asked, and whatever goes wrong, comes back as one reply.

    `number` is its number on this machine, where it knows better than the driver.
    """

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self.worker: Worker | None = None

    def reply(self, data: bytes) -> tuple[bytes, bool]:
        """The reply, and whether the worker can go on."""
        began = time.perf_counter()
        try:
            asked = unpacked(data)
            if isinstance(asked, Post):
                self.close()
                number = asked.number if self.number is None else self.number
                self.worker = Worker(dataclasses.replace(asked, number=number))
                value: Any = self.worker.facts()
            else:
                assert self.worker is not None
                value = self.worker.answer(asked)
            found: Answer | Failed = Answer(value, time.perf_counter() - began)
        except MezzoError as error:
            lost = self.worker is None or isinstance(error, JournalError)  # nobody knows where its weights are
            found = Failed(type(error).__name__, str(error), fatal=lost)
        except Exception as error:
            found = Failed("RunFailed", f"{type(error).__name__}: {error}", fatal=True)
        return packed(found), not (isinstance(found, Failed) and found.fatal)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.engine.close()
            self.worker = None


def serve(connection: Connection) -> None:
    """Answer orders until the driver has gone."""
    service, going = Service(), True
    try:
        while going:
            reply, going = service.reply(connection.recv_bytes())
            connection.send_bytes(reply)
    except (EOFError, OSError):
        pass
    finally:
        service.close()
