"""Evolution strategies: rewards of generated text at ± pairs of probes to one move, whatever the scale of the rewards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mezzo.method.batches import Batches
from mezzo.method.estimators import Spsa
from mezzo.method.method import Questions, make_record
from mezzo.method.optimizers import Optimizer
from mezzo.types import Batch, Probe, Question, Rewards, Slope, StepRecord

Values = npt.NDArray[np.float64]


class TextObjective(Protocol):
    """What the method needs of an objective: the question, and the rewards of the texts that answer it."""

    def question(self, batch: Batch, probes: tuple[Probe, ...]) -> Question: ...

    def rewards(self, answer: Any, batch: Batch) -> Rewards: ...


def rank_shares(values: Values) -> Values:
    """Ranks over the members (axis 0), from −½ to ½; equal values share the mean of their ranks."""
    lower = (values[:, None] > values[None]).sum(axis=1)
    equal = (values[:, None] == values[None]).sum(axis=1)
    return (lower + (equal - 1) / 2) / max(1, len(values) - 1) - 0.5


# From rewards[member, prompt] to those that count. What follows divides by the spread of the members.
SHAPINGS: dict[str, Callable[[Values], Values]] = {
    "zscore": lambda rewards: rewards,
    "rank": rank_shares,
    "none": lambda rewards: rewards,
}


@dataclass(frozen=True)
class EvolutionStrategies:
    """Rewards are shaped, and each direction is weighted by half the difference of its pair. What a prompt adds to all members
    alike, because it is easy, say, is not in the difference. `zscore` and `rank` divide by the standard deviation of the
    population, so that --lr means the same for every reward; `none` follows the plain slopes, as SPSA does."""

    objective: TextObjective
    estimator: Spsa
    optimizer: Optimizer
    batches: Batches
    shaping: str = "zscore"

    looks_ahead = True
    finished = ""

    def step(self, step: int) -> Questions:
        batch = self.batches(step)
        answer = yield self.objective.question(batch, self.estimator.ask(step))
        return self.conclude(step, self.objective.rewards(answer, batch))

    def conclude(self, step: int, rewards: Rewards) -> StepRecord:
        values = rewards.values.mean(axis=2)
        losses = -values.mean(axis=1)
        probes = self.estimator.ask(step)
        slopes = self.estimator.tell(probes, losses)
        weights = slopes if self.shaping == "none" else self._weigh(probes, values)
        notes = _describe(values, slopes, 2 * self.estimator.eps)
        counts = {"tokens": rewards.tokens, "failed": rewards.failed}
        notes |= {name: float(count) for name, count in counts.items() if count}
        return make_record(
            step, losses, slopes, lambda: self.optimizer.update(weights, step), self.optimizer.lr(step), notes
        )

    def _weigh(self, probes: tuple[Probe, ...], values: Values) -> tuple[Slope, ...]:
        """Descent goes along minus the weight, so a better + member has a negative one."""
        fitness = SHAPINGS[self.shaping](values).mean(axis=1)
        spread = float(fitness.std())
        scaled = fitness / spread if spread > 0 else np.zeros_like(fitness)
        pairs = zip(probes[::2], scaled[::2], scaled[1::2], strict=True)
        return tuple(Slope(plus.terms[0][0], -(float(up) - float(down)) / 2) for plus, up, down in pairs)

    def cost(self, record: StepRecord) -> int:
        """A generated text counts as one example-forward."""
        question = self._question
        draws = question.generation.draws if question.generation else 1
        return len(record.losses) * len(question.batch) * draws

    @cached_property
    def _question(self) -> Question:
        return self.objective.question(self.batches(0), self.estimator.ask(0))

    def observe(self, record: StepRecord) -> None:
        self.optimizer.observe(record)


def _describe(values: Values, slopes: tuple[Slope, ...], distance: float) -> dict[str, float]:
    """The mean reward; and the root mean squares of the slopes and of their standard errors, which the prompts tell."""
    notes = {"reward": float(values.mean()), "slope": math.sqrt(float(np.mean([slope.value**2 for slope in slopes])))}
    if values.shape[1] > 1:
        differences = values[::2] - values[1::2]
        errors = differences.std(axis=1, ddof=1) / math.sqrt(values.shape[1]) / distance
        notes["slope_error"] = math.sqrt(float(np.mean(errors**2)))
    return notes
