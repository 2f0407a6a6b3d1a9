"""Stochastic rounding of `mezzo.method.rounding` on tensors of any device, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def store_rounded(target: Tensor, values: Tensor, random: Tensor) -> None:
    """Round float32 `values` into 16-bit `target`; `random` holds 16 bits an element as bytes, and is overwritten."""
    pattern = values.view(torch.int32)
    bits = random.view(torch.int16).int().bitwise_and_(0xFFFF)
    if target.dtype == torch.bfloat16:
        stored = bits.add_(pattern).bitwise_right_shift_(16)
    else:
        stored = _round_to_float16(values, pattern, bits)
    target.view(torch.int16).copy_(stored)  # keeps the lower half of each int32


def _round_to_float16(values: Tensor, pattern: Tensor, bits: Tensor) -> Tensor:
    magnitude = pattern & 0x7FFF_FFFF
    normal = ((magnitude + (bits >> 3)) >> 13).sub_(112 << 10)
    subnormal = magnitude < 0x3880_0000
    fixed_point = values.abs().masked_fill_(~subnormal, 0).mul_(2.0**40).int()
    half = torch.where(subnormal, (fixed_point + bits) >> 16, normal).clamp_(max=0x7C00)
    half = half.masked_fill_(magnitude > 0x7F80_0000, 0x7E00)
    return half.bitwise_or_((pattern >> 16) & 0x8000)
