"""Thin matrix products in kernels: t = x·Dᵀ with a handful of columns, and y = t·Eᵀ, for LoRA and for low-rank noise.

Members differ only in the scale s of one direction, so both signs share every product. A factor of LoRA is A + s·z. Rounded
to sixteen bits, it would lose much of s·z; so its value is kept as the sum of two sixteen-bit parts, its noise is a third part,
and t holds its columns once for every part: (t, t, s·t). Low-rank noise has one part.
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


Arguments = tuple[Tensor, int, int, int, Tensor, int, Tensor, Tensor, float]
"""What the way up is told: t, from one of its pieces, layers and rows to the next; factors, from one part of them to the next,
where they begin; and the scales of the members with their factor, where t does not hold them."""


@dataclass(frozen=True)
class Term:
    """The thin products t[pieces, G, rows, wide] of a group of layers, to be summed over the pieces, for whom the way up is
    still to be done; `places` says which of the group belongs to which of the layers that are computed together (−1: none)."""

    t: Tensor
    factors: Factors
    places: tuple[int, ...] = (0,)

    @property
    def arguments(self) -> Arguments:
        pieces, groups, rows = (self.t.stride(axis) for axis in range(3))
        parts = self.factors.parts
        return self.t, pieces, groups, rows, parts, parts.shape[1], self.factors.up_at, self.t, 1.0

    @property
    def sizes(self) -> dict[str, int]:
        parts = len(self.factors.parts)
        sizes = {"PIECES": len(self.t), "PARTS": parts, "RANK": self.factors.rank, "WIDE": self.factors.wide}
        return {**sizes, "BESIDE": False}


@dataclass(frozen=True)
class Beside:
    """The same of low-rank noise whose way down was part of the layers' product: t[G, rows, rank] are columns of it, without
    their scales. For those who multiply plainly the factors of the way up are there turned as well, up[G, rank, outer]."""

    t: Tensor
    factors: Factors
    up: Tensor
    scales: Tensor
    places: tuple[int, ...] = (0,)

    @property
    def arguments(self) -> Arguments:
        factors, (groups, rows) = self.factors, (self.t.stride(0), self.t.stride(1))
        return self.t, 0, groups, rows, factors.parts, 0, factors.up_at, self.scales, factors.factor

    @property
    def sizes(self) -> dict[str, int]:
        return {"PIECES": 1, "PARTS": 1, "RANK": self.factors.rank, "WIDE": self.factors.wide, "BESIDE": True}


def no_term(any_tensor: Tensor) -> tuple[Arguments, dict[str, int]]:
    """Arguments and sizes where there is nothing to add."""
    sizes = {"PIECES": 1, "PARTS": 1, "RANK": 1, "WIDE": NARROWEST, "BESIDE": False}
    return (any_tensor, 0, 0, 0, any_tensor, 0, any_tensor, any_tensor, 1.0), sizes


@triton.jit
def product(a, b, total, EXACT: tl.constexpr):
    """total + a·b; EXACT: float32 is not rounded to fewer bits."""
    if EXACT:
        return tl.dot(a, b, total, input_precision="ieee")
    else:
        return tl.dot(a, b, total)


@triton.jit
def whole(t, step, at, mask, PIECES: tl.constexpr):
    """t at these places, its pieces summed."""
    found = tl.load(t + at, mask=mask, other=0.0)
    if PIECES > 1:
        total = found.to(tl.float32)
        for piece in tl.static_range(1, PIECES):
            total += tl.load(t + piece * step + at, mask=mask, other=0.0).to(tl.float32)
        found = total.to(found.dtype)
    return found


@triton.jit
def _down(x, parts, size, first_at, apart_by, scales, out, rows, each, factor,
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
    # The parts of a factor are brought together, and t written once for every part of the way up.
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
    out += tl.program_id(1).to(tl.int64) * MODULES * rows * WIDE
    target = out + (module.to(tl.int64)[None, :] * rows + row.to(tl.int64)[:, None]) * WIDE + own[None, :]
    tl.store(target, wide.to(out.dtype.element_ty), mask=real[:, None] & (module < MODULES)[None, :])


@triton.jit
def _up(y, t, step, group_step, row_step, parts, size, at, scales, factor, bias, rows, outer,
        PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, BESIDE: tl.constexpr,
        BIAS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, OUTER: tl.constexpr):  # fmt: skip
    tl.static_assert(not BESIDE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    module = tl.program_id(2)
    column = tl.arange(0, WIDE)
    real, inside = row < rows, line < outer
    at_t = module.to(tl.int64) * group_step + row.to(tl.int64)[:, None] * row_step + column[None, :]
    t_tile = whole(t, step, at_t, real[:, None], PIECES)
    start = parts + tl.multiple_of(tl.load(at + module), 64) + (column // RANK) * size + column % RANK
    e_tile = tl.load(
        start[:, None] + line[None, :] * RANK, mask=(column // RANK < PARTS)[:, None] & inside[None, :], other=0.0
    )
    found = product(t_tile, e_tile, tl.zeros((ROWS, OUTER), tl.float32), EXACT)
    if BIAS:
        found += tl.load(bias + module * outer + line, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = y + (module.to(tl.int64) * rows + row.to(tl.int64)[:, None]) * outer + line[None, :]
    tl.store(target, found.to(y.dtype.element_ty), mask=real[:, None] & inside[None, :])


def down(x: Tensor, factors: Factors, scales: Tensor) -> Tensor:
    """t[pieces, G, rows, columns] for G layers that share x[rows, inner]; the sum over the pieces is theirs.

    Three parts are LoRA's [rank, inner]: two of its value, one of its noise. One part is low-rank noise, [inner, rank].
    `scales` holds one s a member; members own equal, consecutive blocks of rows. `rank` is a power of two.
    """
    rows, inner = x.shape
    modules, at = len(factors.down_at), factors.down_at
    apart = at[1] - at[0] if modules > 1 else 0
    even = at == tuple(range(at[0], at[0] + modules * apart, apart) if apart else at[:1])
    columns = factors.wide * triton.next_power_of_2(modules)
    if modules > 1 and (not even or columns > WIDEST):
        return torch.cat([down(x, replace(factors, down_at=(one,)), scales) for one in at], 1)
    programs = triton.cdiv(rows, DOWN["ROWS"])
    pieces = max(1, min(BUSY // programs, inner // SHORTEST, 4))
    piece = triton.cdiv(triton.cdiv(inner, pieces), DOWN["INNER"]) * DOWN["INNER"]
    out = torch.empty((pieces, modules, rows, factors.wide), device=x.device, dtype=x.dtype)
    column, line = factors.steps(inner)
    _down[(programs, pieces)](
        x, factors.parts, factors.parts.shape[1], at[0], apart, scales, out, rows, rows // len(scales),
        factors.factor, INNER_SIZE=inner, PIECE=piece, COLUMN=column, LINE=line, MODULES=modules, PARTS=len(factors.parts),
        RANK=factors.rank, WIDE=factors.wide, ALL=columns,
        EXACT=x.dtype == torch.float32, num_stages=4 if columns * x.element_size() <= 128 else 2, **DOWN,
    )  # fmt: skip
    return out


def up(y: Tensor, term: Term, bias: Tensor | None) -> None:
    """y[G, rows, outer] = t·Eᵀ + bias[G, outer]; each E is [outer, rank] in every part."""
    _, rows, outer = y.shape
    _up[(triton.cdiv(rows, UP["ROWS"]), triton.cdiv(outer, UP["OUTER"]), len(y))](
        y, *term.arguments, y if bias is None else bias, rows, outer,
        **term.sizes, BIAS=bias is not None, EXACT=y.dtype == torch.float32, **UP,
    )  # fmt: skip
