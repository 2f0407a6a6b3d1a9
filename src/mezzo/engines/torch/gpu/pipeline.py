"""Steps whose device never waits for the host: a graph makes the move of the step before, runs the forward, judges its scores
(`judge`) and leaves the next move in device memory. It is launched while the one before still runs.

A forward that was launched ahead leaves the weights alone; its move is made with the next one, or dropped. So what anybody
sees between two steps are the weights behind the last step that was returned.
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
from mezzo.engines.torch.gpu.captured_graph import CapturedForward, Words, parts_of
from mezzo.engines.torch.gpu.graphs import Graphs, key_of
from mezzo.engines.torch.gpu.kernels.device_step import OUTCOME, fits, judge
from mezzo.errors import RunFailed
from mezzo.method.objectives import is_normalised
from mezzo.types import DeviceStep, PairRule, Probe, Question, Update

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


class Waiting:
    """A move in device memory: written there by a kernel, read there by the next."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.still = torch.zeros(2, dtype=torch.int64, device=engine.device)
        self.still.view(torch.float32)[2] = 1.0  # keep all, along no direction: bit for bit what was
        self.words = self.still.clone()
        self.coefs = self.words.view(torch.float32)[2:]
        self.move = DeviceUpdate.in_memory(1, self.words[:1], self.coefs)

    def make(self) -> None:
        self.engine.population.move(self.move)

    def drop(self) -> None:
        self.words.copy_(self.still)


class CapturedStep(CapturedForward):
    """A shape whose graph begins with the move that waits and ends with the next one."""

    def __init__(
        self,
        engine: TorchEngine,
        rows: PaddedRows,
        step: DeviceStep,
        point: ProbePoint,
        waiting: Waiting,
        outcome: Tensor,
    ) -> None:
        super().__init__(engine, rows, step.batch, point, _beside(rows, step))
        self.waiting, self.outcome = waiting, outcome

    def send_all(self, rows: PaddedRows, step: DeviceStep, point: ProbePoint) -> None:
        self.staging.send([*parts_of(rows, point), *_beside(rows, step)])

    def forward(self) -> Tensor:
        self.waiting.make()
        scores, (labels, rule) = super().forward(), self.beside
        judge(
            scores.contiguous(),
            labels,
            rule.view(torch.float64),
            self.point.keys,
            (self.waiting.words, self.waiting.coefs),
            self.outcome,
            is_normalised(self.batch),
        )
        return self.outcome


class Slot:
    """Where the outcome of a step arrives on the host. Two take turns: one is read while the next may arrive."""

    def __init__(self) -> None:
        self.numbers = torch.empty(OUTCOME, dtype=torch.float64, pin_memory=True)
        self.arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.step: DeviceStep | None = None

    def fetch(self, outcome: Tensor, step: DeviceStep) -> None:
        self.numbers.copy_(outcome, non_blocking=True)
        self.arrived.record()
        self.step = step

    def read(self) -> npt.NDArray[np.float64]:
        self.arrived.synchronize()
        return self.numbers.numpy().copy()


