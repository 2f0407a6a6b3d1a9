"""The 16-bit storage of `mezzo.method.rounding` inside Triton kernels, which see 16-bit weights as bit patterns (int16)."""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT32, BFLOAT16, FLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def round_stochastic(values, random, DTYPE: tl.constexpr):
    """Round float32 values to 16-bit patterns by 16 random bits each, as `mezzo.method.rounding.round_stochastic` does."""
    pattern = values.to(tl.uint32, bitcast=True)
    if DTYPE == BFLOAT16:
        rounded = (pattern + random) >> 16
    else:
        magnitude = pattern & 0x7FFFFFFF
        normal = ((magnitude + (random >> 3)) >> 13) - (112 << 10)
        subnormal = magnitude < 0x38800000
        fixed_point = (tl.where(subnormal, tl.abs(values), 0.0) * 1099511627776.0).to(tl.int32).to(tl.uint32)
        rounded = tl.where(subnormal, (fixed_point + random) >> 16, normal)
        rounded = tl.where(rounded > 0x7C00, 0x7C00, rounded)
        rounded = tl.where(magnitude > 0x7F800000, 0x7E00, rounded) | ((pattern >> 16) & 0x8000)
    return rounded.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def to_float32(stored, DTYPE: tl.constexpr):
    """Stored weights in float32."""
    if DTYPE == FLOAT32:
        return stored
    elif DTYPE == BFLOAT16:
        return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float16, bitcast=True).to(tl.float32)
