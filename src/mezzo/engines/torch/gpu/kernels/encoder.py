"""What stands between the matrix products of a BERT-like layer: attention of short rows, and GELU with a thin term.

Each adds the biases of its members and the thin term t·Eᵀ (`thin`) to the product it reads, so that neither takes a pass of
its own. The norm does so in `vectors`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engines.torch.gpu.kernels.lowrank import Term, no_term, product, raised
from mezzo.engines.torch.gpu.kernels.norms import gelu_of

LONGEST = {torch.float32: 32, torch.bfloat16: 128, torch.float16: 128}
"""Tokens of a row whose attention is one block. Products of float32 that are not rounded take many more registers."""
GELU = {"ROWS": 32, "COLUMNS": 128, "num_warps": 4}


@triton.jit
def _vector(vectors, step, row, each, line, real, inside, SAME: tl.constexpr):
    """A vector of the members that own these rows; SAME: one member owns all."""
    if SAME:
        found = tl.load(vectors + (tl.min(row, 0) // each) * step + line, mask=inside, other=0.0)[None, :]
    else:
        place = vectors + (row // each)[:, None] * step + line[None, :]
        found = tl.load(place, mask=real[:, None] & inside[None, :], other=0.0)
    return found.to(tl.float32)


@triton.jit
def _head(y, bias, bias_step, member, first, step, row, real, column, inside,
          term, t_step, row_step, parts, size, at, scale, factor,
          PLACE: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
          EXACT: tl.constexpr):  # fmt: skip
    """[tokens, columns] of one of query, key and value: product, bias and thin term, rounded once."""
    place = y + row.to(tl.int64)[:, None] * step + (first + column)[None, :]
    found = tl.load(place, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
    found += tl.load(bias + member * bias_step + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if PLACE >= 0:
        found = raised(found, term, t_step, row_step, parts, size, at, scale, factor, row, real, column, inside, PLACE,
                       PIECES, PARTS, RANK, WIDE, EXACT)  # fmt: skip
    return found.to(y.dtype.element_ty)


@triton.jit
def _attend(y, step, q_bias, k_bias, v_bias, bias_step, mask, mask_row, mask_query, mask_key,
            term, t_step, row_step, parts, size, at, scales, factor, out, length, each, scaling,
            HEADS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
            V: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
            EXACT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, COLUMNS)
    real, inside = token < length, lane < SIZE
    row = sequence * length + token
    column = head * SIZE + lane
    member = sequence // each
    width: tl.constexpr = HEADS * SIZE
    scale = 1.0
    if Q >= 0 or K >= 0 or V >= 0:
        scale = tl.load(scales + member)
    q = _head(y, q_bias, bias_step, member, 0, step, row, real, column, inside,
              term, t_step, row_step, parts, size, at, scale, factor, Q, PIECES, PARTS, RANK, WIDE, EXACT)  # fmt: skip
    k = _head(y, k_bias, bias_step, member, width, step, row, real, column, inside,
              term, t_step, row_step, parts, size, at, scale, factor, K, PIECES, PARTS, RANK, WIDE, EXACT)  # fmt: skip
    v = _head(y, v_bias, bias_step, member, 2 * width, step, row, real, column, inside,
              term, t_step, row_step, parts, size, at, scale, factor, V, PIECES, PARTS, RANK, WIDE, EXACT)  # fmt: skip
    none = tl.zeros((TOKENS, TOKENS), tl.float32)
    logits = product(q, tl.trans(k), none, EXACT) * scaling
    seen = real[None, :] & (token[:, None] >= 0)
    if MASKED:
        at_mask = mask + sequence.to(tl.int64) * mask_row + token[:, None] * mask_query + token[None, :] * mask_key
        seen = seen & (tl.load(at_mask, mask=real[:, None] & real[None, :], other=0) != 0)
    logits = tl.where(seen, logits, float("-inf"))
    top = tl.max(logits, 1)
    weight = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weight, 1)
    found = product(weight.to(v.dtype), v, tl.zeros((TOKENS, COLUMNS), tl.float32), EXACT)
    found *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _gelu(y, step, bias, bias_step, rows, each, term, t_step, row_step, parts, size, at, scales, factor,
          WIDTH: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
          SAME: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, inside = row < rows, line < WIDTH
    place, here = y + row.to(tl.int64)[:, None] * step + line[None, :], real[:, None] & inside[None, :]
    value = tl.load(place, mask=here, other=0.0).to(tl.float32)
    value += _vector(bias, bias_step, row, each, line, real, inside, SAME)
    scale = tl.load(scales + row // each, mask=real, other=0.0)[:, None]
    value = raised(value, term, t_step, row_step, parts, size, at, scale, factor, row, real, line, inside, 0,
                   PIECES, PARTS, RANK, WIDE, EXACT)  # fmt: skip
    tl.store(place, gelu_of(value, EXACT).to(y.dtype.element_ty), mask=here)


def attend(
    y: Tensor, biases: tuple[Tensor, Tensor, Tensor], length: int, heads: int, scaling: float, members: int,
    term: Term | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention within rows of `length` tokens; y[tokens, 3·width] holds queries, keys and values side by side (and may be the
    first columns of something wider).

    biases[P, width] each; mask[rows, 1, 1 or length, length] is true where a query sees a key.
    """
    tokens, width = y.shape[0], y.shape[1] // 3
    rows, size = tokens // length, width // heads
    out = torch.empty((tokens, width), device=y.device, dtype=y.dtype)
    steps = (0, 0, 0)
    if mask is not None:
        seen = mask.expand(rows, 1, length, length)
        steps = (seen.stride(0), seen.stride(2), seen.stride(3))
    places = (-1, -1, -1) if term is None else term.places
    block = max(16, triton.next_power_of_2(length))
    bias_step = biases[0].stride(0)
    assert all(bias.stride(0) == bias_step for bias in biases), "biases of one kind lie side by side"
    arguments, sizes = (term.arguments, term.sizes) if term else no_term(y)
    _attend[(heads, rows)](
        y, y.stride(0), *biases, bias_step, y if mask is None else mask.view(torch.uint8), *steps,
        *arguments, out, length, rows // members, scaling,
        HEADS=heads, SIZE=size, MASKED=mask is not None, Q=places[0], K=places[1], V=places[2],
        **sizes, EXACT=y.dtype == torch.float32, TOKENS=block, COLUMNS=max(16, triton.next_power_of_2(size)),
        num_warps=4 if y.dtype == torch.float32 else 1 if block <= 32 else 4 if block <= 64 else 8,
    )  # fmt: skip
    return out


def gelu(y: Tensor, bias: Tensor, members: int, term: Term) -> None:
    """GELU of y + bias[P, n] + thin term, in place; y may be the first columns of something wider."""
    rows, width = y.shape
    _gelu[(triton.cdiv(rows, GELU["ROWS"]), triton.cdiv(width, GELU["COLUMNS"]))](
        y, y.stride(0), bias, bias.stride(0), rows, rows // members, *term.arguments, WIDTH=width, **term.sizes,
        SAME=rows // members % GELU["ROWS"] == 0, EXACT=y.dtype == torch.float32, **GELU,
    )  # fmt: skip
