"""Slopes to an update: learning-rate schedules, clipping, weight decay. No optimizer holds weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mezzo.errors import ConfigError, nearest
from mezzo.types import FLOAT32_MAX, PairRule, Slope, StepRecord, Update

Schedule = Callable[[int], float]
# The largest number that a weight can be, by how it is stored.
LARGEST = {"float32": FLOAT32_MAX, "bfloat16": 2.0**127 * (2 - 2.0**-7), "float16": 65504.0}

# Each shape maps progress in [0, 1) to a factor of the peak learning rate.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def schedule(shape: str, peak: float, steps: int, warmup: int = 0) -> Schedule:
    """Learning rate by step: linear warm-up over `warmup` steps, then `shape` over the rest."""
    if shape not in SHAPES:
        raise ConfigError(f"unknown schedule {shape!r}{nearest(shape, SHAPES)} (schedules: {', '.join(SHAPES)})")
    if not 0 <= warmup <= steps:
        raise ConfigError(f"warmup must lie between 0 and the {steps} steps of the run, not {warmup}")

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        return peak * SHAPES[shape](min(1.0, (step - warmup) / max(1, steps - warmup)))

    return rate


class Optimizer(Protocol):
    """What a method needs of an optimizer."""

    @property
    def lr(self) -> Schedule:
        """The learning rate by step, for the record."""
        ...

    def update(self, slopes: Sequence[Slope], step: int) -> Update: ...

    def pair_rule(self, step: int, spread: float) -> PairRule | None:
        """The same for one ± pair of probes, as numbers that a device can follow; None where it cannot."""
        ...

    def observe(self, record: StepRecord) -> None:
        """See a finished step. An optimizer's state must be a function of these records, because a resumed run rebuilds it
        from the journal."""
        ...


@dataclass(frozen=True, slots=True)
class Sgd:
    """θ ← (1 − lr·decay)·θ − lr·mean(g·z), with |g| clipped when `clip` is positive.

    A factor above `largest`, which the weights can hold, becomes infinite, and so do coefficients whose sum is above it: the
    step is then skipped."""

    lr: Schedule
    weight_decay: float = 0.0
    clip: float = 0.0
    largest: float = FLOAT32_MAX

    def update(self, slopes: Sequence[Slope], step: int) -> Update:
        rate = self.lr(step)
        coefs = [self._coefficient(slope.value, rate, len(slopes)) for slope in slopes]
        if not sum(map(abs, coefs)) <= self.largest:
            coefs = [math.inf] * len(coefs)
        return Update(tuple((slope.seed, coef) for slope, coef in zip(slopes, coefs, strict=True)), self._keep(rate))

    def pair_rule(self, step: int, spread: float) -> PairRule:
        rate = self.lr(step)
        return PairRule(spread, rate, self.clip, self._keep(rate), self.largest)

    def observe(self, record: StepRecord) -> None:
        """No state."""

    def _keep(self, rate: float) -> float:
        return self._float32(1.0 - rate * self.weight_decay)

    def _coefficient(self, slope: float, rate: float, samples: int) -> float:
        clipped = max(-self.clip, min(self.clip, slope)) if self.clip > 0 else slope
        return self._float32(rate * clipped / samples)

    def _float32(self, value: float) -> float:
        """Rounded to float32; infinite where the weights cannot hold it."""
        return float(np.float32(value)) if abs(value) <= self.largest else value * math.inf
