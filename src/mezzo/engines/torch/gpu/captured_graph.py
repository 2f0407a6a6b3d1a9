"""One captured shape: its inputs in device memory, filled by one asynchronous copy, and the graph that reads them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import masking_utils

from mezzo.engines.torch.forward.inputs import TENSORS, PaddedRows
from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint
from mezzo.types import Batch, Probe

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine

Words = npt.NDArray[np.int64]


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


class CapturedForward:
    """One shape: its inputs in device memory, and the graph that reads them once it was captured."""

    def __init__(
        self, engine: TorchEngine, rows: PaddedRows, batch: Batch, point: ProbePoint, beside: Sequence[Words] = ()
    ) -> None:
        self.engine, self.batch = engine, batch
        parts = [*parts_of(rows, point), *beside]
        self.inputs = torch.empty(sum(part.size for part in parts), dtype=torch.int64, device=engine.device)
        views = iter(torch.split(self.inputs, [part.size for part in parts]))
        tensors = {
            name: next(views).view(value.shape) for name in TENSORS if (value := getattr(rows, name)) is not None
        }
        self.rows = dataclasses.replace(rows, **tensors)  # type: ignore[arg-type]
        self.point = point
        if point.seeds:
            seeds, scales = next(views), next(views).view(torch.float32)[: len(point.probes)].view(-1, 1)
            self.point = ProbePoint.in_memory(len(point.probes), seeds, scales)
        self.beside = tuple(views)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.staging = Staging(self.inputs)
        self.scores = torch.empty(0)
        self.met: set[CapturedUpdate] = set()
        self.after: dict[CapturedUpdate, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.held: tuple[PaddedRows, tuple[Probe, ...]] | None = None
        """What the inputs are, or will be when the device has done what it was told before."""

    def send(self, rows: PaddedRows, point: ProbePoint) -> None:
        if self.held is None or self.held[0] is not rows or self.held[1] != point.probes:
            self.staging.send(parts_of(rows, point))
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

    def run_after(self, move: CapturedUpdate, pool: Any) -> Tensor:
        """The same behind an update that waits, in one launch: each takes the host as long as many small kernels run."""
        if move not in self.after:
            self.after[move] = self._captured(pool, move)
        graph, scores = self.after[move]
        graph.replay()
        move.staging.copied.record()
        return scores

    def _captured(self, pool: Any, move: CapturedUpdate | None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool), masks_as_outside():
            if move is not None:
                move.launch()
            return graph, self.forward()


class CapturedUpdate:
    """Updates of so many terms: their seeds and coefficients in device memory, and the graph that fetches and reads them."""

    def __init__(self, engine: TorchEngine, terms: int) -> None:
        self.engine = engine
        self.inputs = torch.empty(terms + -(-(terms + 1) // 2), dtype=torch.int64, device=engine.device)
        coefs = self.inputs[terms:].view(torch.float32)[: terms + 1]
        self.move = DeviceUpdate.in_memory(terms, self.inputs[:terms], coefs)
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


def parts_of(rows: PaddedRows, point: ProbePoint) -> list[Words]:
    """Everything that changes from step to step, as int64 words in a fixed order."""
    parts = [value.numpy().reshape(-1) for name in TENSORS if (value := getattr(rows, name)) is not None]
    if point.seeds:
        scales = np.zeros(-(-len(point.probes) // 2) * 2, dtype=np.float32)
        for place, probe in enumerate(point.probes):
            scales[place] = sum(scale for _, scale in probe.terms)
        parts += [np.array(point.seeds, dtype=np.uint64).view(np.int64), scales.view(np.int64)]
    return parts
