"""What stands between the matrix products of a Llama-like layer, in place: rotary positions, and the gate of the block.

Sums and products are float32 and rounded once, where plain torch rounds after every operation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

GATE = {"BLOCK": 2048, "num_warps": 4}


@triton.jit
def _turn_heads(x, token, cos, sin, at, known, COUNT: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
                LANES: tl.constexpr):  # fmt: skip
    """All heads of one token: each lane of the first half turns with its partner in the second."""
    lane, head = tl.arange(0, LANES), tl.arange(0, HEADS)
    first = x + token * (COUNT * 2 * HALF) + head[:, None] * (2 * HALF) + lane[None, :]
    here = (head < COUNT)[:, None] & known[None, :]
    a = tl.load(first, mask=here, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=here, other=0.0).to(tl.float32)
    turned_a = a * tl.load(cos + at, mask=known, other=0.0).to(tl.float32)[None, :]
    turned_a -= b * tl.load(sin + at, mask=known, other=0.0).to(tl.float32)[None, :]
    turned_b = b * tl.load(cos + at + HALF, mask=known, other=0.0).to(tl.float32)[None, :]
    turned_b += a * tl.load(sin + at + HALF, mask=known, other=0.0).to(tl.float32)[None, :]
    tl.store(first, turned_a.to(x.dtype.element_ty), mask=here)
    tl.store(first + HALF, turned_b.to(x.dtype.element_ty), mask=here)


@triton.jit
def _turn(query, key, cos, sin, row_step, length, QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr,
          QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    at = (token // length) * row_step + (token % length) * (2 * HALF) + lane
    if tl.program_id(1) == 0:
        _turn_heads(query, token, cos, sin, at, lane < HALF, QUERIES, HALF, QUERY_HEADS, LANES)
    else:
        _turn_heads(key, token, cos, sin, at, lane < HALF, KEYS, HALF, KEY_HEADS, LANES)


@triton.jit
def _gate(gate, up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    value = tl.load(gate + at, mask=real, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=real, other=0.0).to(tl.float32)
    tl.store(gate + at, (value / (1.0 + tl.exp(-value)) * other).to(gate.dtype.element_ty), mask=real)


def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary positions of query[rows, L, heads·n] and key[rows, L, groups·n], in place; tables [1 or rows, L, n]."""
    rows, length, size = query.shape[0], query.shape[1], cos.shape[2]
    queries, keys = query.shape[2] // size, key.shape[2] // size
    _turn[(rows * length, 2)](
        query, key, cos, sin, cos.stride(0) if len(cos) > 1 else 0, length, QUERIES=queries, KEYS=keys, HALF=size // 2,
        QUERY_HEADS=triton.next_power_of_2(queries), KEY_HEADS=triton.next_power_of_2(keys),
        LANES=triton.next_power_of_2(size // 2), num_warps=4 if query.shape[2] >= 2048 else 1,
    )  # fmt: skip


def gate(gated: Tensor, up: Tensor) -> Tensor:
    """silu(gated)·up, in place of `gated`."""
    count = gated.numel()
    _gate[(triton.cdiv(count, GATE["BLOCK"]),)](gated, up, count, **GATE)
    return gated
