"""16-bit weights without a float32 master copy: float32 results are stored by stochastic rounding, the same everywhere.

Version 1. A value between two neighbours of the stored type is rounded away from zero with a probability equal to its distance
from the neighbour nearer to zero, so that a step far smaller than their spacing still counts on average. The choice is made by
16 bits that are a function of (seed, tensor name, element index): the stream `NAME/round` under the seed of the update's first
direction, element i taking lane i % 4 of word i // 4. A value that the type can represent is left unchanged.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from mezzo.method import noise
from mezzo.types import Update

VERSION = "stochastic16/1"
Dtype = Literal["bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
Patterns = npt.NDArray[np.uint16]


def stream_name(name: str) -> str:
    """The stream that a tensor's rounding bits are drawn from."""
    return f"{name}/round"


def first_seed(update: Update) -> int:
    """The seed of an update's rounding bits: that of its first term, because an update is rounded once."""
    return update.terms[0][0] if update.terms else 0


def random_bits(seed: int, name: str, start: int, stop: int) -> Patterns:
    """The 16 bits of each element in [start, stop) of a tensor."""
    raw, skip = noise.stream_bytes("gaussian", seed, stream_name(name), start, stop)
    return raw.view("<u2")[skip : skip + stop - start].astype(np.uint16, copy=False)


def round_stochastic(values: noise.Floats, random: Patterns, dtype: Dtype) -> Patterns:
    """Round float32 values to bit patterns of `dtype`, each up in magnitude or not as its random bits say."""
    pattern, bits = values.view(np.uint32), random.astype(np.uint32)
    if dtype == "bfloat16":  # the upper half of a float32: the lower half is compared with all 16 bits
        return ((pattern + bits) >> np.uint32(16)).astype(np.uint16)
    magnitude = pattern & np.uint32(0x7FFF_FFFF)
    normal = ((magnitude + (bits >> np.uint32(3))) >> np.uint32(13)) - np.uint32(
        112 << 10
    )  # 13 bits fewer, exponent rebased
    # Below 2⁻¹⁴ the neighbours are 2⁻²⁴ apart; a fixed-point number with 16 more bits is exact as far as it matters.
    subnormal = magnitude < 0x3880_0000
    fixed_point = (np.where(subnormal, np.abs(values), np.float32(0)) * np.float32(2.0**40)).astype(np.uint32)
    half = np.where(subnormal, (fixed_point + bits) >> np.uint32(16), normal)
    half = np.where(magnitude > 0x7F80_0000, 0x7E00, np.minimum(half, 0x7C00))  # NaN stays NaN; overflow is infinite
    return (half | (pattern >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16)


def to_float32(patterns: Patterns, dtype: Dtype) -> noise.Floats:
    """The exact values of bit patterns."""
    if dtype == "bfloat16":
        return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return patterns.view(np.float16).astype(np.float32)
