"""From the scores of a ± pair to its losses and its update, on the device: `cross_entropy`, `Spsa.tell` and `Sgd.update` in one
kernel.

In float64 as on the host. After the two losses it does the same operations in the same order, so that the host computes the same
update from them, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Scores of one member that the kernel can hold, with rows and classes each rounded up to a power of two.
MAX_SCORES = 8192
# Numbers of an outcome: both losses, keep and the coefficient.
OUTCOME_SIZE = 4


@triton.jit
def _mean_loss(scores, row, real, column, label, ROWS: tl.constexpr, CLASSES: tl.constexpr, NORMALISED: tl.constexpr):
    """Mean negative log-probability of the labels."""
    offset = row[:, None] * CLASSES + column[None, :]
    logits = tl.load(scores + offset, mask=real[:, None] & (column < CLASSES)[None, :], other=0.0).to(tl.float64)
    logits = tl.where((column < CLASSES)[None, :], logits, float("-inf"))
    log_probability = tl.sum(tl.where(column[None, :] == label[:, None], logits, 0.0), 1)
    if not NORMALISED:
        top = tl.max(logits, 1)
        log_probability -= top + tl.log(tl.sum(tl.exp(logits - top[:, None]), 1))
    return -(tl.sum(tl.where(real, log_probability, 0.0), 0) / ROWS)


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")


@triton.jit
def _compute_update(scores, labels, rule, seed, update_seed, update_coefs, outcome,
                    ROWS: tl.constexpr, CLASSES: tl.constexpr, NORMALISED: tl.constexpr,
                    PADDED_ROWS: tl.constexpr, PADDED_CLASSES: tl.constexpr):  # fmt: skip
    row, column = tl.arange(0, PADDED_ROWS), tl.arange(0, PADDED_CLASSES)
    real = row < ROWS
    label = tl.load(labels + row, mask=real, other=0)
    up = _mean_loss(scores, row, real, column, label, ROWS, CLASSES, NORMALISED)
    down = _mean_loss(scores + ROWS * CLASSES, row, real, column, label, ROWS, CLASSES, NORMALISED)
    spread, rate, clip, rule_keep = tl.load(rule), tl.load(rule + 1), tl.load(rule + 2), tl.load(rule + 3)
    largest = tl.load(rule + 4)
    slope = (up - down) / spread
    clipped = tl.where(clip > 0.0, tl.maximum(-clip, tl.minimum(clip, slope)), slope)
    product = rate * clipped
    usable = (
        _is_finite(up) & _is_finite(down) & _is_finite(slope) & _is_finite(rule_keep) & (tl.abs(product) <= largest)
    )
    coef = tl.where(usable, product, 0.0).to(tl.float32)
    keep = tl.where(usable, rule_keep, 1.0).to(tl.float32)
    tl.store(update_seed, tl.load(seed))
    tl.store(update_coefs, keep)
    tl.store(update_coefs + 1, coef)
    tl.store(outcome, up)
    tl.store(outcome + 1, down)
    tl.store(outcome + 2, keep.to(tl.float64))
    tl.store(outcome + 3, coef.to(tl.float64))


def fits_in_kernel(rows: int, classes: int) -> bool:
    return bool(triton.next_power_of_2(rows) * triton.next_power_of_2(classes) <= MAX_SCORES)


def compute_update(scores: Tensor, labels: Tensor, rule: Tensor, seed: Tensor, update: tuple[Tensor, Tensor],
                   outcome: Tensor, normalised: bool) -> None:  # fmt: skip
    """scores[2·rows, classes] of a pair and labels[rows] → `outcome`, and the seed and coefficients of the update.

    `rule` holds the numbers of a `PairRule` in order; it and `outcome` are float64. Without finite losses, or with a coefficient
    that the weights cannot hold, the update changes nothing. `normalised`: the scores are log-probabilities.
    """
    rows, classes = labels.numel(), scores.shape[-1]
    assert scores.is_contiguous() and scores.shape == (2 * rows, classes) and scores.dtype == torch.float32
    _compute_update[(1,)](
        scores, labels, rule, seed, *update, outcome, ROWS=rows, CLASSES=classes, NORMALISED=normalised,
        PADDED_ROWS=triton.next_power_of_2(rows), PADDED_CLASSES=triton.next_power_of_2(classes),
        enable_fp_fusion=False,
    )  # fmt: skip
