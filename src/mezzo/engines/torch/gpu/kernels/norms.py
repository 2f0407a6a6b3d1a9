"""Biases and norms that differ by member, in one pass over the activations each. Vectors and sums are float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engines.torch.gpu.kernels.lowrank import LowRankTerm

# The largest rank of a low-rank term that a norm adds: it multiplies without the tensor cores, which is faster for so
# few.
MAX_TERM_RANK = 8


@triton.jit
def _norm(x, x_stride, residual, bias, gain, shift, out, bias_stride, gain_stride, shift_stride, rows_per_member, eps,
          t, t_stride, transposed_up, scales, scaling,
          WIDTH: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr,
          CENTRED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The ROWS rows of a program belong to one member: `rows_per_member` is a multiple of ROWS. RANK 0: no low-rank term."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    member = first // rows_per_member
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real = column < WIDTH
    mask, offset = real[None, :], row[:, None] * WIDTH + column[None, :]
    x_offset = row[:, None] * x_stride + column[None, :] if RANK else offset
    value = tl.load(x + x_offset, mask=mask, other=0.0).to(tl.float32)
    if RANK:
        scale = tl.load(scales + member) * scaling
        for rank in tl.static_range(RANK):
            coefficient = (tl.load(t + row * t_stride + rank).to(tl.float32) * scale)[:, None]
            up = tl.load(transposed_up + rank * WIDTH + column, mask=real, other=0.0).to(tl.float32)
            value += coefficient * up[None, :]
    if BIAS:
        value += tl.load(bias + member * bias_stride + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(mask, value - (tl.sum(value, 1) / WIDTH)[:, None], 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
    value *= tl.load(gain + member * gain_stride + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if SHIFT:
        value += tl.load(shift + member * shift_stride + column, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gelu_value(value, EXACT: tl.constexpr):
    """GELU by the error function. Results that are rounded to 16 bits use a polynomial with an error of at most 1.5e-7
    (Abramowitz and Stegun 7.1.26), which takes fewer instructions; a reciprocal square root, accurate to 2⁻²², replaces a
    division."""
    if EXACT:
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        size = tl.abs(value)
        denominator = 1.0 + 0.23164188871949554 * size
        t = tl.rsqrt(denominator * denominator)
        series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
        return tl.maximum(value, 0.0) - (size * t) * (series * tl.exp2(value * value * -0.7213475204444817))


@triton.jit
def _add_bias(
    y, bias, bias_stride, rows_per_member,
    WIDTH: tl.constexpr, GELU: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The ROWS rows of a program belong to one member: `rows_per_member` is a multiple of ROWS."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    vector = tl.load(bias + (row // rows_per_member) * bias_stride + column, mask=real, other=0.0)
    place = y + (row + tl.arange(0, ROWS))[:, None] * WIDTH + column[None, :]
    value = tl.load(place, mask=real[None, :], other=0.0).to(tl.float32) + vector[None, :]
    if GELU:
        value = gelu_value(value, EXACT)
    tl.store(place, value.to(y.dtype.element_ty), mask=real[None, :])


def norm(
    x: Tensor,
    gain: Tensor,
    shift: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    centred: bool = True,
    term: LowRankTerm | None = None,
) -> Tensor:
    """The norm of x + bias + residual + low-rank term, with each member's own bias[P, n], gain[P, n] and shift[P, n].

    x holds equal blocks of rows of the members one after the other, and may be the first columns of longer rows; `centred` is
    LayerNorm, else RMSNorm.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    block = triton.next_power_of_2(width)
    bias_or_any, shift_or_any = gain if bias is None else bias, gain if shift is None else shift
    rows_per_member = rows // len(gain)
    rows_per_program = 4 if term and rows_per_member % 4 == 0 else 1  # they share one reading of the factors
    _norm[(rows // rows_per_program,)](
        x, x.stride(0) if term else width, x if residual is None else residual, bias_or_any, gain, shift_or_any, out,
        bias_or_any.stride(0), gain.stride(0), shift_or_any.stride(0), rows_per_member, eps,
        *((term.t, term.t.stride(1), term.transposed_up, term.scales, term.factors.scaling) if term else (x, 0, x, x, 1.0)),
        WIDTH=width, BLOCK=block, RESIDUAL=residual is not None, BIAS=bias is not None, SHIFT=shift is not None,
        CENTRED=centred, RANK=term.factors.rank if term else 0, ROWS=rows_per_program,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out


def add_bias(y: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """y + bias[P, n] in place, optionally followed by GELU; y holds the members' rows one block after the other."""
    width = y.shape[-1]
    rows = y.numel() // width
    rows_per_member = rows // len(bias)
    rows_per_program = next(count for count in (8, 4, 2, 1) if rows_per_member % count == 0)
    block = min(512, triton.next_power_of_2(width))
    _add_bias[(rows // rows_per_program, triton.cdiv(width, block))](
        y, bias, bias.stride(0), rows_per_member,
        WIDTH=width, GELU=gelu, EXACT=y.dtype == torch.float32, ROWS=rows_per_program, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y
