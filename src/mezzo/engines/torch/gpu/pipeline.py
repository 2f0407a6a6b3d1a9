"""Steps whose device never waits for the host: a graph applies the update of the step before, runs the forward, computes losses
and update from its scores (`device_step`) and leaves the update in device memory. It is launched while the one before still runs.

A step that was launched early does not change the weights by itself: its update is applied by the graph of the next step, or
discarded. Between two steps the weights are therefore those after the last step that `run` returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.engines.torch.forward.inputs import PaddedRows
from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint
from mezzo.engines.torch.gpu.captured_graph import CapturedForward, Words, input_words
from mezzo.engines.torch.gpu.graphs import Graphs, shape_key
from mezzo.engines.torch.gpu.kernels.device_step import OUTCOME_SIZE, compute_update, fits_in_kernel
from mezzo.errors import RunFailed
from mezzo.method.objectives import is_normalised
from mezzo.types import DeviceStep, Probe, Question, Update

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine

Losses = npt.NDArray[np.float64]
NextStep = Callable[[], DeviceStep | None]


class PendingUpdate:
    """The update of a step in device memory: written by the step's last kernel, applied by the next graph."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.identity = torch.zeros(2, dtype=torch.int64, device=engine.device)
        self.identity.view(torch.float32)[2] = 1.0  # keep 1 and coefficient 0: no bit of the weights changes
        self.words = self.identity.clone()
        """The seed; keep and the coefficient, as two float32."""
        self.coefs = self.words.view(torch.float32)[2:]
        self.update = DeviceUpdate.in_memory(1, self.words[:1], self.coefs)

    def apply(self) -> None:
        self.engine.population.apply_on_device(self.update)

    def discard(self) -> None:
        self.words.copy_(self.identity)


class CapturedStep(CapturedForward):
    """A shape whose graph begins by applying the pending update and ends by writing the next one."""

    def __init__(self, pipeline: Pipeline, rows: PaddedRows, step: DeviceStep, point: ProbePoint) -> None:
        super().__init__(pipeline.engine, rows, step.batch, point, _labels_and_rule(rows, step))
        self.pending, self.outcome = pipeline.pending, pipeline.outcome

    def upload_step(self, rows: PaddedRows, step: DeviceStep, point: ProbePoint) -> None:
        self.staging.upload([*input_words(rows, point), *_labels_and_rule(rows, step)])

    def forward(self) -> Tensor:
        self.pending.apply()
        scores, (labels, rule) = super().forward().contiguous(), self.extra_inputs
        update, normalised = (self.pending.words, self.pending.coefs), is_normalised(self.batch)
        compute_update(scores, labels, rule.view(torch.float64), self.point.keys, update, self.outcome, normalised)
        return self.outcome


class OutcomeBuffer:
    """Where the outcome of a step arrives on the host. Two take turns: one is read while the other may be written."""

    def __init__(self) -> None:
        self.numbers = torch.empty(OUTCOME_SIZE, dtype=torch.float64, pin_memory=True)
        self.arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.step: DeviceStep | None = None

    def fetch(self, outcome: Tensor, step: DeviceStep) -> None:
        self.numbers.copy_(outcome, non_blocking=True)
        self.arrived.record()
        self.step = step

    def read(self) -> list[float]:
        self.arrived.synchronize()
        return self.numbers.tolist()  # type: ignore[no-any-return]


