"""Stochastic rounding of `mezzo.method.rounding` on tensors of any device, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def store(target: Tensor, values: Tensor, random: Tensor) -> None:
    """Write float32 `values` into 16-bit `target`; `random` holds each element's sixteen bits as bytes, and is used up."""
    pattern = values.view(torch.int32)
    lift = random.view(torch.int16).int().bitwise_and_(0xFFFF)
    if target.dtype == torch.bfloat16:
        found = lift.add_(pattern).bitwise_right_shift_(16)
    else:
        found = _half(values, pattern, lift)
    target.view(torch.int16).copy_(found)  # keeps the lower half of each int32


def _half(values: Tensor, pattern: Tensor, lift: Tensor) -> Tensor:
    size = pattern & 0x7FFF_FFFF
    normal = ((size + (lift >> 3)) >> 13).sub_(112 << 10)
    tiny = size < 0x3880_0000
    fixed = values.abs().masked_fill_(~tiny, 0).mul_(2.0**40).int()
    half = torch.where(tiny, (fixed + lift) >> 16, normal).clamp_(max=0x7C00)
    half = half.masked_fill_(size > 0x7F80_0000, 0x7E00)
    return half.bitwise_or_((pattern >> 16) & 0x8000)
