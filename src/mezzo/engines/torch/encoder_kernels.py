"""What stands between the matrix products of a BERT-like layer, one kernel each: attention of short rows, residual and norm,
GELU. Each adds the bias of its own members and the thin term t·Eᵀ (`thin`) to the product it reads, so that neither takes a
pass of its own; norm and GELU make the thin products t of the next layer while they hold its input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engines.torch import thin
from mezzo.engines.torch.vectors import gelu_of

LONGEST = 128
"""Tokens of a row whose attention is one block."""
WIDEST = 2048
"""Columns of a norm that a program holds in registers, in chunks of 128."""
CHUNK = 128
ROWS = 16
NORM = {"ROWS": ROWS, "num_warps": 8}
GELU = {"ROWS": ROWS, "COLUMNS": 128, "num_warps": 4, "num_stages": 2}


@dataclass(frozen=True)
class Term:
    """The thin products t[G, rows, wide] of a group of layers, and where their way up begins; `places` says which of the
    group belongs to which of the layers that are computed together (−1: none)."""

    t: Tensor
    factors: thin.Factors
    places: tuple[int, ...] = (0,)


@triton.jit
def _product(a, b, total, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(a, b, total, input_precision="ieee")
    else:
        return tl.dot(a, b, total)


@triton.jit
def _up(total, t, parts, size, at, rows, row, real, line, inside, place: tl.constexpr,
        PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """total + t·Eᵀ at these rows and lines, for one layer of a group."""
    column = tl.arange(0, WIDE)
    t_tile = tl.load(
        t + (place * rows + row.to(tl.int64))[:, None] * WIDE + column[None, :], mask=real[:, None], other=0.0
    )
    start = parts + tl.multiple_of(tl.load(at + place), 64) + (column // RANK) * size + column % RANK
    e_tile = tl.load(
        start[:, None] + line[None, :] * RANK, mask=(column // RANK < PARTS)[:, None] & inside[None, :], other=0.0
    )
    return _product(t_tile, e_tile, total, EXACT)


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
def _head(y, bias, bias_step, member, first, step, row, real, column, inside, term, parts, size, at, rows,
          PLACE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """[tokens, columns] of one of query, key and value: product, bias and thin term, rounded once."""
    place = y + row.to(tl.int64)[:, None] * step + (first + column)[None, :]
    found = tl.load(place, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
    found += tl.load(bias + member * bias_step + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if PLACE >= 0:
        found = _up(found, term, parts, size, at, rows, row, real, column, inside, PLACE, PARTS, RANK, WIDE, EXACT)
    return found.to(y.dtype.element_ty)


@triton.jit
def _attend(y, step, q_bias, k_bias, v_bias, bias_step, mask, mask_row, mask_query, mask_key,
            term, parts, size, at, rows, out, length, each, scaling,
            HEADS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
            V: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
            TOKENS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, COLUMNS)
    real, inside = token < length, lane < SIZE
    row = sequence * length + token
    column = head * SIZE + lane
    member = sequence // each
    width: tl.constexpr = HEADS * SIZE
    q = _head(y, q_bias, bias_step, member, 0, step, row, real, column, inside, term, parts, size, at, rows,
              Q, PARTS, RANK, WIDE, EXACT)  # fmt: skip
    k = _head(y, k_bias, bias_step, member, width, step, row, real, column, inside, term, parts, size, at, rows,
              K, PARTS, RANK, WIDE, EXACT)  # fmt: skip
    v = _head(y, v_bias, bias_step, member, 2 * width, step, row, real, column, inside, term, parts, size, at, rows,
              V, PARTS, RANK, WIDE, EXACT)  # fmt: skip
    none = tl.zeros((TOKENS, TOKENS), tl.float32)
    logits = _product(q, tl.trans(k), none, EXACT) * scaling
    seen = real[None, :] & (token[:, None] >= 0)
    if MASKED:
        at_mask = mask + sequence.to(tl.int64) * mask_row + token[:, None] * mask_query + token[None, :] * mask_key
        seen = seen & (tl.load(at_mask, mask=real[:, None] & real[None, :], other=0) != 0)
    logits = tl.where(seen, logits, float("-inf"))
    top = tl.max(logits, 1)
    weight = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weight, 1)
    found = _product(weight.to(v.dtype), v, tl.zeros((TOKENS, COLUMNS), tl.float32), EXACT)
    found *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _down(found, x, d_parts, d_size, d_at, line, inside,
          COLUMN: tl.constexpr, INNER: tl.constexpr, MODULES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
          WIDE: tl.constexpr, ALL: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """found + x·D for these lines of the factors of all modules, side by side in ALL columns."""
    column = tl.arange(0, ALL)
    module, own = column // WIDE, column % WIDE
    known = (module < MODULES) & (own // RANK < PARTS)
    begins = tl.multiple_of(tl.load(d_at + module, mask=module < MODULES, other=0), 64)
    start = d_parts + begins + (own // RANK) * d_size + (own % RANK) * COLUMN
    tile = tl.load(start[None, :] + line[:, None] * INNER, mask=known[None, :] & inside[:, None], other=0.0)
    return _product(x, tile, found, EXACT)


@triton.jit
def _store_t(found, t, scales, rows, row, real, each, factor,
             MODULES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ALL: tl.constexpr,
             ROWS: tl.constexpr):  # fmt: skip
    """The parts of a factor brought together, as `thin` says, and written for the way up."""
    scale = tl.load(scales + row // each, mask=real, other=0.0)[:, None]
    number = tl.arange(0, WIDE // RANK)[None, :]
    if PARTS == 1:
        weight = tl.where(number == 0, factor, 0.0) * scale
        again = tl.where(number == 0, 1.0, 0.0) + 0.0 * scale
    else:
        again = tl.where(number == 2, scale, tl.where(number < 2, 1.0, 0.0))
        weight = again * factor
    apart = tl.reshape(found, [ROWS, ALL // WIDE, WIDE // RANK, RANK])
    total = tl.sum(apart * weight[:, None, :, None], axis=2)
    wide = tl.reshape(total[:, :, None, :] * again[:, None, :, None], [ROWS, ALL])
    column = tl.arange(0, ALL)
    module = column // WIDE
    target = t + (module.to(tl.int64)[None, :] * rows + row.to(tl.int64)[:, None]) * WIDE + (column % WIDE)[None, :]
    tl.store(target, wide.to(t.dtype.element_ty), mask=real[:, None] & (module < MODULES)[None, :])


@triton.jit
def _norm(y, residual, bias, bias_step, gain, gain_step, shift, shift_step, out, rows, each, eps,
          term, parts, size, at, t, d_parts, d_size, d_at, scales, d_each, factor,
          WIDTH: tl.constexpr, UP: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
          MODULES: tl.constexpr, D_PARTS: tl.constexpr, D_RANK: tl.constexpr, D_WIDE: tl.constexpr, ALL: tl.constexpr,
          COLUMN: tl.constexpr, INNER: tl.constexpr, SAME: tl.constexpr, EXACT: tl.constexpr,
          CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    start = row.to(tl.int64)[:, None] * WIDTH
    chunks = ()
    total = tl.zeros((ROWS, CHUNK), tl.float32)
    for number in tl.static_range(CHUNKS):
        line = number * CHUNK + tl.arange(0, CHUNK)
        inside = line < WIDTH
        both = real[:, None] & inside[None, :]
        value = tl.load(y + start + line[None, :], mask=both, other=0.0).to(tl.float32)
        value += _vector(bias, bias_step, row, each, line, real, inside, SAME)
        value += tl.load(residual + start + line[None, :], mask=both, other=0.0).to(tl.float32)
        if UP:
            value = _up(value, term, parts, size, at, rows, row, real, line, inside, 0, PARTS, RANK, WIDE, EXACT)
        total += value
        chunks = chunks + (value,)  # type: ignore[assignment]
    mean = tl.sum(total, 1) / WIDTH
    square = tl.zeros((ROWS, CHUNK), tl.float32)
    for number in tl.static_range(CHUNKS):
        inside = number * CHUNK + tl.arange(0, CHUNK) < WIDTH
        centred = tl.where(inside[None, :], chunks[number] - mean[:, None], 0.0)
        square += centred * centred
    scale = tl.rsqrt(tl.sum(square, 1) / WIDTH + eps)
    found = tl.zeros((ROWS, ALL), tl.float32)
    for number in tl.static_range(CHUNKS):
        line = number * CHUNK + tl.arange(0, CHUNK)
        inside = line < WIDTH
        both = real[:, None] & inside[None, :]
        value = (chunks[number] - mean[:, None]) * scale[:, None]
        value *= _vector(gain, gain_step, row, each, line, real, inside, SAME)
        value += _vector(shift, shift_step, row, each, line, real, inside, SAME)
        x = value.to(out.dtype.element_ty)
        tl.store(out + start + line[None, :], x, mask=both)
        if MODULES:
            found = _down(found, x, d_parts, d_size, d_at, line, inside, COLUMN, INNER,
                          MODULES, D_PARTS, D_RANK, D_WIDE, ALL, EXACT)  # fmt: skip
    if MODULES:
        _store_t(found, t, scales, rows, row, real, d_each, factor, MODULES, D_PARTS, D_RANK, D_WIDE, ALL, ROWS)


@triton.jit
def _gelu(y, bias, bias_step, rows, each, term, parts, size, at,
          t, d_parts, d_size, d_at, scales, d_each, factor,
          WIDTH: tl.constexpr, UP: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
          MODULES: tl.constexpr, D_PARTS: tl.constexpr, D_RANK: tl.constexpr, D_WIDE: tl.constexpr, ALL: tl.constexpr,
          COLUMN: tl.constexpr, INNER: tl.constexpr, SAME: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
          COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    start = row.to(tl.int64)[:, None] * WIDTH
    found = tl.zeros((ROWS, ALL), tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        line = first + tl.arange(0, COLUMNS)
        inside = line < WIDTH
        both = real[:, None] & inside[None, :]
        value = tl.load(y + start + line[None, :], mask=both, other=0.0).to(tl.float32)
        value += _vector(bias, bias_step, row, each, line, real, inside, SAME)
        if UP:
            value = _up(value, term, parts, size, at, rows, row, real, line, inside, 0, PARTS, RANK, WIDE, EXACT)
        value = gelu_of(value, EXACT)
        x = value.to(y.dtype.element_ty)
        tl.store(y + start + line[None, :], x, mask=both)
        if MODULES:
            found = _down(found, x, d_parts, d_size, d_at, line, inside, COLUMN, INNER,
                          MODULES, D_PARTS, D_RANK, D_WIDE, ALL, EXACT)  # fmt: skip
    if MODULES:
        _store_t(found, t, scales, rows, row, real, d_each, factor, MODULES, D_PARTS, D_RANK, D_WIDE, ALL, ROWS)


def attend(
    y: Tensor, biases: tuple[Tensor, Tensor, Tensor], length: int, heads: int, scaling: float, members: int,
    term: Term | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention within rows of `length` tokens; y[tokens, 3·width] holds queries, keys and values side by side.

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
    _attend[(rows, heads)](
        y, y.shape[1], *biases, bias_step, y if mask is None else mask.view(torch.uint8), *steps,
        *_up_arguments(y, term), tokens, out, length, rows // members, scaling,
        HEADS=heads, SIZE=size, MASKED=mask is not None, Q=places[0], K=places[1], V=places[2], **_up_sizes(term),
        EXACT=y.dtype == torch.float32, TOKENS=block, COLUMNS=max(16, triton.next_power_of_2(size)),
        num_warps=2 if block <= 32 else 4 if block <= 64 else 8,
    )  # fmt: skip
    return out


def norm(
    y: Tensor, residual: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, eps: float, members: int,
    term: Term | None = None, then: thin.Factors | None = None, scales: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """LayerNorm of y + bias + residual + thin term; with `then`, the thin products of what comes out as well.

    bias, gain and shift are [P, n] for P members that own equal, consecutive blocks of rows.
    """
    rows, width = y.shape
    out = torch.empty_like(y)
    t, down, sizes = _down_arguments(y, then, scales)
    _norm[(triton.cdiv(rows, NORM["ROWS"]),)](
        y, residual, bias, bias.stride(0), gain, gain.stride(0), shift, shift.stride(0), out, rows, rows // members, eps,
        *_up_arguments(y, term), *down, WIDTH=width, UP=term is not None, **_up_sizes(term), **sizes,
        SAME=rows // members % NORM["ROWS"] == 0, EXACT=y.dtype == torch.float32,
        CHUNKS=triton.cdiv(width, CHUNK), CHUNK=CHUNK, **NORM,
    )  # fmt: skip
    return out, t


def gelu(
    y: Tensor, bias: Tensor, members: int,
    term: Term | None = None, then: thin.Factors | None = None, scales: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """GELU of y + bias + thin term in place; with `then`, the thin products of what comes out."""
    rows, width = y.shape
    t, down, sizes = _down_arguments(y, then, scales)
    _gelu[(triton.cdiv(rows, GELU["ROWS"]),)](
        y, bias, bias.stride(0), rows, rows // members, *_up_arguments(y, term), *down,
        WIDTH=width, UP=term is not None, **_up_sizes(term), **sizes,
        SAME=rows // members % GELU["ROWS"] == 0, EXACT=y.dtype == torch.float32, **GELU,
    )  # fmt: skip
    return t


def _up_arguments(y: Tensor, term: Term | None) -> tuple[Tensor, Tensor, int, Tensor]:
    if term is None:
        return y, y, 0, y
    return term.t, term.factors.parts, term.factors.parts.shape[1], term.factors.up_at


def _up_sizes(term: Term | None) -> dict[str, int]:
    if term is None:
        return {"PARTS": 1, "RANK": 1, "WIDE": 16}
    return {"PARTS": len(term.factors.parts), "RANK": term.factors.rank, "WIDE": term.factors.wide}


def _down_arguments(
    y: Tensor, then: thin.Factors | None, scales: Tensor | None
) -> tuple[Tensor | None, tuple[Tensor | int | float, ...], dict[str, int]]:
    """Where t goes, what is told of the factors that it comes from, and their sizes."""
    none = {"MODULES": 0, "D_PARTS": 1, "D_RANK": 1, "D_WIDE": 16, "ALL": 2 * ROWS, "COLUMN": 1, "INNER": 1}
    if then is None or scales is None:
        return None, (y, y, 0, y, y, 1, 1.0), none
    modules = len(then.down_at)
    t = torch.empty((modules, len(y), then.wide), device=y.device, dtype=y.dtype)
    column, inner = then.steps(y.shape[1])
    sizes = {"D_PARTS": len(then.parts), "D_RANK": then.rank, "D_WIDE": then.wide, "COLUMN": column, "INNER": inner}
    # More columns than rows: Triton then spreads the warps over columns in both products, and none repeats another's work.
    every = max(2 * ROWS, then.wide * triton.next_power_of_2(modules))
    given = (t, then.parts, then.parts.shape[1], then.down_at, scales, len(y) // len(scales), then.factor)
    return t, given, {"MODULES": modules, "ALL": every, **sizes}
