"""Scores as a linear function of a move: the convex problem whose solution is the move.

A batch is scored at θ and at θ + ε·zᵢ. The differences over ε say how every score of every example changes along every
direction, so that the scores at θ + Σ αᵢ·zᵢ are known to first order for any α, and with them the cross-entropy:

    L(α) = mean over examples of CE(base + Σ αᵢ·changesᵢ) + ridge/2 · |α|² + earlier_weight/2 · αᵀHα

H is the curvature of the mean loss at α = 0. The last term stands for the examples of earlier steps: θ suits
them already, and a move costs them about as much curvature as it costs the batch. L is convex in the few numbers α and solved
by Newton's method in milliseconds, without another forward pass. What is solved here is the move of a run, so that its bits must
not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mezzo.method.objectives import Labels, is_normalised, log_sum_exp
from mezzo.method.threads import on_one_thread
from mezzo.types import Batch, Scores

Floats = npt.NDArray[np.float64]
# Newton's iterations of a fit.
MAX_ITERATIONS = 30
# A fit ends when an iteration lowers the loss by no more than this share of it.
TOLERANCE = 1e-5
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


@dataclass(frozen=True)
class ScoreModel:
    """The logits of a batch around the present weights."""

    base: Floats
    """[B, C]"""
    changes: npt.NDArray[np.float32]
    """[n, B, C]: per unit of each direction, in the precision that scores come in."""
    labels: Labels
    earlier_weight: float = 0.0
    """Of the examples that earlier steps have fitted; those of the batch weigh 1."""

    def logits(self, coefficients: Floats) -> Floats:
        change = coefficients.astype(np.float32) @ self.changes.reshape(len(self.changes), -1)
        return self.base + change.reshape(self.base.shape)

    @on_one_thread
    def losses(self, coefficients: Floats) -> Floats:
        return cross_entropies(self.logits(coefficients), self.labels)

    @on_one_thread
    def slopes(self) -> Floats:
        """The derivative of the mean loss along each direction."""
        return self._derivatives(np.zeros(len(self.changes)))[0]

    def mean_curvature(self) -> float:
        """Of the mean loss, along a direction: what a ridge is measured by."""
        chances = _softmax(self.base)
        mean = (self.changes * chances).sum(axis=-1, keepdims=True)
        return float(((self.changes - mean) ** 2 * chances).sum() / len(self.labels) / len(self.changes))

    @on_one_thread
    def fit(self, ridge: float, start: Floats | None = None) -> Floats:
        """The coefficients that minimise the loss, by Newton's method with step halving."""
        alpha = np.zeros(len(self.changes)) if start is None else start
        penalty = self._penalty(ridge)
        value = self._penalised(alpha, penalty)
        for _ in range(MAX_ITERATIONS):
            gradient, hessian = self._derivatives(alpha)
            gradient = gradient + penalty @ alpha
            direction = np.linalg.solve(hessian + penalty, gradient)
            slope, length = float(gradient @ direction), 1.0
            while (lower := self._penalised(alpha - length * direction, penalty)) > value - 1e-4 * length * slope:
                length /= 2
                if length < 1e-4:
                    return alpha
            alpha, gain, value = alpha - length * direction, value - lower, lower
            if gain <= TOLERANCE * abs(value):
                break
        return alpha

    @on_one_thread
    def fit_path(self, ridges: Sequence[float]) -> list[Floats]:
        """The fits for several ridges, each from that for the next larger one."""
        fits: dict[float, Floats] = {}
        alpha = np.zeros(len(self.changes))
        for ridge in sorted(ridges, reverse=True):
            alpha = fits[ridge] = self.fit(ridge, alpha)
        return [fits[ridge] for ridge in ridges]

    @on_one_thread
    def left_out_gains(self, alpha: Floats, ridge: float) -> Floats:
        """What the fit without an example would gain on that example over θ, for each example. To first order around the fit with
        all of them, which takes no further fit: the leverage of an example says how far the others alone get."""
        logits = self.logits(alpha)
        chances = _softmax(logits)
        residual = chances.copy()
        residual[np.arange(len(self.labels)), self.labels] -= 1
        inverse = np.linalg.inv((self._derivatives(alpha)[1] + self._penalty(ridge)) * len(self.labels))
        changes = self.changes.transpose(1, 2, 0).astype(np.float64)  # [B, C, n]
        leverage = changes @ inverse @ changes.transpose(0, 2, 1)
        spread = chances[:, :, None] * np.eye(chances.shape[1]) - chances[:, :, None] * chances[:, None, :]
        shift = np.linalg.solve(np.eye(chances.shape[1]) - leverage @ spread, leverage @ residual[:, :, None])[:, :, 0]
        return self.losses(np.zeros(len(alpha))) - cross_entropies(logits + shift, self.labels)

    @cached_property
    def _curvature(self) -> Floats:
        """Of the mean loss at the present weights, between each two directions."""
        return self._derivatives(np.zeros(len(self.changes)))[1]

    def _penalty(self, ridge: float) -> Floats:
        """The matrix of what is added to the loss, a quadratic function of the coefficients."""
        ridges: Floats = ridge * np.eye(len(self.changes))
        return ridges + self.earlier_weight * self._curvature if self.earlier_weight else ridges

    def _penalised(self, alpha: Floats, penalty: Floats) -> float:
        return float(self.losses(alpha).mean() + alpha @ penalty @ alpha / 2)

    def _derivatives(self, alpha: Floats) -> tuple[Floats, Floats]:
        """Gradient and Hessian of the mean loss. The Hessian decides how fast the iteration converges, not where to."""
        chances = _softmax(self.logits(alpha)).astype(np.float32)
        residual = chances.copy()
        residual[np.arange(len(self.labels)), self.labels] -= 1
        count, flat = len(self.labels), self.changes.reshape(len(alpha), -1)
        gradient = flat @ residual.ravel() / count
        weighted = (self.changes * np.sqrt(chances)).reshape(flat.shape)
        mean = np.einsum("nbc,bc->nb", self.changes, chances)
        hessian = (weighted @ weighted.T - mean @ mean.T) / count
        return gradient.astype(np.float64), hessian.astype(np.float64)


def _softmax(logits: Floats) -> Floats:
    return np.exp(logits - log_sum_exp(logits))  # type: ignore[no-any-return]
