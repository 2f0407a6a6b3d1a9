"""A learning rate for spsa, found by trying: rates of another model, task or space are asleep here, or diverge.

The slopes of the first steps are measured without moving. Their moves together, at ever larger rates, are then scored on other
examples: at small rates the loss falls in proportion, at large ones it rises. A rate well below the best one is safe
for a whole run, in which the same moves are made one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mezzo.engines.base import Engine
from mezzo.errors import RunFailed
from mezzo.method.batches import ExampleStream
from mezzo.method.estimators import Spsa
from mezzo.method.objectives import Losses, Objective
from mezzo.runs.setup import Setup
from mezzo.types import Batch, Probe, Slope

# Directions that are measured, and examples that judge the rates.
DIRECTIONS, JUDGED = 32, 128
# The rates tried are a factor of two apart. At the first one all moves together are half as long as a probe's perturbation.
RATES, FIRST_LENGTH = 12, 0.5
# The best rate is divided by this. Later steps have smaller slopes and as much noise, and a run makes more of them.
CAUTION = 4


@dataclass(frozen=True, slots=True)
class RangeTest:
    """What was tried."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    before: float

    @property
    def best(self) -> int:
        return int(np.argmin([loss if math.isfinite(loss) else math.inf for loss in self.losses]))

    @property
    def chosen(self) -> float:
        return float(f"{self.rates[self.best] / CAUTION:.2g}")

    def describe(self) -> str:
        best, rate = self.losses[self.best], self.rates[self.best]
        if not best < self.before:
            return (
                f"lr {self.chosen:g}: none of {len(self.rates)} rates from {self.rates[0]:.2g} to {self.rates[-1]:.2g} lowered "
                "the loss; give --lr, or larger batches with --batch-size"
            )
        return (
            f"lr {self.chosen:g}: of {len(self.rates)} rates from {self.rates[0]:.2g} to {self.rates[-1]:.2g}, {rate:.2g} "
            f"lowered the loss most, {self.before:.3f} to {best:.3f}; a run takes a quarter of it"
        )


def find_rate(setup: Setup, engine: Engine, objective: Objective) -> RangeTest:
    """Try rates for the run of this setup. The weights stay as they are."""
    config = setup.config
    assert config.eps is not None and config.batch_size is not None
    examples = ExampleStream(setup.train_prompts, setup.readout, config.seed)
    estimator = Spsa(config.seed, config.eps)

    def losses_at(probes: tuple[Probe, ...], batch: Batch) -> Losses:
        question = objective.question(batch, probes)
        if question.generation:
            return objective.losses(engine.generate(batch, probes, question.generation), batch)
        return objective.losses(engine.score(batch, probes), batch)

    slopes: list[Slope] = []
    for step in range(DIRECTIONS):
        probes = estimator.ask(step)
        found = estimator.tell(probes, losses_at(probes, examples.take(step * config.batch_size, config.batch_size)))
        slopes += [slope for slope in found if math.isfinite(slope.value)]
    length = math.hypot(*(slope.value for slope in slopes))
    if not length:
        raise RunFailed(
            f"no learning rate can be found: {DIRECTIONS} directions did not change the loss; give --lr or a larger --eps"
        )
    rates = tuple(FIRST_LENGTH * config.eps / length * 2.0**number for number in range(RATES))
    moves = (Probe(tuple((slope.seed, _float32(-rate * slope.value)) for slope in slopes)) for rate in rates)
    judges = examples.take(DIRECTIONS * config.batch_size, JUDGED)
    before, *after = losses_at((Probe(), *moves), judges).tolist()
    return RangeTest(rates, tuple(after), before)


def _float32(value: float) -> float:
    return float(np.float32(value))
