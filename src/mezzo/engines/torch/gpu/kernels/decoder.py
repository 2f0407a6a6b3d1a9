"""The work between the matrix products of a Llama-like layer, in place: rotary position embeddings, and the gate of the MLP.

Sums and products are float32 and rounded once, where plain torch rounds after every operation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

GATE_LAUNCH = {"BLOCK": 2048, "num_warps": 4}


@triton.jit
def _rotate_heads(x, token, cos, sin, table_offset, real, COUNT: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
                  LANES: tl.constexpr):  # fmt: skip
    """All heads of one token: each lane of the first half rotates with its partner in the second."""
    lane, head = tl.arange(0, LANES), tl.arange(0, HEADS)
    first = x + token * (COUNT * 2 * HALF) + head[:, None] * (2 * HALF) + lane[None, :]
    mask = (head < COUNT)[:, None] & real[None, :]
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    rotated_a = a * tl.load(cos + table_offset, mask=real, other=0.0).to(tl.float32)[None, :]
    rotated_a -= b * tl.load(sin + table_offset, mask=real, other=0.0).to(tl.float32)[None, :]
    rotated_b = b * tl.load(cos + table_offset + HALF, mask=real, other=0.0).to(tl.float32)[None, :]
    rotated_b += a * tl.load(sin + table_offset + HALF, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(first, rotated_a.to(x.dtype.element_ty), mask=mask)
    tl.store(first + HALF, rotated_b.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(query, key, cos, sin, row_stride, length, QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr,
            QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    table_offset = (token // length) * row_stride + (token % length) * (2 * HALF) + lane
    if tl.program_id(1) == 0:
        _rotate_heads(query, token, cos, sin, table_offset, lane < HALF, QUERIES, HALF, QUERY_HEADS, LANES)
    else:
        _rotate_heads(key, token, cos, sin, table_offset, lane < HALF, KEYS, HALF, KEY_HEADS, LANES)


@triton.jit
def _gate(gate, up, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    gate_value = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32)
    up_value = tl.load(up + offset, mask=mask, other=0.0).to(tl.float32)
    gated = gate_value / (1.0 + tl.exp(-gate_value)) * up_value
    tl.store(gate + offset, gated.to(gate.dtype.element_ty), mask=mask)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary positions to query[rows, L, heads·n] and key[rows, L, groups·n], in place; tables [1 or rows, L, n]."""
    rows, length, size = query.shape[0], query.shape[1], cos.shape[2]
    queries, keys = query.shape[2] // size, key.shape[2] // size
    _rotate[(rows * length, 2)](
        query, key, cos, sin, cos.stride(0) if len(cos) > 1 else 0, length, QUERIES=queries, KEYS=keys, HALF=size // 2,
        QUERY_HEADS=triton.next_power_of_2(queries), KEY_HEADS=triton.next_power_of_2(keys),
        LANES=triton.next_power_of_2(size // 2), num_warps=4 if query.shape[2] >= 2048 else 1,
    )  # fmt: skip


def gate(gated: Tensor, up: Tensor) -> Tensor:
    """silu(gated)·up, in place of `gated`."""
    count = gated.numel()
    _gate[(triton.cdiv(count, GATE_LAUNCH["BLOCK"]),)](gated, up, count, **GATE_LAUNCH)
    return gated
