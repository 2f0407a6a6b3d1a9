"""The work between the matrix products of a BERT-like layer: attention within short rows, and GELU with a low-rank term.

Each kernel adds the biases of its members and the low-rank term t·Eᵀ (`lowrank`) to the product it reads, so that neither takes a
pass of its own. The norm does the same in `norms`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engines.torch.gpu.kernels.lowrank import LowRankTerm, add_up_projection, dot, no_term
from mezzo.engines.torch.gpu.kernels.norms import gelu_value

# The longest row whose attention is one block. Exact float32 products take many more registers.
MAX_TOKENS = {torch.float32: 32, torch.bfloat16: 128, torch.float16: 128}
GELU_LAUNCH = {"ROWS": 32, "COLUMNS_PER_PROGRAM": 128, "num_warps": 4}


@triton.jit
def _load_vectors(vectors, stride, row, rows_per_member, column, row_mask, column_mask, ONE_MEMBER: tl.constexpr):
    """A vector of the members that own these rows; ONE_MEMBER: one member owns all of them."""
    if ONE_MEMBER:
        member = tl.min(row, 0) // rows_per_member
        values = tl.load(vectors + member * stride + column, mask=column_mask, other=0.0)[None, :]
    else:
        place = vectors + (row // rows_per_member)[:, None] * stride + column[None, :]
        values = tl.load(place, mask=row_mask[:, None] & column_mask[None, :], other=0.0)
    return values.to(tl.float32)


@triton.jit
def _load_head(y, bias, bias_stride, member, first_column, y_stride, row, row_mask, column, column_mask,
               t, split_stride, t_stride, components, component_stride, up_offsets, scale, scaling,
               LAYER: tl.constexpr, SPLITS: tl.constexpr, COMPONENTS: tl.constexpr, RANK: tl.constexpr,
               COLUMNS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """[tokens, columns] of one of query, key and value: product, bias and low-rank term, rounded once."""
    place = y + row.to(tl.int64)[:, None] * y_stride + (first_column + column)[None, :]
    value = tl.load(place, mask=row_mask[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
    value += tl.load(bias + member * bias_stride + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if LAYER >= 0:
        value = add_up_projection(value, t, split_stride, t_stride, components, component_stride, up_offsets, scale,
                                  scaling, row, row_mask, column, column_mask, LAYER,
                                  SPLITS, COMPONENTS, RANK, COLUMNS, EXACT)  # fmt: skip
    return value.to(y.dtype.element_ty)


@triton.jit
def _attend(y, y_stride, q_bias, k_bias, v_bias, bias_stride, attention_mask, mask_row, mask_query, mask_key,
            t, split_stride, t_stride, components, component_stride, up_offsets, scales, scaling,
            out, length, rows_per_member, softmax_scale,
            HEADS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
            V: tl.constexpr, SPLITS: tl.constexpr, COMPONENTS: tl.constexpr, RANK: tl.constexpr,
            COLUMNS: tl.constexpr, EXACT: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """One head of one row. Q, K, V: the number of each in the low-rank term's group, or −1."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, LANES)
    token_mask, lane_mask = token < length, lane < SIZE
    row = sequence * length + token
    column = head * SIZE + lane
    member = sequence // rows_per_member
    width: tl.constexpr = HEADS * SIZE
    scale = 1.0
    if Q >= 0 or K >= 0 or V >= 0:
        scale = tl.load(scales + member)
    q = _load_head(y, q_bias, bias_stride, member, 0, y_stride, row, token_mask, column, lane_mask,
                   t, split_stride, t_stride, components, component_stride, up_offsets, scale, scaling,
                   Q, SPLITS, COMPONENTS, RANK, COLUMNS, EXACT)  # fmt: skip
    k = _load_head(y, k_bias, bias_stride, member, width, y_stride, row, token_mask, column, lane_mask,
                   t, split_stride, t_stride, components, component_stride, up_offsets, scale, scaling,
                   K, SPLITS, COMPONENTS, RANK, COLUMNS, EXACT)  # fmt: skip
    v = _load_head(y, v_bias, bias_stride, member, 2 * width, y_stride, row, token_mask, column, lane_mask,
                   t, split_stride, t_stride, components, component_stride, up_offsets, scale, scaling,
                   V, SPLITS, COMPONENTS, RANK, COLUMNS, EXACT)  # fmt: skip
    logits = dot(q, tl.trans(k), tl.zeros((TOKENS, TOKENS), tl.float32), EXACT) * softmax_scale
    visible = token_mask[None, :] & (token[:, None] >= 0)
    if MASKED:
        row_start = attention_mask + sequence.to(tl.int64) * mask_row
        place = row_start + token[:, None] * mask_query + token[None, :] * mask_key
        visible = visible & (tl.load(place, mask=token_mask[:, None] & token_mask[None, :], other=0) != 0)
    logits = tl.where(visible, logits, float("-inf"))
    top = tl.max(logits, 1)
    weight = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weight, 1)
    attended = dot(weight.to(v.dtype), v, tl.zeros((TOKENS, LANES), tl.float32), EXACT)
    attended *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, attended.to(out.dtype.element_ty), mask=token_mask[:, None] & lane_mask[None, :])