class Pipeline:
    """The `StepPipeline` of a `TorchEngine`: the step in flight, and the update that follows from it."""

    def __init__(self, engine: TorchEngine, graphs: Graphs) -> None:
        self.engine, self.graphs = engine, graphs
        self.pending = PendingUpdate(engine)
        self.outcome = torch.zeros(OUTCOME_SIZE, dtype=torch.float64, device=engine.device)
        self.buffers = (OutcomeBuffer(), OutcomeBuffer())
        self._in_flight: OutcomeBuffer | None = None
        self._is_pending = False
        """True while device memory holds, or will hold, an update that has not been applied."""
        self._unconfirmed: Update | None = None
        """The update that the device has applied and that is not in the journal yet."""
        self._announced: Callable[[], Question] | None = None

    def run(self, step: DeviceStep, following: NextStep | None) -> Losses | None:
        if self.engine.frozen_cache or not self.graphs.can_capture_updates:
            return None
        with torch.no_grad(), self.engine.explain_out_of_memory(len(step.probes)):
            return self._run(step, following)

    def _run(self, step: DeviceStep, following: NextStep | None) -> Losses | None:
        if self._unconfirmed is not None:
            raise RunFailed("the last step moved the weights and was not recorded: continue with --resume")
        if self._in_flight is None or not _is_same(self._in_flight.step, step):
            self.cancel()
            self._in_flight = self._launch(step, self.buffers[0])
        current, self._in_flight = self._in_flight, None
        if current is None:
            return None
        next_step = following() if following is not None else None
        if next_step is not None:
            self._in_flight = self._launch(next_step, self.buffers[current is self.buffers[0]])
        if self._in_flight is None:  # otherwise its graph applies the update
            self.pending.apply()
            self.cancel()
        up, down, keep, coef = current.read()
        self._unconfirmed = Update(((step.probes[0].terms[0][0], coef),), keep)
        return np.array([up, down])

    def prefetch(self, question: Callable[[], Question]) -> None:
        self._announced = question

    def upload_prefetched(self) -> None:
        """Send the announced question to the device, which is busy meanwhile."""
        if self._announced is not None:
            question, self._announced = self._announced(), None
            groups = self.engine.padded_rows(question.batch)
            if len(groups) == 1:
                self.graphs.prefetch(groups[0], question.batch, self.engine.probe_points(question.probes)[0])

    def confirm(self, updates: Sequence[Update]) -> bool:
        """True if the device has applied this update already. If not, the caller will, and the step in flight is cancelled."""
        applied, self._unconfirmed = self._unconfirmed, None
        if applied is None:
            self.cancel()
            return False
        if list(updates) != [applied] and not (applied.empty and all(update.empty for update in updates)):
            raise RunFailed(
                f"{self.engine.device} moved the weights by {applied}, but its losses say {list(updates)}; "
                "the journal holds the run up to here: continue with --resume"
            )
        return True

    def cancel(self) -> None:
        """Discard the step in flight, because the weights change or another step is run, and the pending update."""
        self._in_flight = None
        if self._is_pending:
            self.pending.discard()
            self._is_pending = False

    def _launch(self, step: DeviceStep, buffer: OutcomeBuffer) -> OutcomeBuffer | None:
        """Launch a step and the copy of its outcome to the host; None if the device cannot run this step.

        It runs one micro-batch at one ± pair.
        """
        if not _is_pair(step.probes) or step.batch.readout.kind == "candidates":
            return None
        rows, *others = self.engine.padded_rows(step.batch)
        if others or not fits_in_kernel(rows.count, *rows.tail):
            return None
        point = ProbePoint(step.probes, self.engine.device)
        key = "step", shape_key(rows, step.batch, point, self.engine.forward.trim_last_layer)
        captured, used_before = self.graphs.get(key, lambda: CapturedStep(self, rows, step, point))
        self.graphs.flush()
        captured.upload_step(rows, step, point)
        if used_before:
            self.graphs.capture(captured)
        self._is_pending = True
        buffer.fetch(captured.run(), step)
        return buffer


def _is_pair(probes: Sequence[Probe]) -> bool:
    return (
        len(probes) == 2 and all(len(p.terms) == 1 for p in probes) and probes[0].terms[0][0] == probes[1].terms[0][0]
    )


def _is_same(step: DeviceStep | None, other: DeviceStep) -> bool:
    return step is not None and step.batch is other.batch and (step.probes, step.rule) == (other.probes, other.rule)


def _labels_and_rule(rows: PaddedRows, step: DeviceStep) -> list[Words]:
    """What a step reads beside tokens, seeds and scales."""
    rule = step.rule
    numbers = np.array([rule.spread, rule.rate, rule.clip, rule.keep, rule.largest])
    return [step.batch.labels[rows.places[0]], numbers.view(np.int64)]
