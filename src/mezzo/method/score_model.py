"""Scores as a linear function of a move: the convex problem whose solution is the move.

A batch is scored at θ and at θ + ε·zᵢ. The differences over ε say how every score of every example changes along every
direction, so that the scores at θ + Σ αᵢ·zᵢ are known to first order for any α, and with them the cross-entropy:

    L(α) = mean over examples of CE(base + Σ αᵢ·changesᵢ) + ridge/2 · |α|²

It is convex in the few numbers α and solved by Newton's method in milliseconds, without another forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mezzo.method import noise
from mezzo.method.objectives import Labels, is_normalised, log_sum_exp
from mezzo.types import Batch, Scores

Floats = npt.NDArray[np.float64]
# Ridges that are tried, relative to the mean curvature along a direction.
RIDGES = 0.01 * 4.0 ** np.arange(8)
FOLDS = 4
# Newton's iterations: those of a fit, and those at each ridge of the path that cross-validation follows.
MAX_ITERATIONS, PATH_ITERATIONS = 30, 2
# The score of a candidate that an example does not have.
ABSENT = -1e30


def logits_of(scores: Scores, batch: Batch) -> Floats:
    """Scores as logits: their softmax gives the probabilities that the loss is about, and absent candidates none.

    Log-probabilities that are not normalised over the candidates, as those of a whole vocabulary, get one more candidate for
    all the rest. Without it their loss would be linear in the scores, and no move too large.
    """
    logits = np.where(np.isneginf(scores), ABSENT, scores.astype(np.float64))
    if not is_normalised(batch):
        return logits
    inside = np.minimum(log_sum_exp(logits), -1e-6)
    return np.concatenate([logits, np.log(-np.expm1(inside))], axis=-1)


def cross_entropies(logits: Floats, labels: Labels) -> Floats:
    """The loss of each example: [..., B, C] to [..., B]."""
    right: Floats = logits[..., np.arange(len(labels)), labels]
    return log_sum_exp(logits)[..., 0] - right


@dataclass(frozen=True, slots=True)
class ScoreModel:
    """The logits of a batch around the present weights."""

    base: Floats
    """[B, C]"""
    changes: Floats
    """[n, B, C]: per unit of each direction."""
    labels: Labels

    def logits(self, coefficients: Floats) -> Floats:
        return self.base + np.tensordot(coefficients, self.changes, 1)

    def losses(self, coefficients: Floats) -> Floats:
        return cross_entropies(self.logits(coefficients), self.labels)

    def slopes(self) -> Floats:
        """The derivative of the mean loss along each direction."""
        return self._derivatives(np.zeros(len(self.changes)))[0]

    def mean_curvature(self) -> float:
        """Of the mean loss, along a direction: what a ridge is measured by."""
        return float(np.trace(self._derivatives(np.zeros(len(self.changes)))[1]) / len(self.changes))

    def take(self, rows: npt.NDArray[np.bool_]) -> ScoreModel:
        return ScoreModel(self.base[rows], self.changes[:, rows], self.labels[rows])

    def fit(self, ridge: float, start: Floats | None = None, iterations: int = MAX_ITERATIONS) -> Floats:
        """The coefficients that minimise the loss, by Newton's method with step halving."""
        alpha = np.zeros(len(self.changes)) if start is None else start
        value = self._penalised(alpha, ridge)
        for _ in range(iterations):
            gradient, hessian = self._derivatives(alpha)
            gradient = gradient + ridge * alpha
            direction = np.linalg.solve(hessian + ridge * np.eye(len(alpha)), gradient)
            slope, length = float(gradient @ direction), 1.0
            while (lower := self._penalised(alpha - length * direction, ridge)) > value - 1e-4 * length * slope:
                length /= 2
                if length < 1e-6:
                    return alpha
            alpha, gain, value = alpha - length * direction, value - lower, lower
            if gain <= 1e-8 * abs(value):
                break
        return alpha

    def fit_path(self, ridges: Sequence[float], iterations: int = MAX_ITERATIONS) -> list[Floats]:
        """The fits for several ridges, each from that for the next larger one."""
        fits: dict[float, Floats] = {}
        alpha = np.zeros(len(self.changes))
        for ridge in sorted(ridges, reverse=True):
            alpha = fits[ridge] = self.fit(ridge, alpha, iterations)
        return [fits[ridge] for ridge in ridges]

    def choose_ridge(self, seed: int) -> tuple[float, float]:
        """The ridge that predicts best what was not fitted, by cross-validation over the examples, and the mean gain that it
        promises there. No forward pass is needed."""
        ridges = (max(self.mean_curvature(), 1e-12) * RIDGES).tolist()
        folds = noise.order(seed, "folds", len(self.labels)) % FOLDS
        losses = np.zeros(len(ridges))
        for fold in range(FOLDS):
            inside, outside = self.take(folds != fold), self.take(folds == fold)
            losses += [outside.losses(alpha).sum() for alpha in inside.fit_path(ridges, PATH_ITERATIONS)]
        best = int(losses.argmin())
        gain = float(cross_entropies(self.base, self.labels).mean() - losses[best] / len(self.labels))
        return ridges[best], gain

    def _penalised(self, alpha: Floats, ridge: float) -> float:
        return float(self.losses(alpha).mean() + ridge / 2 * alpha @ alpha)

    def _derivatives(self, alpha: Floats) -> tuple[Floats, Floats]:
        """Gradient and Hessian of the mean loss."""
        logits = self.logits(alpha)
        chances = np.exp(logits - log_sum_exp(logits))
        residual = chances.copy()
        residual[np.arange(len(self.labels)), self.labels] -= 1
        count = len(self.labels)
        gradient = np.tensordot(self.changes, residual, 2) / count
        centred = self.changes - (self.changes * chances).sum(axis=-1, keepdims=True)
        # The Hessian decides how fast the iteration converges, not where to: single precision is enough, and twice as fast.
        weighted = (centred * np.sqrt(chances / count)).reshape(len(alpha), -1).astype(np.float32)
        return gradient, (weighted @ weighted.T).astype(np.float64)
