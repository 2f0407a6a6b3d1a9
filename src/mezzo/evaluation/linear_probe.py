"""Linear probing: multinomial logistic regression on features of a frozen model, the baseline that trains nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mezzo.method import noise
from mezzo.method.objectives import log_sum_exp

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

# Strengths of the L2 penalty, strongest first, of which cross-validation chooses; features have unit variance.
PENALTIES = tuple(10.0**power for power in range(1, -5, -1))
FOLDS = 5
ITERATIONS = 200


def probe_scores(features: Floats, labels: Labels, classes: int, tested: Floats) -> Floats:
    """Log-probabilities [n, classes] of `tested` features by a regression on the labelled ones, whose penalty has the least
    loss in cross-validation; stronger ones win ties."""
    x, rows = _standardize(features, tested)
    folds = min(FOLDS, len(x))
    losses = np.mean([_fold_losses(x, labels, classes, fold) for fold in range(folds)], axis=0)
    weights = _fit_path(x, labels, classes, PENALTIES[: int(np.argmin(losses)) + 1])[-1]
    return _log_probabilities(rows, weights)


def _standardize(features: Floats, tested: Floats) -> list[Floats]:
    """Both with the first's mean removed and its variance made one, in the coordinates that span the first, and a constant:
    what is orthogonal to the examples has weight zero."""
    mean, spread = features.mean(axis=0), features.std(axis=0)
    scaled = [(each - mean) / np.where(spread > 0, spread, 1.0) for each in (features, tested)]
    basis = np.linalg.svd(scaled[0], full_matrices=False)[2].T
    return [np.column_stack([each @ basis, np.ones(len(each))]) for each in scaled]


def _fold_losses(x: Floats, labels: Labels, classes: int, fold: int) -> list[float]:
    """The loss on a held-out fold by penalty."""
    order = noise.order(0, "linear probe", len(x))
    held = order[fold::FOLDS]
    kept = np.setdiff1d(order, held)
    fits = _fit_path(x[kept], labels[kept], classes, PENALTIES)
    return [-float(_log_probabilities(x[held], w)[np.arange(len(held)), labels[held]].mean()) for w in fits]


def _fit_path(x: Floats, labels: Labels, classes: int, penalties: tuple[float, ...]) -> list[Floats]:
    """Weights [features, classes] by penalty, each fit started from the one before, by accelerated gradient descent."""
    weights, found = np.zeros((x.shape[1], classes)), list[Floats]()
    curvature = 0.5 * float(np.linalg.norm(x, 2)) ** 2 / len(x)
    for penalty in penalties:
        ahead, momentum = weights, 1.0
        for _ in range(ITERATIONS):
            gradient = x.T @ (np.exp(_log_probabilities(x, ahead)) - np.eye(classes)[labels]) / len(x)
            gradient[:-1] += penalty * ahead[:-1]  # the constant is not penalised
            moved, following = ahead - gradient / (curvature + penalty), (1 + np.sqrt(1 + 4 * momentum**2)) / 2
            ahead = moved + (momentum - 1) / following * (moved - weights)
            weights, momentum = moved, following
        found.append(weights)
    return found


def _log_probabilities(x: Floats, weights: Floats) -> Floats:
    scores = x @ weights
    return scores - log_sum_exp(scores)
