"""A forward or an update as a CUDA graph: inputs in device memory, filled by one asynchronous copy, and the graph that reads
them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

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
Output = TypeVar("Output")


class StagingBuffer:
    """Pinned host memory that a device buffer is filled from without waiting."""

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.pinned = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
        self.values = self.pinned.numpy()
        self.copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """Recorded behind each copy: until then the pinned memory must not change."""

    def upload(self, parts: Sequence[Words]) -> None:
        self.fill(parts)
        self.copy()
        self.copied.record()

    def fill(self, parts: Sequence[Words]) -> None:
        self.copied.synchronize()
        np.concatenate(parts, out=self.values)

    def copy(self) -> None:
        self.target.copy_(self.pinned, non_blocking=True)


class CapturedUpdate:
    """Updates with a fixed number of terms. The graph begins with the copy of their seeds and coefficients."""

    def __init__(self, engine: TorchEngine, terms: int) -> None:
        self.engine = engine
        self.inputs = torch.empty(terms + -(-(terms + 1) // 2), dtype=torch.int64, device=engine.device)
        coefs = self.inputs[terms:].view(torch.float32)[: terms + 1]
        self.update = DeviceUpdate.in_memory(terms, self.inputs[:terms], coefs)
        self.staging = StagingBuffer(self.inputs)
        self.graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any) -> None:
        self.graph, _ = capture(pool, self.launch)

    def run(self) -> None:
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()
        self.staging.copied.record()

    def launch(self) -> None:
        """Launch the copy and the kernels one by one, or add them to the graph that is being captured."""
        self.staging.copy()
        self.engine.population.apply_on_device(self.update)


class CapturedForward:
    """Forwards of one shape."""

    def __init__(
        self, engine: TorchEngine, rows: PaddedRows, batch: Batch, point: ProbePoint, extra: Sequence[Words] = ()
    ) -> None:
        """`extra`: inputs beside those of the forward, for subclasses."""
        self.engine, self.batch = engine, batch
        parts = [*input_words(rows, point), *extra]
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
        self.extra_inputs = tuple(views)
        self.staging = StagingBuffer(self.inputs)
        self._uploaded: tuple[PaddedRows, tuple[Probe, ...]] | None = None
        """What the inputs hold once the device has done what was launched."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output = torch.empty(0)
        self.scratch = torch.empty(0)
        """Where the graph writes perturbed matrices, even when the population has replaced it by a larger one."""
        self.preceding_updates: set[CapturedUpdate] = set()
        """Deferred updates that this forward has followed at least once."""
        self.joint_graphs: dict[CapturedUpdate, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """Graphs of a deferred update and this forward, and their output."""

    def upload(self, rows: PaddedRows, point: ProbePoint) -> None:
        """Send the inputs to the device, unless a prefetch has done so."""
        if self._uploaded is None or self._uploaded[0] is not rows or self._uploaded[1] != point.probes:
            self.staging.upload(input_words(rows, point))
            self._uploaded = rows, point.probes

    def forward(self) -> Tensor:
        with self.engine.population.at(self.point):
            return self.engine.forward(self.rows, self.batch)

    def capture(self, pool: Any) -> None:
        self.graph, self.output = capture(pool, self.forward)
        self.scratch = self.engine.population.scratch

    def run(self) -> Tensor:
        """The output on the device; the next run of this shape overwrites it."""
        if self.graph is None:
            return self.forward()
        self.graph.replay()
        return self.output

    def run_after(self, update: CapturedUpdate, pool: Any) -> Tensor:
        """Run behind a deferred update in one launch: a launch takes the host as long as many small kernels take to run."""
        if update not in self.joint_graphs:

            def launch() -> Tensor:
                update.launch()
                return self.forward()

            self.joint_graphs[update] = capture(pool, launch)
        graph, output = self.joint_graphs[update]
        graph.replay()
        update.staging.copied.record()
        return output


def capture(pool: Any, launch: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
    """Capture what `launch` launches; its result is what every replay overwrites."""
    graph = torch.cuda.CUDAGraph()
    with pause_garbage_collection(), torch.cuda.graph(graph, pool=pool), eager_masking():
        return graph, launch()


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside. If a collection freed the graphs or the pinned memory of an engine that is no longer used while
    another one captures, CUDA would end the capture and torch would abort the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def eager_masking() -> Iterator[None]:
    """Let transformers choose attention masks inside a capture as it does outside.

    Inside a capture it builds every mask, because it must not look at a mask's content. A mask that hides nothing then keeps
    attention from its fast kernels. Where there is no mask, it may decide as usual. It also searches the positions for packed
    sequences, which our rows never are.
    """
    is_tracing, find_packed = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices
    masking_utils.is_tracing = lambda tensor=None: tensor is not None and is_tracing(tensor)
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.is_tracing, masking_utils.find_packed_sequence_indices = is_tracing, find_packed


def input_words(rows: PaddedRows, point: ProbePoint) -> list[Words]:
    """Everything that changes from step to step, as int64 words in a fixed order."""
    parts = [value.numpy().reshape(-1) for name in TENSORS if (value := getattr(rows, name)) is not None]
    if point.seeds:
        scales = np.zeros(-(-len(point.probes) // 2) * 2, dtype=np.float32)
        for member, probe in enumerate(point.probes):
            scales[member] = sum(scale for _, scale in probe.terms)
        parts += [np.array(point.seeds, dtype=np.uint64).view(np.int64), scales.view(np.int64)]
    return parts
