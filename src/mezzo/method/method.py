"""A training method as one value: what a step asks of an engine, and what it makes of the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

from mezzo.method.batches import Batches
from mezzo.method.estimators import Estimator
from mezzo.method.objectives import Losses, Objective
from mezzo.method.optimizers import Optimizer
from mezzo.types import DeviceStep, GradientStep, Question, Slope, StepRecord, Update

# One step as a coroutine: it yields questions, is sent each one's answer, and returns the record of the step.
Questions: TypeAlias = Generator[Question | GradientStep, Any, StepRecord]


class Method(Protocol):
    """What the trainer needs of a method."""

    @property
    def looks_ahead(self) -> bool:
        """Whether the first question of a step is a function of its number alone: it may then be asked for before the step
        before it has ended."""
        ...

    @property
    def finished(self) -> str:
        """Why no further step is worth its cost; empty while one is, or where the method cannot tell."""
        ...

    def step(self, step: int) -> Questions:
        """Ask as many questions as the method needs."""
        ...

    def cost(self, record: StepRecord) -> int:
        """The example-forwards of a finished step: forward passes times the examples in each."""
        ...

    def observe(self, record: StepRecord) -> None:
        """See a finished step, also every earlier one when a run is resumed: what a method remembers follows from these."""
        ...


@runtime_checkable
class DeviceMethod(Protocol):
    """What a method has besides, where a device can run its steps by itself."""

    def device_step(self, step: int) -> DeviceStep | None:
        """The same step as a device can run it; None where it cannot."""
        ...

    def conclude(self, step: int, losses: Losses) -> StepRecord:
        """The record of a device step, from the losses that the device found."""
        ...


@dataclass(frozen=True)
class EstimatorMethod:
    """Scores to losses by the objective, losses to slopes by the estimator, slopes to an update by the optimizer."""

    objective: Objective
    estimator: Estimator
    optimizer: Optimizer
    batches: Batches

    looks_ahead = True
    finished = ""

    def step(self, step: int) -> Questions:
        batch = self.batches(step)
        probes = self.estimator.ask(step)
        answer = yield self.objective.question(batch, probes)
        return self.conclude(step, self.objective.losses(answer, batch))

    def conclude(self, step: int, losses: Losses) -> StepRecord:
        slopes = self.estimator.tell(self.estimator.ask(step), losses)
        return make_record(step, losses, slopes, lambda: self.optimizer.update(slopes, step), self.optimizer.lr(step))

    def device_step(self, step: int) -> DeviceStep | None:
        spread = self.estimator.pair_spread
        if not self.objective.on_device or spread is None or (rule := self.optimizer.pair_rule(step, spread)) is None:
            return None
        return DeviceStep(self.batches(step), self.estimator.ask(step), rule)

    def cost(self, record: StepRecord) -> int:
        return len(record.losses) * self._batch_size

    @cached_property
    def _batch_size(self) -> int:
        """The same at every step."""
        return len(self.batches(0))

    def observe(self, record: StepRecord) -> None:
        self.optimizer.observe(record)


def make_record(
    step: int,
    losses: Losses,
    slopes: tuple[Slope, ...],
    update: Callable[[], Update],
    lr: float,
    notes: Mapping[str, float] = {},
) -> StepRecord:
    """The record of a step; without finite losses, slopes and coefficients the step is skipped and moves nothing."""
    values = tuple(slope.value for slope in slopes)
    usable = all(math.isfinite(value) for value in (*losses, *values))
    move = update() if usable else Update()
    if not all(math.isfinite(value) for value in (move.keep, *(coef for _, coef in move.terms))):
        usable, move = False, Update()  # a step too large for the weights
    skipped = "" if usable else "non-finite loss"
    return StepRecord(step, tuple(float(loss) for loss in losses), values, move, lr, skipped, notes)


def answer_questions(
    questions: Questions, question: Question | GradientStep, answer: Callable[[Question | GradientStep], Any]
) -> StepRecord:
    """Run a step's coroutine, whose first question is known, to its end."""
    while True:
        try:
            question = questions.send(answer(question))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
