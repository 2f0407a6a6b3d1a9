"""CUDA graphs of the forward, one for each shape that comes back: a step then launches one graph and reads a few numbers.

What changes from step to step (tokens, seeds, scales) lies in one device buffer that the graph reads; it is filled by one
asynchronous copy. A shape is captured when it comes for the second time. Graphs share one memory pool, because only one of
them runs at a time, and the least recently used are dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import masking_utils

from mezzo.engines.torch.fused import LARGEST_RANK
from mezzo.engines.torch.inputs import TENSORS, Rows
from mezzo.engines.torch.points import Move, Point
from mezzo.types import Batch, Probe, Scores, Update

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine

Words = npt.NDArray[np.int64]
MOST = 32
"""Graphs that are kept. Each costs a few megabytes beside the memory that all share."""


class Staging:
    """Pinned host memory from which a device buffer is filled without waiting, once the copy before it has been made."""

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.pinned = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
        self.values = self.pinned.numpy()
        self.copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, parts: Sequence[Words]) -> None:
        self.fill(parts)
        self.copy()
        self.copied.record()

    def fill(self, parts: Sequence[Words]) -> None:
        self.copied.synchronize()
        np.concatenate(parts, out=self.values)

    def copy(self) -> None:
        self.target.copy_(self.pinned, non_blocking=True)


class Captured:
    """One shape: its inputs in device memory, and the graph that reads them once it was captured."""

    def __init__(self, engine: TorchEngine, rows: Rows, batch: Batch, point: Point) -> None:
        self.engine, self.batch = engine, batch
        parts = _parts(rows, point)
        self.inputs = torch.empty(sum(part.size for part in parts), dtype=torch.int64, device=engine.device)
        views = iter(torch.split(self.inputs, [part.size for part in parts]))
        tensors = {
            name: next(views).view(value.shape) for name in TENSORS if (value := getattr(rows, name)) is not None
        }
        self.rows = dataclasses.replace(rows, **tensors)  # type: ignore[arg-type]
        self.point = point
        if point.seeds:
            seeds, scales = next(views), next(views).view(torch.float32)[: len(point.probes)].view(-1, 1)
            self.point = Point.in_memory(len(point.probes), seeds, scales)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.staging = Staging(self.inputs)
        self.scores = torch.empty(0)
        self.met: set[CapturedMove] = set()
        self.after: dict[CapturedMove, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.held: tuple[Rows, tuple[Probe, ...]] | None = None
        """What the inputs are, or will be when the device has done what it was told before."""

    def send(self, rows: Rows, point: Point) -> None:
        if self.held is None or self.held[0] is not rows or self.held[1] != point.probes:
            self.staging.send(_parts(rows, point))
            self.held = rows, point.probes

    def forward(self) -> Tensor:
        with self.engine.population.at(self.point):
            return self.engine.forward(self.rows, self.batch)

    def capture(self, pool: Any) -> None:
        self.graph, self.scores = self._captured(pool, None)
        self.uses = self.engine.population.scratch  # the graph writes there even if a larger one takes its place

    def run(self) -> Tensor:
        """Scores on the device; the next run of this shape overwrites them."""
        if self.graph is None:
            return self.forward()
        self.graph.replay()
        return self.scores

    def run_after(self, move: CapturedMove, pool: Any) -> Tensor:
        """The same behind an update that waits, in one launch: each takes the host as long as many small kernels run."""
        if move not in self.after:
            self.after[move] = self._captured(pool, move)
        graph, scores = self.after[move]
        graph.replay()
        move.staging.copied.record()
        return scores

    def _captured(self, pool: Any, move: CapturedMove | None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool), masks_as_outside():
            if move is not None:
                move.launch()
            return graph, self.forward()


class CapturedMove:
    """Updates of so many terms: their seeds and coefficients in device memory, and the graph that fetches and reads them."""

    def __init__(self, engine: TorchEngine, terms: int) -> None:
        self.engine = engine
        self.inputs = torch.empty(terms + -(-(terms + 1) // 2), dtype=torch.int64, device=engine.device)
        coefs = self.inputs[terms:].view(torch.float32)[: terms + 1]
        self.move = Move.in_memory(terms, self.inputs[:terms], coefs)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.staging = Staging(self.inputs)

    def capture(self, pool: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.launch()
        self.graph = graph

    def run(self) -> None:
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()
        self.staging.copied.record()

    def launch(self) -> None:
        """Its copy and its kernels, one by one: now, or into the graph that is being captured."""
        self.staging.copy()
        self.engine.population.move(self.move)


class Graphs:
    """The captured shapes of one engine."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self.moves: dict[int, CapturedMove] = {}
        self.done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.refused = ""
        """Why nothing is captured, where the model's forward does not allow it."""
        self._moves = all(t.rank <= LARGEST_RANK for t in engine.trained)
        self._waiting: CapturedMove | None = None
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
        if not terms or not self._moves:
            self.engine.population.apply(update)
            return
        coefs = np.zeros(-(-(terms + 1) // 2) * 2, dtype=np.float32)
        coefs[: terms + 1] = (update.keep, *(coef for _, coef in update.terms))
        seeds = np.array([seed for seed, _ in update.terms], dtype=np.uint64)
        known = terms in self.moves
        if not known:
            self.moves[terms] = CapturedMove(self.engine, terms)
        one = self.moves[terms]
        one.staging.fill([seeds.view(np.int64), coefs.view(np.int64)])
        if known:
            self._capture(one)
        if one.graph is not None and not self.engine.population.large:
            self._waiting = one
        else:
            one.run()

    def _capture(self, one: Captured | CapturedMove) -> None:
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

    def score(self, groups: Sequence[Rows], batch: Batch, points: Sequence[Point], out: Scores) -> None:
        """Launch every micro-batch at every point, then wait once for the scores of all."""
        found = [(point, rows, self._launched(rows, batch, point)) for point in points for rows in groups]
        self.done.record()
        self.engine.prepare_expected()
        self.done.synchronize()
        first = {id(point): number * self.engine.unit.members for number, point in enumerate(points)}
        for point, rows, scores in found:
            start, members = first[id(point)], len(point.probes)
            rows.place(out[start : start + members], scores.numpy().reshape(members, -1, *rows.tail))

    def send(self, rows: Rows, batch: Batch, point: Point) -> None:
        """What will be scored next, to where its graph reads it, behind what the device is doing; if there is a graph."""
        one = self.captured.get(_key(rows, batch, point, self.engine.population.trims))
        if one is not None and one.graph is not None:
            one.send(rows, point)

    def _launched(self, rows: Rows, batch: Batch, point: Point) -> Tensor:
        key = _key(rows, batch, point, self.engine.population.trims)
        known = key in self.captured
        if not known:
            self.captured[key] = Captured(self.engine, rows, batch, point)
            while len(self.captured) > MOST:
                self.captured.popitem(last=False)
        one = self.captured[key]
        self.captured.move_to_end(key)
        one.send(rows, point)
        if known:
            if one.graph is None:
                self.settle()
            self._capture(one)
        scores = self._run(one)
        host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
        return host.copy_(scores, non_blocking=True)

    def _run(self, one: Captured) -> Tensor:
        """Behind the update that waits, if one does: in one launch where that happens again and again."""
        waiting = self._waiting
        if waiting is not None and one.graph is not None and waiting in one.met:
            self._waiting = None
            return one.run_after(waiting, self.pool)
        if waiting is not None:
            one.met.add(waiting)
        self.settle()
        return one.run()


@contextlib.contextmanager
def masks_as_outside() -> Iterator[None]:
    """While a graph is captured, transformers builds every mask, even one that hides nothing and sends attention down a slower
    way. It must not look at a mask's content then, but where there is none it may decide as it always does; and no row of
    ours is several sequences packed into one, for which it would look at the positions."""
    tracing, packed = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices
    masking_utils.is_tracing = lambda tensor=None: tensor is not None and tracing(tensor)
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.is_tracing, masking_utils.find_packed_sequence_indices = tracing, packed


def _parts(rows: Rows, point: Point) -> list[Words]:
    """Everything that changes from step to step, as int64 words in a fixed order."""
    parts = [value.numpy().reshape(-1) for name in TENSORS if (value := getattr(rows, name)) is not None]
    if point.seeds:
        scales = np.zeros(-(-len(point.probes) // 2) * 2, dtype=np.float32)
        for place, probe in enumerate(point.probes):
            scales[place] = sum(scale for _, scale in probe.terms)
        parts += [np.array(point.seeds, dtype=np.uint64).view(np.int64), scales.view(np.int64)]
    return parts


def _key(rows: Rows, batch: Batch, point: Point, trims: bool) -> Hashable:
    return rows.shapes, rows.padded, batch.readout, len(point.probes), len(point.seeds), trims
