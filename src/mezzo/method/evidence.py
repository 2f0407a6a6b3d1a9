"""Which ridge is right, by what the moves of all steps have gained on examples that were not fitted.

A ridge of 4^-k / examples, in units of the mean curvature along a direction, suits coefficients whose variance is 4^k in these
units, which is a property of model and data and not of the size of a step: one k, the prior, serves all steps, and changes
slowly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mezzo.method.score_model import Floats

# The first step finds the best of PRIORS that leave room for OFFSETS without a forward pass; a step then tries the solutions for
# k + OFFSETS, from the shortest move on, with real ones.
PRIORS, OFFSETS = range(-9, 4), (-2, -1, 0, 1, 2)
# What a step forgets of the evidence before it.
FORGET = 0.25
# Of the moves whose evidence is within so many standard errors of the most, the shortest is taken.
DOUBT = 1.0
# How little the differences between moves may vary between examples, as a share of what moves gain.
LEAST_SPREAD = 0.01
# The notes of a step that keep its evidence.
NOTES = tuple(f"evidence{offset:+d}" for offset in OFFSETS)


@dataclass(frozen=True)
class Evidence:
    """For each of PRIORS, the gains of moves with it, and their variance; no gains before the first step."""

    gains: Mapping[int, float] = field(default_factory=dict)
    variance: float = 0.0

    def add(self, notes: Mapping[str, float], examples: float) -> Evidence:
        """With that of a step with so many examples that were not fitted. Moves with a smaller k than those tried are shorter, by
        the same factor, and so are their gains; of a larger one, no more is known than of the largest tried."""
        middle = int(notes["prior"])
        low, high = middle + OFFSETS[0], middle + OFFSETS[-1]
        found = {middle + offset: notes[name] for offset, name in zip(OFFSETS, NOTES, strict=True)}
        gains = {}
        for prior in PRIORS:
            new = found[min(max(prior, low), high)] * 4.0 ** min(0, prior - low)
            gains[prior] = (1 - FORGET) * self.gains.get(prior, 0.0) + new
        # Each example adds 1, in the units of `weigh_gains`.
        return Evidence(gains, (1 - FORGET) ** 2 * self.variance + examples)

    def likely_prior(self) -> int:
        """The k with the most, which leaves room for OFFSETS."""
        return max(PRIORS[-OFFSETS[0] : -OFFSETS[-1]], key=lambda prior: self.gains[prior])

    def choose_move(self, usable: Sequence[int], middle: int) -> int:
        """The shortest of the usable moves, by their places in OFFSETS, whose gains are within chance of the most."""
        gains = {place: self.gains[middle + OFFSETS[place]] for place in usable}
        least = max(gains.values(), default=0.0) - DOUBT * math.sqrt(self.variance)
        return next((place for place in usable if gains[place] >= least), 0)


def weigh_gains(gains: Floats) -> list[float]:
    """What each move gains over θ, [moves, examples], summed over the examples, in units in which steps can be compared: how much
    the differences between moves vary between examples. The gains of the first steps are far larger than those of the last. A
    move without finite losses loses as much as there are examples."""
    finite = np.array([np.isfinite(row).all() for row in gains])
    sums = np.full(len(gains), -float(gains.shape[1]))
    if finite.any():
        spread = math.sqrt(float((gains[finite] - gains[finite].mean(axis=0)).var(axis=1).mean()))
        # Moves that are nearly the same, or a single one, must not outweigh the evidence of all other steps.
        least = LEAST_SPREAD * float(np.abs(gains[finite]).mean())
        sums[finite] = gains[finite].sum(axis=1) / (max(spread, least) or 1.0)
    return [float(value) for value in sums]