class Pipeline:
    """The step that is on its way, and the move that follows from it."""

    def __init__(self, engine: TorchEngine, graphs: Graphs) -> None:
        self.engine, self.graphs = engine, graphs
        self.waiting = Waiting(engine)
        self.outcome = torch.zeros(OUTCOME, dtype=torch.float64, device=engine.device)
        self.slots = (Slot(), Slot())
        self._flying: Slot | None = None
        self._left = False
        """True where a move is in device memory that nothing has made yet."""
        self._moved: Update | None = None
        """What the weights were moved by and nobody has confirmed: it is not in the journal yet."""
        self._expected: Callable[[], Question] | None = None

    def run(
        self, step: DeviceStep, following: Callable[[], DeviceStep | None] | None
    ) -> npt.NDArray[np.float64] | None:
        if self.engine.frozen_cache or not self.graphs.moves_by_kernels:
            return None
        with torch.no_grad(), self.engine.explain_out_of_memory(len(step.probes)):
            return self._run(step, following)

    def _run(
        self, now: DeviceStep, following: Callable[[], DeviceStep | None] | None
    ) -> npt.NDArray[np.float64] | None:
        if self._moved is not None:
            raise RunFailed("the last step moved the weights and was not recorded: continue with --resume")
        if self._flying is None or not _same(self._flying.step, now):
            self.drop()
            self._flying = self._launched(now, self.slots[0])
        flying, self._flying = self._flying, None
        if flying is None:
            return None
        after = following() if following is not None else None
        if after is not None:
            self._flying = self._launched(after, self.slots[flying is self.slots[0]])
        if self._flying is None:  # else the move is part of what was launched
            self.waiting.make()
            self._forget()
        up, down, keep, coef = flying.read().tolist()
        self._moved = Update(((now.probes[0].terms[0][0], coef),), keep)
        return np.array([up, down])

    def prefetch(self, question: Callable[[], Question]) -> None:
        self._expected = question

    def prepare(self) -> None:
        """Lay out the announced question and send it to the device, which is busy meanwhile."""
        if self._expected is not None:
            question, self._expected = self._expected(), None
            groups = self.engine.padded_rows(question.batch)
            if len(groups) == 1:
                self.graphs.send(groups[0], question.batch, self.engine.probe_points(question.probes)[0])

    def confirm(self, updates: Sequence[Update]) -> bool:
        """True where the weights were moved by this already. Where not, they will be: what is on its way is dropped."""
        moved, self._moved = self._moved, None
        if moved is None:
            self.drop()
            return False
        if list(updates) != [moved] and not (moved.empty and all(update.empty for update in updates)):
            raise RunFailed(
                f"{self.engine.device} moved the weights by {moved}, but its losses say {list(updates)}; "
                "the journal holds the run up to here: continue with --resume"
            )
        return True

    def drop(self) -> None:
        """What was begun does not count: the weights change, or another question comes."""
        self._flying = None
        if self._left:
            self._forget()

    def _forget(self) -> None:
        self.waiting.drop()
        self._left = False

    def _launched(self, step: DeviceStep, slot: Slot) -> Slot | None:
        """Everything a step does until its outcome is on its way to the host; None where this question is not one of ours."""
        found = self._shape(step)
        if found is None:
            return None
        rows, point = found
        key = key_of(rows, step.batch, point, self.engine.forward.trim_last_layer)
        one, known = self.graphs.shape(
            ("judged", key), lambda: CapturedStep(self.engine, rows, step, point, self.waiting, self.outcome)
        )
        self.graphs.settle()
        one.send_all(rows, step, point)
        if known:
            self.graphs.capture(one)
        self._left = True
        slot.fetch(one.run(), step)
        return slot

    def _shape(self, step: DeviceStep) -> tuple[PaddedRows, ProbePoint] | None:
        """The one micro-batch and the one ± pair of a question that a kernel can judge."""
        batch, probes = step.batch, step.probes
        if not _is_pair(probes) or batch.readout.kind == "candidates":
            return None
        groups = self.engine.padded_rows(batch)
        if len(groups) > 1 or not fits(groups[0].count, *groups[0].tail):
            return None
        return groups[0], ProbePoint(probes, self.engine.device)


def _is_pair(probes: Sequence[Probe]) -> bool:
    return (
        len(probes) == 2 and all(len(p.terms) == 1 for p in probes) and probes[0].terms[0][0] == probes[1].terms[0][0]
    )


def _same(one: DeviceStep | None, other: DeviceStep) -> bool:
    return one is not None and one.batch is other.batch and (one.probes, one.rule) == (other.probes, other.rule)


def _beside(rows: PaddedRows, step: DeviceStep) -> list[Words]:
    """What the judging reads beside tokens, seeds and scales: the rows' labels and the rule."""
    return [step.batch.labels[rows.places[0]], _numbers(step.rule)]


def _numbers(rule: PairRule) -> Words:
    return np.array([rule.spread, rule.rate, rule.clip, rule.keep]).view(np.int64)
