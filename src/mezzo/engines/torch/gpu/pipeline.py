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

from mezzo.engines.torch.forward.inputs import Rows
from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint
from mezzo.engines.torch.gpu.captured_graph import CapturedForward, Words, parts_of
from mezzo.engines.torch.gpu.graphs import Graphs, key_of
from mezzo.engines.torch.gpu.kernels.device_step import OUTCOME, fits, judge
from mezzo.errors import RunFailed
from mezzo.method.objectives import normalised
from mezzo.types import Probe, Question, Rule, Update

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
        self, engine: TorchEngine, rows: Rows, question: Question, point: ProbePoint, waiting: Waiting, outcome: Tensor
    ) -> None:
        super().__init__(engine, rows, question.batch, point, _beside(rows, question))
        self.waiting, self.outcome = waiting, outcome

    def send_all(self, rows: Rows, question: Question, point: ProbePoint) -> None:
        self.staging.send([*parts_of(rows, point), *_beside(rows, question)])

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
            normalised(self.batch),
        )
        return self.outcome


class Slot:
    """Where the outcome of a step arrives on the host. Two take turns: one is read while the next may arrive."""

    def __init__(self) -> None:
        self.numbers = torch.empty(OUTCOME, dtype=torch.float64, pin_memory=True)
        self.arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.question: Question | None = None

    def fetch(self, outcome: Tensor, question: Question) -> None:
        self.numbers.copy_(outcome, non_blocking=True)
        self.arrived.record()
        self.question = question

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

    def advance(self, now: Question, after: Callable[[], Question] | None) -> npt.NDArray[np.float64] | None:
        if self._moved is not None:
            raise RunFailed("the last step moved the weights and was not recorded: continue with --resume")
        if self._flying is None or not _same(self._flying.question, now):
            self.drop()
            self._flying = self._launched(now, self.slots[0])
        flying, self._flying = self._flying, None
        if flying is None:
            return None
        if after is not None:
            self._flying = self._launched(after(), self.slots[flying is self.slots[0]])
        if self._flying is None:  # else the move is part of what was launched
            self.waiting.make()
            self._forget()
        up, down, keep, coef = flying.read().tolist()
        self._moved = Update(((now.probes[0].terms[0][0], coef),), keep)
        return np.array([up, down])

    def confirmed(self, updates: Sequence[Update]) -> bool:
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

    def _launched(self, question: Question, slot: Slot) -> Slot | None:
        """Everything a step does until its outcome is on its way to the host; None where this question is not one of ours."""
        found = self._shape(question)
        if found is None:
            return None
        rows, point = found
        key = key_of(rows, question.batch, point, self.engine.population.trims)
        one, known = self.graphs.shape(
            ("judged", key), lambda: CapturedStep(self.engine, rows, question, point, self.waiting, self.outcome)
        )
        self.graphs.settle()
        one.send_all(rows, question, point)
        if known:
            self.graphs.capture(one)
        self._left = True
        slot.fetch(one.run(), question)
        return slot

    def _shape(self, question: Question) -> tuple[Rows, ProbePoint] | None:
        """The one micro-batch and the one ± pair of a question that a kernel can judge."""
        batch, probes = question.batch, question.probes
        if question.rule is None or not _is_pair(probes) or batch.readout.kind == "candidates":
            return None
        groups = self.engine.packed(batch)
        if len(groups) > 1 or not fits(groups[0].count, *groups[0].tail):
            return None
        return groups[0], ProbePoint(probes, self.engine.device)


def _is_pair(probes: Sequence[Probe]) -> bool:
    return (
        len(probes) == 2 and all(len(p.terms) == 1 for p in probes) and probes[0].terms[0][0] == probes[1].terms[0][0]
    )


def _same(one: Question | None, other: Question) -> bool:
    return one is not None and one.batch is other.batch and (one.probes, one.rule) == (other.probes, other.rule)


def _beside(rows: Rows, question: Question) -> list[Words]:
    """What the judging reads beside tokens, seeds and scales: the rows' labels and the rule."""
    batch, rule = question.batch, question.rule
    assert rule is not None
    return [batch.labels[rows.places[0]], _numbers(rule)]


def _numbers(rule: Rule) -> Words:
    return np.array([rule.spread, rule.rate, rule.clip, rule.keep]).view(np.int64)