@triton.jit
def _gelu(y, y_stride, bias, bias_stride, rows, rows_per_member,
          t, split_stride, t_stride, components, component_stride, up_offsets, scales, scaling,
          WIDTH: tl.constexpr, SPLITS: tl.constexpr, COMPONENTS: tl.constexpr, RANK: tl.constexpr,
          COLUMNS: tl.constexpr, ONE_MEMBER: tl.constexpr, EXACT: tl.constexpr,
          ROWS: tl.constexpr, COLUMNS_PER_PROGRAM: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS_PER_PROGRAM + tl.arange(0, COLUMNS_PER_PROGRAM)
    row_mask, column_mask = row < rows, column < WIDTH
    place = y + row.to(tl.int64)[:, None] * y_stride + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    value += _load_vectors(bias, bias_stride, row, rows_per_member, column, row_mask, column_mask, ONE_MEMBER)
    scale = tl.load(scales + row // rows_per_member, mask=row_mask, other=0.0)[:, None]
    value = add_up_projection(value, t, split_stride, t_stride, components, component_stride, up_offsets, scale, scaling,
                              row, row_mask, column, column_mask, 0,
                              SPLITS, COMPONENTS, RANK, COLUMNS, EXACT)  # fmt: skip
    tl.store(place, gelu_value(value, EXACT).to(y.dtype.element_ty), mask=mask)


def attend(
    y: Tensor, biases: tuple[Tensor, Tensor, Tensor], length: int, heads: int, softmax_scale: float, members: int,
    term: LowRankTerm | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention within rows of `length` tokens; y[tokens, 3·width] holds queries, keys and values side by side (and may be the
    first columns of longer rows).

    biases[P, width] each; mask[rows, 1, 1 or length, length] is true where a query attends to a key.
    """
    tokens, width = y.shape[0], y.shape[1] // 3
    rows, size = tokens // length, width // heads
    out = torch.empty((tokens, width), device=y.device, dtype=y.dtype)
    mask_strides = (0, 0, 0)
    if mask is not None:
        expanded = mask.expand(rows, 1, length, length)
        mask_strides = (expanded.stride(0), expanded.stride(2), expanded.stride(3))
    layers = (-1, -1, -1) if term is None else term.layers
    block = max(16, triton.next_power_of_2(length))
    bias_stride = biases[0].stride(0)
    assert all(bias.stride(0) == bias_stride for bias in biases), "the biases have one stride"
    arguments, sizes = (term.arguments, term.sizes) if term else no_term(y)
    _attend[(heads, rows)](
        y, y.stride(0), *biases, bias_stride, y if mask is None else mask.view(torch.uint8), *mask_strides,
        *arguments, out, length, rows // members, softmax_scale,
        HEADS=heads, SIZE=size, MASKED=mask is not None, Q=layers[0], K=layers[1], V=layers[2],
        **sizes, EXACT=y.dtype == torch.float32, TOKENS=block, LANES=max(16, triton.next_power_of_2(size)),
        num_warps=4 if y.dtype == torch.float32 else 1 if block <= 32 else 4 if block <= 64 else 8,
    )  # fmt: skip
    return out


def gelu(y: Tensor, bias: Tensor, members: int, term: LowRankTerm) -> None:
    """GELU of y + bias[P, n] + low-rank term, in place; y may be the first columns of longer rows."""
    rows, width = y.shape
    grid = triton.cdiv(rows, GELU_LAUNCH["ROWS"]), triton.cdiv(width, GELU_LAUNCH["COLUMNS_PER_PROGRAM"])
    _gelu[grid](
        y, y.stride(0), bias, bias.stride(0), rows, rows // members, *term.arguments, WIDTH=width, **term.sizes,
        ONE_MEMBER=rows // members % GELU_LAUNCH["ROWS"] == 0, EXACT=y.dtype == torch.float32, **GELU_LAUNCH,
    )  # fmt: skip
