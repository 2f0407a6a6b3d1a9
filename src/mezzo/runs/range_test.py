"""A learning rate for spsa, found by trying: rates of another model, task or space are asleep here, or diverge.

The slopes of the first steps are measured without moving. Each of their moves is then tried by itself at ever larger rates, on
other examples: at small rates the loss falls in proportion, at large ones it rises. Moves are tried one by one because their
sum goes too far wherever they agree, which a run notices at its next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mezzo.engines.base import Engine
from mezzo.method.batches import ExampleStream
from mezzo.method.estimators import Spsa
from mezzo.method.objectives import Losses, Objective
from mezzo.runs.setup import Setup
from mezzo.types import Batch, Probe, Slope

# Directions that are tried, and examples that judge each.
DIRECTIONS, JUDGED = 16, 16
# The rates are a factor of two apart. At the first one a typical move is an eighth as long as a probe's perturbation.
RATES, FIRST_LENGTH = 16, 0.125
# The best rate is divided by this: a run makes thousands of moves, most of them with smaller slopes and as much noise. The
# best rates of whole runs were a fourth to a seventh.
CAUTION = 5


@dataclass(frozen=True, slots=True)
class RangeTest:
    """What was tried."""

    rates: tuple[float, ...]
    changes: tuple[float, ...]
    """Of the loss by one step, on average over the directions."""

    @property
    def best(self) -> int:
        return int(np.argmin([change if math.isfinite(change) else math.inf for change in self.changes]))

    @property
    def chosen(self) -> float:
        return float(f"{self.rates[self.best] / CAUTION:.2g}")

    def describe(self) -> str:
        tried = f"{len(self.rates)} rates from {self.rates[0]:.2g} to {self.rates[-1]:.2g}"
        if len(self.rates) == 1:
            return f"lr {self.chosen:g}, a guess: no direction changed the loss; give --lr, or a larger --eps or --batch-size"
        if not self.changes[self.best] < 0:
            return (
                f"lr {self.chosen:g}: none of {tried} lowered the loss; give --lr, or larger batches with --batch-size"
            )
        return (
            f"lr {self.chosen:g}: of {tried}, single steps lowered the loss most at {self.rates[self.best]:.2g}; a whole run "
            f"needs a smaller one, a fifth of it"
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

    size = config.batch_size
    slopes: list[Slope] = []
    for step in range(DIRECTIONS):
        probes = estimator.ask(step)
        found = estimator.tell(probes, losses_at(probes, examples.take(step * size, size)))
        slopes += [slope for slope in found if math.isfinite(slope.value)]
    typical = math.sqrt(sum(slope.value**2 for slope in slopes) / DIRECTIONS)
    if (
        not typical
    ):  # as of a metric, where no prediction changed: a first slope of 1 shall move about as far as a probe
        return RangeTest((config.eps,), (0.0,))
    rates = tuple(FIRST_LENGTH * config.eps / typical * 2.0**number for number in range(RATES))
    changes = []
    for number, slope in enumerate(slopes):
        moves = (Probe(((slope.seed, float(np.float32(-rate * slope.value))),)) for rate in rates)
        judges = examples.take(DIRECTIONS * size + number * JUDGED, JUDGED)
        before, *after = losses_at((Probe(), *moves), judges)
        changes.append([loss - before for loss in after])
    return RangeTest(rates, tuple(np.mean(changes, axis=0).tolist()))
