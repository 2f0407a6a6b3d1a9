"""Biases and norms that differ by member, in one pass over the activations each. Vectors are float32, sums are too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engines.torch.gpu.kernels.lowrank import Term

FEW = 8
"""Columns of a thin term that a norm adds: by plain multiplications, which for so few beat feeding the tensor cores."""


@triton.jit
def _norm(x, x_step, residual, bias, gain, shift, out, bias_step, gain_step, shift_step, each, eps,
          t, t_step, up, scales, factor,
          WIDTH: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr,
          CENTRED: tl.constexpr, THIN: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Blocks of ROWS rows belong to one member: `each` is a multiple of ROWS."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    member = first // each
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real = column < WIDTH
    here, at = real[None, :], row[:, None] * WIDTH + column[None, :]
    place = row[:, None] * x_step + column[None, :] if THIN else at
    value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    if THIN:
        scale = tl.load(scales + member) * factor
        for one in tl.static_range(THIN):
            own = tl.load(t + row * t_step + one).to(tl.float32) * scale
            value += own[:, None] * tl.load(up + one * WIDTH + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        value += tl.load(bias + member * bias_step + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        value += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(here, value - (tl.sum(value, 1) / WIDTH)[:, None], 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
    value *= tl.load(gain + member * gain_step + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if SHIFT:
        value += tl.load(shift + member * shift_step + column, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def gelu_of(value, EXACT: tl.constexpr):
    """GELU by the error function. Where the outcome is rounded to sixteen bits, by half of a polynomial that is right to 1.5e-7
    (Abramowitz and Stegun 7.1.26): fewer instructions, of which a root that is right to 2⁻²² saves a division."""
    if EXACT:
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        size = tl.abs(value)
        below = 1.0 + 0.23164188871949554 * size
        t = tl.rsqrt(below * below)
        series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
        return tl.maximum(value, 0.0) - (size * t) * (series * tl.exp2(value * value * -0.7213475204444817))


@triton.jit
def _add_bias(
    y, bias, bias_step, each,
    WIDTH: tl.constexpr, GELU: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks of ROWS rows belong to one member: `each` is a multiple of ROWS."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    vector = tl.load(bias + (row // each) * bias_step + column, mask=real, other=0.0)
    place = y + (row + tl.arange(0, ROWS))[:, None] * WIDTH + column[None, :]
    value = tl.load(place, mask=real[None, :], other=0.0).to(tl.float32) + vector[None, :]
    if GELU:
        value = gelu_of(value, EXACT)
    tl.store(place, value.to(y.dtype.element_ty), mask=real[None, :])


def norm(
    x: Tensor,
    gain: Tensor,
    shift: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    centred: bool = True,
    term: Term | None = None,
) -> Tensor:
    """The norm of x + bias + residual + thin term, with each member's own bias[P, n], gain[P, n] and shift[P, n].

    x holds equal blocks of rows of the members one after the other, and may be the first columns of rows that are longer;
    `centred` is LayerNorm, else RMSNorm.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    block = triton.next_power_of_2(width)
    bias_or, shift_or = gain if bias is None else bias, gain if shift is None else shift
    each = rows // len(gain)
    together = 4 if term and each % 4 == 0 else 1  # rows that share one reading of the factors
    _norm[(rows // together,)](
        x, x.stride(0) if term else width, x if residual is None else residual, bias_or, gain, shift_or, out,
        bias_or.stride(0), gain.stride(0), shift_or.stride(0), each, eps,
        *((term.t, term.t.stride(1), term.up, term.scales, term.factors.factor) if term else (x, 0, x, x, 1.0)),
        WIDTH=width, BLOCK=block, RESIDUAL=residual is not None, BIAS=bias is not None, SHIFT=shift is not None,
        CENTRED=centred, THIN=term.factors.rank if term else 0, ROWS=together, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out


def add_bias(y: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """y + bias[P, n] in place, then GELU if wanted; y holds the members' rows one block after the other."""
    width = y.shape[-1]
    rows = y.numel() // width
    each = rows // len(bias)
    together = next(count for count in (8, 4, 2, 1) if each % count == 0)
    block = min(512, triton.next_power_of_2(width))
    _add_bias[(rows // together, triton.cdiv(width, block))](
        y, bias, bias.stride(0), each,
        WIDTH=width, GELU=gelu, EXACT=y.dtype == torch.float32, ROWS=together, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y
