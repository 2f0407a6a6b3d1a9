"""Weights of sixteen bits without a master copy: results in float32 are stored by stochastic rounding, the same everywhere.

Version 1. A value between two neighbours of the stored type becomes the one further from zero with the probability of its
distance from the nearer to zero, so that a step far smaller than their spacing still counts on average. Which one it becomes
is decided by sixteen bits that are a function of (seed, tensor name, element index): the stream of `NAME/round` under the seed
of the update's first direction, element i taking lane i % 4 of word i // 4. A value that the type can hold stays what it is.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from mezzo.method import noise
from mezzo.types import Update

VERSION = "stochastic16/1"
Short = Literal["bfloat16", "float16"]
SHORT: tuple[Short, ...] = ("bfloat16", "float16")
Patterns = npt.NDArray[np.uint16]


def stream(name: str) -> str:
    """The name under which a tensor's rounding bits are drawn."""
    return f"{name}/round"


def seed_of(update: Update) -> int:
    """One rounding an update, whatever its terms: their first seed decides."""
    return update.terms[0][0] if update.terms else 0


def bits(seed: int, name: str, start: int, stop: int) -> Patterns:
    """The sixteen bits of each element in [start, stop) of a tensor."""
    raw, skip = noise.packed("gaussian", seed, stream(name), start, stop)
    return raw.view("<u2")[skip : skip + stop - start].astype(np.uint16, copy=False)


def rounded(values: noise.Floats, random: Patterns, dtype: Short) -> Patterns:
    """Float32 values as bit patterns of `dtype`, each rounded up in magnitude or not as its random bits say."""
    pattern, lift = values.view(np.uint32), random.astype(np.uint32)
    if dtype == "bfloat16":  # the upper half of a float32: what is cut off is compared with all sixteen bits
        return ((pattern + lift) >> np.uint32(16)).astype(np.uint16)
    size = pattern & np.uint32(0x7FFF_FFFF)
    normal = ((size + (lift >> np.uint32(3))) >> np.uint32(13)) - np.uint32(112 << 10)  # 13 bits less, another exponent
    # Below 2⁻¹⁴ the neighbours are 2⁻²⁴ apart; a fixed point 16 bits behind that is exact as far as it matters.
    tiny = size < 0x3880_0000
    fixed = (np.where(tiny, np.abs(values), np.float32(0)) * np.float32(2.0**40)).astype(np.uint32)
    half = np.where(tiny, (fixed + lift) >> np.uint32(16), normal)
    half = np.where(
        size > 0x7F80_0000, 0x7E00, np.minimum(half, 0x7C00)
    )  # NaN stays one; what is too large is infinite
    return (half | (pattern >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16)


def widened(patterns: Patterns, dtype: Short) -> noise.Floats:
    """The values of bit patterns, exactly."""
    if dtype == "bfloat16":
        return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return patterns.view(np.float16).astype(np.float32)
