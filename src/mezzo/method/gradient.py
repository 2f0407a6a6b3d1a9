"""The gradient baseline: AdamW on the cross-entropy of each batch, which training by forward passes is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from mezzo.method.batches import Batches
from mezzo.method.method import Questions
from mezzo.method.optimizers import Schedule
from mezzo.types import GradientStep, StepRecord, Update

# A backward pass costs about two forward passes.
PASSES = 3


@dataclass(frozen=True)
class GradientMethod:
    """An engine moves the weights by itself: a record has the loss and the gradient's norm, which is the slope along it, and
    no update that a replay could repeat."""

    lr: Schedule
    batches: Batches
    weight_decay: float = 0.0

    looks_ahead = False
    finished = ""

    def step(self, step: int) -> Questions:
        rate = self.lr(step)
        loss, norm = yield GradientStep(self.batches(step), rate, self.weight_decay)
        skipped = "" if math.isfinite(loss) and math.isfinite(norm) else "non-finite loss"
        return StepRecord(step, (loss,), (norm,), Update(), rate, skipped)

    def cost(self, record: StepRecord) -> int:
        return PASSES * self._batch_size

    @cached_property
    def _batch_size(self) -> int:
        return len(self.batches(0))

    def observe(self, record: StepRecord) -> None:
        """No memory: the optimizer's moments are in the engine."""
