"""The size of the perturbation for rewards of generated text, found by trying: too large a one breaks the model, and all
members of a population write nonsense of the same reward.

Where a model breaks differs by a factor of a few, and there suddenly. The perplexity of the held-out text shows it, whatever the
reward is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mezzo.engines.base import Engine
from mezzo.method.noise import step_seed
from mezzo.runs.setup import Setup
from mezzo.types import Probe

# Directions that are tried, and how many times the model's own perplexity they may have, on geometric average. A model of 1.5B
# learned countdown where it was 1.06 times and learned nothing where it was 1.3 times: texts at such probes are worse than at θ.
DIRECTIONS, MOST_RISE = 4, 1.2
MOST_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class EpsTest:
    """What was tried, the largest first; the last one is chosen."""

    sizes: tuple[float, ...]
    rises: tuple[float, ...]
    """The perplexity at each, as a multiple of the model's own."""

    @property
    def chosen(self) -> float:
        return self.sizes[-1]

    def describe(self) -> str:
        tried = ", ".join(f"{rise:.3g} times at {size:g}" for size, rise in zip(self.sizes, self.rises, strict=True))
        return f"eps {self.chosen:g}, by the perplexity of the held-out text at θ+εz: {tried}; at most {MOST_RISE:g} is wanted"


def find_eps(setup: Setup, engine: Engine) -> EpsTest:
    """Halve the setup's eps until its probes leave the model intact. The weights stay as they are."""
    size, sizes, rises = setup.config.eps, list[float](), list[float]()
    assert size is not None
    seeds = [step_seed(setup.config.seed, 0, number) for number in range(DIRECTIONS)]
    while not rises or (not rises[-1] <= MOST_RISE and len(rises) <= MOST_HALVINGS):
        probes = (Probe(), *(Probe(((seed, size),)) for seed in seeds))
        scores = np.asarray(engine.score(setup.held_out, probes), dtype=np.float64)[:, :, 0].mean(axis=1)
        difference = float(scores[0] - scores[1:].mean())
        sizes.append(size)
        rises.append(math.exp(min(difference, 700.0)) if math.isfinite(difference) else math.inf)
        size /= 2
    return EpsTest(tuple(sizes), tuple(rises))
