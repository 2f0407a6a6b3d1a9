"""The CUDA graphs of an engine, one for each shape of a forward that is used repeatedly: a step then launches one graph and reads
a few numbers.

What changes from step to step (tokens, seeds, scales) lies in a device buffer that the graph reads; it is filled by one
asynchronous copy. A shape is captured when it is used for the second time. Graphs share one memory pool, because only one of
them runs at a time, and the least recently used ones are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from mezzo.engines.torch.forward.inputs import PaddedRows
from mezzo.engines.torch.forward.probe_point import ProbePoint
from mezzo.engines.torch.gpu.captured_graph import CapturedForward, CapturedUpdate, number_words
from mezzo.engines.torch.gpu.fused_ops import MAX_RANK
from mezzo.types import Batch, Scores, Update

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine

Forward = TypeVar("Forward", bound=CapturedForward)
# Each takes a few megabytes beside the memory that all share.
MAX_SHAPES = 32


class Graphs:
    """The graphs of one engine."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.pool = torch.cuda.graph_pool_handle()
        self.forwards: OrderedDict[Hashable, CapturedForward] = OrderedDict()
        self.updates: dict[int, CapturedUpdate] = {}
        """By number of terms."""
        self.scores_ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.capture_error = ""
        """Why nothing is captured, where the model's forward does not allow it."""
        self.can_capture_updates = all(t.rank <= MAX_RANK for t in engine.trained)
        self._deferred: CapturedUpdate | None = None
        """An update of small tensors that is launched together with the next forward, unless `flush` comes first."""

    def apply(self, updates: Sequence[Update]) -> None:
        """Apply one update after the other, without waiting for the device."""
        for update in updates:
            self.flush()
            if not update.empty:
                self._apply(update)
            self.engine.population.source.clear_cache()

    def flush(self) -> None:
        """Launch the deferred update, before anything but a graph reads the weights."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred.run()

    def score(
        self, groups: Sequence[PaddedRows], batch: Batch, points: Sequence[tuple[slice, ProbePoint]], out: Scores
    ) -> None:
        """Launch every micro-batch at every point, then wait once for all scores. Each point comes with its place in `out`."""
        launched = [
            (place, len(point.probes), rows, self._launch(rows, batch, point))
            for place, point in points
            for rows in groups
        ]
        self.scores_ready.record()
        if self.engine.pipeline is not None:
            self.engine.pipeline.upload_prefetched()
        self.scores_ready.synchronize()
        for place, members, rows, scores in launched:
            rows.write_scores(out[place], scores.numpy().reshape(members, -1, *rows.tail))

    def prefetch(self, rows: PaddedRows, batch: Batch, point: ProbePoint) -> None:
        """Send the inputs of the next forward to its graph, if it has one, behind what the device is doing."""
        forward = self.forwards.get(shape_key(rows, batch, point, self.engine.forward.trim_last_layer))
        if forward is not None and forward.graph is not None:
            forward.upload(rows, point)

    def get(self, key: Hashable, create: Callable[[], Forward]) -> tuple[Forward, bool]:
        """The forward of this shape, and whether the shape was used before. A new one replaces the least recently used."""
        used_before = key in self.forwards
        if not used_before:
            self.forwards[key] = create()
            while len(self.forwards) > MAX_SHAPES:
                self.forwards.popitem(last=False)
        self.forwards.move_to_end(key)
        return self.forwards[key], used_before  # type: ignore[return-value]

    def capture(self, work: CapturedForward | CapturedUpdate) -> None:
        """Capture a graph, unless there is one. If the model's forward cannot be captured, nothing will be from then on, and
        kernels are launched one by one."""
        if work.graph is not None or self.capture_error:
            return
        try:
            work.capture(self.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            work.graph = None
            self.capture_error = str(error).splitlines()[0]

    def close(self) -> None:
        """Free all graphs and their memory, once the device is done with them."""
        self.flush()
        torch.cuda.synchronize(self.engine.device)
        self.forwards.clear()
        self.updates.clear()
        self.pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph

    def _apply(self, update: Update) -> None:
        terms = len(update.terms)
        if not terms or not self.can_capture_updates:
            self.engine.population.apply(update)
            return
        seeds, coefs = zip(*update.terms, strict=True)
        used_before = terms in self.updates
        if not used_before:
            self.updates[terms] = CapturedUpdate(self.engine, terms)
        captured = self.updates[terms]
        captured.staging.fill(number_words(seeds, (update.keep, *coefs)))
        if used_before:
            self.capture(captured)
        if captured.graph is not None and not self.engine.population.large:
            self._deferred = captured
        else:
            captured.run()

    def _launch(self, rows: PaddedRows, batch: Batch, point: ProbePoint) -> Tensor:
        """Launch a forward and the copy of its scores to the returned tensor in pinned memory."""
        key = shape_key(rows, batch, point, self.engine.forward.trim_last_layer)
        forward, used_before = self.get(key, lambda: CapturedForward(self.engine, rows, batch, point))
        forward.upload(rows, point)
        if used_before:
            if forward.graph is None:
                self.flush()
            self.capture(forward)
        scores = self._run(forward)
        host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
        return host.copy_(scores, non_blocking=True)

    def _run(self, forward: CapturedForward) -> Tensor:
        """Run a forward behind the deferred update, if any: in one launch from the second time on."""
        deferred = self._deferred
        if deferred is not None and forward.graph is not None and deferred in forward.preceding_updates:
            self._deferred = None
            return forward.run_after(deferred, self.pool)
        if deferred is not None:
            forward.preceding_updates.add(deferred)
        self.flush()
        return forward.run()


def shape_key(rows: PaddedRows, batch: Batch, point: ProbePoint, trim_last_layer: bool) -> Hashable:
    """What must agree for one graph to serve two forwards."""
    return rows.shapes, rows.has_padding, batch.readout, len(point.probes), len(point.seeds), trim_last_layer
