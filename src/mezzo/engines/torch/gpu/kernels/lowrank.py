"""Thin matrix products in kernels: t = x·Dᵀ with a handful of columns, and y = t·Eᵀ, for LoRA and for low-rank noise.

Members differ only in the scale s of one direction, so both signs share every product. A factor of LoRA is A + s·z. Rounded
to sixteen bits, it would lose much of s·z; so its value is kept as the sum of two sixteen-bit parts, its noise is a third part,
and the way up multiplies (t, t, s·t) with the three. Low-rank noise has one part, and its outcome is multiplied by s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

NARROWEST = 16
"""Columns that a product has at least: the fewest that the tensor cores take."""
DOWN = {"ROWS": 64, "INNER": 128, "num_warps": 4}
UP = {"ROWS": 64, "OUTER": 64, "num_warps": 4}
"""The fastest shapes on an H200, for widths 1024 and 4096. Fewer than 64 rows keep the way down off the larger tensor cores."""
WIDEST = 128
"""Columns of one launch on the way down; more do not fit on a multiprocessor."""
BUSY, SHORTEST = 256, 512
"""Programs that keep a GPU busy, and lines of a sum that are worth a program: so far a sum is cut into pieces."""


@dataclass(frozen=True)
class Factors:
    """The thin factors of layers that read one input: where each begins on its way down and up in every one of the parts."""

    rank: int
    factor: float
    parts: Tensor
    """[n, size]: three parts of LoRA's factors, or one of low-rank noise."""
    down_at: tuple[int, ...]
    up_at: Tensor

    @property
    def columns(self) -> int:
        """Of t for one layer, as many as are not zero."""
        return len(self.parts) * self.rank

    @property
    def wide(self) -> int:
        """Columns of t for one layer, as kernels see them."""
        return max(NARROWEST, triton.next_power_of_2(self.columns))  # type: ignore[no-any-return]

    def steps(self, inner: int) -> tuple[int, int]:
        """From one column of a layer's factor to the next, and from one line to the next."""
        return (1, self.rank) if len(self.parts) == 1 else (inner, 1)


Arguments = tuple[Tensor, int, int, Tensor, int, Tensor, Tensor, float]
"""What the way up is told: t, from one of its pieces and rows to the next; factors, from one part of them to the next, where
they begin; the scales of the members, and what the outcome of low-rank noise is multiplied by beside them."""


@dataclass(frozen=True)
class Term:
    """The thin products t[pieces, rows, G·rank and more] of a group of layers, to be summed over the pieces, for whom the way
    up is still to be done; `places` says which of the group belongs to which of the layers that are computed together
    (−1: none). Low-rank factors of the way up may be there turned as well, up[G, rank, outer], for who multiplies plainly."""

    t: Tensor
    factors: Factors
    scales: Tensor
    places: tuple[int, ...] = (0,)
    up: Tensor | None = None

    @property
    def arguments(self) -> Arguments:
        factors, parts = self.factors, self.factors.parts
        return (
            self.t, self.t.stride(0), self.t.stride(1), parts, parts.shape[1], factors.up_at, self.scales, factors.factor
        )  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        factors = self.factors
        return {"PIECES": len(self.t), "PARTS": len(factors.parts), "RANK": factors.rank, "WIDE": factors.wide}


def no_term(any_tensor: Tensor) -> tuple[Arguments, dict[str, int]]:
    """Arguments and sizes where there is nothing to add."""
    sizes = {"PIECES": 1, "PARTS": 1, "RANK": 1, "WIDE": NARROWEST}
    return (any_tensor, 0, 0, any_tensor, 0, any_tensor, any_tensor, 1.0), sizes


@triton.jit
def product(a, b, total, EXACT: tl.constexpr):
    """total + a·b; EXACT: float32 is not rounded to fewer bits."""
    if EXACT:
        return tl.dot(a, b, total, input_precision="ieee")
    else:
        return tl.dot(a, b, total)


@triton.jit
def _whole(t, step, at, mask, PIECES: tl.constexpr):
    """t at these places, its pieces summed."""
    found = tl.load(t + at, mask=mask, other=0.0)
    if PIECES > 1:
        total = found.to(tl.float32)
        for piece in tl.static_range(1, PIECES):
            total += tl.load(t + piece * step + at, mask=mask, other=0.0).to(tl.float32)
        found = total.to(found.dtype)
    return found


