"""A pair's scores to its losses and its move, on the device: `cross_entropy`, `Spsa.tell` and `Sgd.step` in one kernel.

In float64 as on the host, with the same operations in the same order after the two losses: from these the host works out the
same update, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 8192
"""Scores of one member that the kernel holds, each side rounded up to a power of two."""
LARGEST = tl.constexpr(3.4028234663852886e38)
RULE, OUTCOME = 4, 4
"""Numbers of a rule, in the order of `types.PairRule`; and of an outcome: both losses, keep and the coefficient."""


@triton.jit
def _loss(scores, row, real, column, label, ROWS: tl.constexpr, CLASSES: tl.constexpr, NORMALISED: tl.constexpr):
    """Mean negative log-probability of the labels."""
    at = row[:, None] * CLASSES + column[None, :]
    found = tl.load(scores + at, mask=real[:, None] & (column < CLASSES)[None, :], other=0.0).to(tl.float64)
    found = tl.where((column < CLASSES)[None, :], found, float("-inf"))
    own = tl.sum(tl.where(column[None, :] == label[:, None], found, 0.0), 1)
    if not NORMALISED:
        top = tl.max(found, 1)
        own -= top + tl.log(tl.sum(tl.exp(found - top[:, None]), 1))
    return -(tl.sum(tl.where(real, own, 0.0), 0) / ROWS)


@triton.jit
def _finite(value):
    return tl.abs(value) < float("inf")


@triton.jit
def _judge(scores, labels, rule, seed, move_seed, move_coefs, outcome,
           ROWS: tl.constexpr, CLASSES: tl.constexpr, NORMALISED: tl.constexpr,
           MANY: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    row, column = tl.arange(0, MANY), tl.arange(0, WIDE)
    real = row < ROWS
    label = tl.load(labels + row, mask=real, other=0)
    up = _loss(scores, row, real, column, label, ROWS, CLASSES, NORMALISED)
    down = _loss(scores + ROWS * CLASSES, row, real, column, label, ROWS, CLASSES, NORMALISED)
    spread, rate, clip, keep = tl.load(rule), tl.load(rule + 1), tl.load(rule + 2), tl.load(rule + 3)
    slope = (up - down) / spread
    clipped = tl.where(clip > 0.0, tl.maximum(-clip, tl.minimum(clip, slope)), slope)
    wanted = rate * clipped
    usable = _finite(up) & _finite(down) & _finite(slope) & _finite(keep) & (tl.abs(wanted) <= LARGEST)
    coef = tl.where(usable, wanted, 0.0).to(tl.float32)
    kept = tl.where(usable, keep, 1.0).to(tl.float32)
    tl.store(move_seed, tl.load(seed))
    tl.store(move_coefs, kept)
    tl.store(move_coefs + 1, coef)
    tl.store(outcome, up)
    tl.store(outcome + 1, down)
    tl.store(outcome + 2, kept.to(tl.float64))
    tl.store(outcome + 3, coef.to(tl.float64))


def fits(rows: int, classes: int) -> bool:
    return bool(triton.next_power_of_2(rows) * triton.next_power_of_2(classes) <= MOST)


def judge(scores: Tensor, labels: Tensor, rule: Tensor, seed: Tensor, move: tuple[Tensor, Tensor], outcome: Tensor,
          normalised: bool) -> None:  # fmt: skip
    """scores[2·rows, classes] of a pair and labels[rows] → `outcome`, and the seed and coefficients of the move.

    `rule` and `outcome` are float64; a pair without finite losses makes a move that changes nothing.
    """
    rows, classes = labels.numel(), scores.shape[-1]
    assert scores.is_contiguous() and scores.shape == (2 * rows, classes) and scores.dtype == torch.float32
    _judge[(1,)](
        scores, labels, rule, seed, *move, outcome, ROWS=rows, CLASSES=classes, NORMALISED=normalised,
        MANY=triton.next_power_of_2(rows), WIDE=triton.next_power_of_2(classes), enable_fp_fusion=False,
    )  # fmt: skip
