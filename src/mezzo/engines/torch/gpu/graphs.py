"""CUDA graphs of the forward, one for each shape that comes back: a step then launches one graph and reads a few numbers.

What changes from step to step (tokens, seeds, scales) lies in one device buffer that the graph reads; it is filled by one
asynchronous copy. A shape is captured when it comes for the second time. Graphs share one memory pool, because only one of
them runs at a time, and the least recently used are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mezzo.engines.torch.forward.inputs import PaddedRows
from mezzo.engines.torch.forward.probe_point import ProbePoint
from mezzo.engines.torch.gpu.captured_graph import CapturedForward, CapturedUpdate
from mezzo.engines.torch.gpu.fused import LARGEST_RANK
from mezzo.types import Batch, Scores, Update

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine

Shape = TypeVar("Shape", bound=CapturedForward)
MOST = 32
"""Shapes that are kept. Each costs a few megabytes beside the memory that all share."""


class Graphs:
    """The captured shapes of one engine."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: OrderedDict[Hashable, CapturedForward] = OrderedDict()
        self.moves: dict[int, CapturedUpdate] = {}
        self.done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.refused = ""
        """Why nothing is captured, where the model's forward does not allow it."""
        self.moves_by_kernels = all(t.rank <= LARGEST_RANK for t in engine.trained)
        self._waiting: CapturedUpdate | None = None
        """An update of small tensors that is launched together with the next forward, or by `settle` before."""

    def replay(self, updates: Sequence[Update]) -> None:
        """Apply one update after the other; nothing waits for them."""
        for update in updates:
            self.settle()
            if not update.empty:
                self._move(update)
            self.engine.population.source.forget()

    def settle(self) -> None:
        """Launch the update that waits: the weights will be looked at."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.run()

    def _move(self, update: Update) -> None:
        terms = len(update.terms)
        if not terms or not self.moves_by_kernels:
            self.engine.population.apply(update)
            return
        coefs = np.zeros(-(-(terms + 1) // 2) * 2, dtype=np.float32)
        coefs[: terms + 1] = (update.keep, *(coef for _, coef in update.terms))
        seeds = np.array([seed for seed, _ in update.terms], dtype=np.uint64)
        known = terms in self.moves
        if not known:
            self.moves[terms] = CapturedUpdate(self.engine, terms)
        one = self.moves[terms]
        one.staging.fill([seeds.view(np.int64), coefs.view(np.int64)])
        if known:
            self.capture(one)
        if one.graph is not None and not self.engine.population.large:
            self._waiting = one
        else:
            one.run()

    def capture(self, one: CapturedForward | CapturedUpdate) -> None:
        """Capture what is not yet; a model whose forward cannot be captured runs its kernels one by one from then on."""
        if one.graph is not None or self.refused:
            return
        try:
            one.capture(self.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            one.graph = None
            self.refused = str(error).splitlines()[0]

    def score(self, groups: Sequence[PaddedRows], batch: Batch, points: Sequence[ProbePoint], out: Scores) -> None:
        """Launch every micro-batch at every point, then wait once for the scores of all."""
        found = [(point, rows, self._launched(rows, batch, point)) for point in points for rows in groups]
        self.done.record()
        if self.engine.pipeline is not None:
            self.engine.pipeline.prepare()
        self.done.synchronize()
        first = {id(point): number * self.engine.micro_batch.members for number, point in enumerate(points)}
        for point, rows, scores in found:
            start, members = first[id(point)], len(point.probes)
            rows.write_scores(out[start : start + members], scores.numpy().reshape(members, -1, *rows.tail))

    def send(self, rows: PaddedRows, batch: Batch, point: ProbePoint) -> None:
        """What will be scored next, to where its graph reads it, behind what the device is doing; if there is a graph."""
        one = self.captured.get(key_of(rows, batch, point, self.engine.forward.trim_last_layer))
        if one is not None and one.graph is not None:
            one.send(rows, point)

    def _launched(self, rows: PaddedRows, batch: Batch, point: ProbePoint) -> Tensor:
        key = key_of(rows, batch, point, self.engine.forward.trim_last_layer)
        one, known = self.shape(key, lambda: CapturedForward(self.engine, rows, batch, point))
        one.send(rows, point)
        if known:
            if one.graph is None:
                self.settle()
            self.capture(one)
        scores = self._run(one)
        host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
        return host.copy_(scores, non_blocking=True)

    def shape(self, key: Hashable, make: Callable[[], Shape]) -> tuple[Shape, bool]:
        """The shape of this key, and whether it came before; the one that was used longest ago makes room."""
        known = key in self.captured
        if not known:
            self.captured[key] = make()
            while len(self.captured) > MOST:
                self.captured.popitem(last=False)
        self.captured.move_to_end(key)
        return self.captured[key], known  # type: ignore[return-value]

    def _run(self, one: CapturedForward) -> Tensor:
        """Behind the update that waits, if one does: in one launch where that happens again and again."""
        waiting = self._waiting
        if waiting is not None and one.graph is not None and waiting in one.met:
            self._waiting = None
            return one.run_after(waiting, self.pool)
        if waiting is not None:
            one.met.add(waiting)
        self.settle()
        return one.run()


def key_of(rows: PaddedRows, batch: Batch, point: ProbePoint, trims: bool) -> Hashable:
    return rows.shapes, rows.has_padding, batch.readout, len(point.probes), len(point.seeds), trims