@triton.jit
def raised(total, t, step, row_step, parts, size, at, scale, factor, row, real, line, inside, place,
           PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """total + the way up at these rows and lines, for the layer at `place` of a group; `scale` is that of each row's member."""
    column = tl.arange(0, WIDE)
    known = column < PARTS * RANK
    at_t = row.to(tl.int64)[:, None] * row_step + (place * RANK + column % RANK)[None, :]
    t_tile = _whole(t, step, at_t, real[:, None] & known[None, :], PIECES)
    start = parts + tl.multiple_of(tl.load(at + place), 64) + (column // RANK) * size + column % RANK
    e_tile = tl.load(start[:, None] + line[None, :] * RANK, mask=known[:, None] & inside[None, :], other=0.0)
    if PARTS == 1:
        return total + (scale * factor) * product(t_tile, e_tile, tl.zeros_like(total), EXACT)
    else:
        own = tl.where((column // RANK == 2)[None, :], scale, 1.0)
        return product((t_tile.to(tl.float32) * own).to(t_tile.dtype), e_tile, total, EXACT)


@triton.jit
def _down(x, parts, size, first_at, apart_by, scales, out, row_step, rows, each, factor,
          INNER_SIZE: tl.constexpr, PIECE: tl.constexpr, COLUMN: tl.constexpr, LINE: tl.constexpr, MODULES: tl.constexpr,
          PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ALL: tl.constexpr, EXACT: tl.constexpr,
          ROWS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """The columns of all modules side by side, so that x is read once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    column = tl.arange(0, ALL)
    module, own = column // WIDE, column % WIDE
    known = (module < MODULES) & (own < PARTS * RANK)
    start = parts + first_at + module * apart_by + (column % RANK) * COLUMN
    if PARTS > 1:
        start += (own // RANK) * size
    found = tl.zeros((ROWS, ALL), tl.float32)
    begin = tl.program_id(1) * PIECE
    for first in range(0, PIECE, INNER):
        place = begin + first + tl.arange(0, INNER)
        inside = place < INNER_SIZE
        x_tile = tl.load(
            x + row.to(tl.int64)[:, None] * INNER_SIZE + place[None, :], mask=real[:, None] & inside[None, :], other=0.0
        )
        d_tile = tl.load(start[None, :] + place[:, None] * LINE, mask=known[None, :] & inside[:, None], other=0.0)
        found = product(x_tile, d_tile, found, EXACT)
    if PARTS > 1:  # value and noise of a factor are brought together
        scale = tl.load(scales + row // each, mask=real, other=0.0)[:, None]
        number = tl.arange(0, WIDE // RANK)[None, :]
        weight = tl.where(number == 2, scale, tl.where(number < 2, 1.0, 0.0)) * factor
    else:
        weight = tl.where(tl.arange(0, WIDE // RANK)[None, :] == 0, 1.0, 0.0)
    apart = tl.reshape(found, [ROWS, ALL // WIDE, WIDE // RANK, RANK])
    total = tl.reshape(tl.sum(apart * weight[:, None, :, None], axis=2), [ROWS, ALL // WIDE * RANK])
    place = tl.arange(0, ALL // WIDE * RANK)
    target = out + (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * row_step + place[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & (place < MODULES * RANK)[None, :])


@triton.jit
def _up(y, t, step, row_step, parts, size, at, scales, factor, bias, rows, each, outer,
        PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
        BIAS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, OUTER: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    module = tl.program_id(2)
    real, inside = row < rows, line < outer
    scale = tl.load(scales + row // each, mask=real, other=0.0)[:, None]
    found = raised(tl.zeros((ROWS, OUTER), tl.float32), t, step, row_step, parts, size, at, scale, factor, row, real, line,
                   inside, module, PIECES, PARTS, RANK, WIDE, EXACT)  # fmt: skip
    if BIAS:
        found += tl.load(bias + module * outer + line, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = y + (module.to(tl.int64) * rows + row.to(tl.int64)[:, None]) * outer + line[None, :]
    tl.store(target, found.to(y.dtype.element_ty), mask=real[:, None] & inside[None, :])


def down(x: Tensor, factors: Factors, scales: Tensor) -> Tensor:
    """t[pieces, rows, G·rank and more] for G layers that share x[rows, inner]; the sum over the pieces is theirs.

    Three parts are LoRA's [rank, inner]: two of its value, one of its noise. One part is low-rank noise, [inner, rank].
    `scales` holds one s a member; members own equal, consecutive blocks of rows. `rank` is a power of two.
    """
    rows, inner = x.shape
    modules, at = len(factors.down_at), factors.down_at
    apart = at[1] - at[0] if modules > 1 else 0
    even = at == tuple(range(at[0], at[0] + modules * apart, apart) if apart else at[:1])
    columns = factors.wide * triton.next_power_of_2(modules)
    if modules > 1 and (not even or columns > WIDEST):
        return torch.cat([down(x, replace(factors, down_at=(one,)), scales)[..., : factors.rank] for one in at], 2)
    programs = triton.cdiv(rows, DOWN["ROWS"])
    pieces = max(1, min(BUSY // programs, inner // SHORTEST, 4))
    piece = triton.cdiv(triton.cdiv(inner, pieces), DOWN["INNER"]) * DOWN["INNER"]
    room = -(-modules * factors.rank // NARROWEST) * NARROWEST  # vectors are read from the start of any row
    out = torch.empty((pieces, rows, room), device=x.device, dtype=x.dtype)
    column, line = factors.steps(inner)
    _down[(programs, pieces)](
        x, factors.parts, factors.parts.shape[1], at[0], apart, scales, out, room, rows, rows // len(scales),
        factors.factor, INNER_SIZE=inner, PIECE=piece, COLUMN=column, LINE=line, MODULES=modules, PARTS=len(factors.parts),
        RANK=factors.rank, WIDE=factors.wide, ALL=columns,
        EXACT=x.dtype == torch.float32, num_stages=4 if columns * x.element_size() <= 128 else 2, **DOWN,
    )  # fmt: skip
    return out


def up(y: Tensor, term: Term, bias: Tensor | None) -> None:
    """y[G, rows, outer] = the way up + bias[G, outer]; each E is [outer, rank] in every part."""
    _, rows, outer = y.shape
    _up[(triton.cdiv(rows, UP["ROWS"]), triton.cdiv(outer, UP["OUTER"]), len(y))](
        y, *term.arguments, y if bias is None else bias, rows, rows // len(term.scales), outer,
        **term.sizes, BIAS=bias is not None, EXACT=y.dtype == torch.float32, **UP,
    )  # fmt: skip
