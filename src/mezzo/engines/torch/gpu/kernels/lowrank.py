"""Low-rank matrix products in kernels, for LoRA and for low-rank noise: the down-projection t = x·Dᵀ to a few columns, and the
up-projection t·Eᵀ. LoRA's D and E are A and B, those of low-rank noise are V and U.

Members differ only in their scale s along one direction, so both signs share every product. A LoRA factor at a member is A + s·z.
Rounded to 16 bits, it would lose much of s·z. So it is kept as three 16-bit components: the value as a sum of two, high and low,
and the noise z. The up-projection multiplies (t, t, s·t) with them. Low-rank noise has one component, and its product is
multiplied by s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

# The fewest columns that the tensor cores take.
MIN_COLUMNS = 16
DOWN_LAUNCH = {"ROWS": 64, "INNER": 128, "num_warps": 4}
# The fastest tiles on an H200, for widths 1024 and 4096. With fewer than 64 rows, Triton does not use Hopper's larger
# instructions for the down-projection.
UP_LAUNCH = {"ROWS": 64, "OUTER": 64, "num_warps": 4}
# Columns of one launch of the down-projection; more do not fit on a multiprocessor.
MAX_COLUMNS = 128
# Programs that keep a GPU busy: the sum of a down-projection is split (split-K) to get so many.
TARGET_PROGRAMS = 256
# The fewest summands that are worth a program, and the most splits.
MIN_SPLIT, MAX_SPLITS = 512, 4


@dataclass(frozen=True)
class Factors:
    """The factors of layers that read the same input, and where each begins in every component."""

    rank: int
    scaling: float
    components: Tensor
    """[3, n]: high part, low part and noise of LoRA factors; or [1, n]: factors of low-rank noise."""
    down_offsets: tuple[int, ...]
    up_offsets: Tensor

    @property
    def columns(self) -> int:
        """Columns of all components for one layer, padded to what kernels take."""
        return max(MIN_COLUMNS, triton.next_power_of_2(len(self.components) * self.rank))  # type: ignore[no-any-return]


# Of an up-projection: t, the strides of its splits and rows; the components, their stride and the offsets of the up-
# factors; the members' scales; the scaling of low-rank noise.
Arguments = tuple[Tensor, int, int, Tensor, int, Tensor, Tensor, float]


@dataclass(frozen=True)
class LowRankTerm:
    """The down-projections t[splits, rows, G·rank or more] of a group of layers, to be summed over the splits. The kernel that
    adds the term to the layers' outputs does the up-projection."""

    t: Tensor
    factors: Factors
    scales: Tensor
    layers: tuple[int, ...] = (0,)
    """For each of the layers that are computed together, its number in the group; −1: it has no factors."""
    transposed_up: Tensor | None = None
    """[G, rank, outer]: the up-factors of low-rank noise, for kernels that multiply without the tensor cores."""

    @property
    def arguments(self) -> Arguments:
        factors, components = self.factors, self.factors.components
        return (
            self.t, self.t.stride(0), self.t.stride(1), components, components.shape[1], factors.up_offsets, self.scales,
            factors.scaling,
        )  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """Compile-time sizes."""
        factors = self.factors
        return {
            "SPLITS": len(self.t), "COMPONENTS": len(factors.components), "RANK": factors.rank, "COLUMNS": factors.columns
        }  # fmt: skip


def no_term(any_tensor: Tensor) -> tuple[Arguments, dict[str, int]]:
    """Arguments and sizes where there is no term to add."""
    sizes = {"SPLITS": 1, "COMPONENTS": 1, "RANK": 1, "COLUMNS": MIN_COLUMNS}
    return (any_tensor, 0, 0, any_tensor, 0, any_tensor, any_tensor, 1.0), sizes


@triton.jit
def dot(a, b, total, EXACT: tl.constexpr):
    """total + a·b; EXACT: float32 is not rounded to fewer bits."""
    if EXACT:
        return tl.dot(a, b, total, input_precision="ieee")
    else:
        return tl.dot(a, b, total)


@triton.jit
def _load_summed(t, split_stride, offset, mask, SPLITS: tl.constexpr):
    """t at these offsets, summed over its splits."""
    values = tl.load(t + offset, mask=mask, other=0.0)
    if SPLITS > 1:
        total = values.to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(t + split * split_stride + offset, mask=mask, other=0.0).to(tl.float32)
        values = total.to(values.dtype)
    return values


@triton.jit
def add_up_projection(total, t, split_stride, row_stride, components, component_stride, up_offsets, scale, scaling,
                      row, row_mask, output, output_mask, layer,
                      SPLITS: tl.constexpr, COMPONENTS: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
                      EXACT: tl.constexpr):  # fmt: skip
    """total + t·Eᵀ at these rows and outputs, for one layer of a group; `scale` is that of each row's member."""
    column = tl.arange(0, COLUMNS)
    column_mask = column < COMPONENTS * RANK
    t_offset = row.to(tl.int64)[:, None] * row_stride + (layer * RANK + column % RANK)[None, :]
    t_tile = _load_summed(t, split_stride, t_offset, row_mask[:, None] & column_mask[None, :], SPLITS)
    first = components + tl.multiple_of(tl.load(up_offsets + layer), 64)
    start = first + (column // RANK) * component_stride + column % RANK
    e_tile = tl.load(
        start[:, None] + output[None, :] * RANK, mask=column_mask[:, None] & output_mask[None, :], other=0.0
    )
    if COMPONENTS == 1:
        return total + (scale * scaling) * dot(t_tile, e_tile, tl.zeros_like(total), EXACT)
    else:
        weight = tl.where((column // RANK == 2)[None, :], scale, 1.0)
        return dot((t_tile.to(tl.float32) * weight).to(t_tile.dtype), e_tile, total, EXACT)


@triton.jit
def _project_down(x, components, component_stride, first_offset, layer_stride, scales, out, out_stride, rows,
                  rows_per_member, scaling, INNER_SIZE: tl.constexpr, SPLIT: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
                  ROW_STRIDE: tl.constexpr, LAYERS: tl.constexpr, COMPONENTS: tl.constexpr, RANK: tl.constexpr,
                  COLUMNS: tl.constexpr, ALL_COLUMNS: tl.constexpr, EXACT: tl.constexpr,
                  ROWS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """The columns of all layers side by side, so that x is read once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    column = tl.arange(0, ALL_COLUMNS)
    layer, in_layer = column // COLUMNS, column % COLUMNS
    column_mask = (layer < LAYERS) & (in_layer < COMPONENTS * RANK)
    start = components + first_offset + layer * layer_stride + (column % RANK) * COLUMN_STRIDE
    if COMPONENTS > 1:
        start += (in_layer // RANK) * component_stride
    product = tl.zeros((ROWS, ALL_COLUMNS), tl.float32)
    split_start = tl.program_id(1) * SPLIT
    for first in range(0, SPLIT, INNER):
        inner = split_start + first + tl.arange(0, INNER)
        inner_mask = inner < INNER_SIZE
        x_tile = tl.load(
            x + row.to(tl.int64)[:, None] * INNER_SIZE + inner[None, :],
            mask=row_mask[:, None] & inner_mask[None, :],
            other=0.0,
        )
        d_tile = tl.load(
            start[None, :] + inner[:, None] * ROW_STRIDE, mask=column_mask[None, :] & inner_mask[:, None], other=0.0
        )
        product = dot(x_tile, d_tile, product, EXACT)
    if COMPONENTS > 1:  # a factor's value and noise are combined
        scale = tl.load(scales + row // rows_per_member, mask=row_mask, other=0.0)[:, None]
        component = tl.arange(0, COLUMNS // RANK)[None, :]
        weight = tl.where(component == 2, scale, tl.where(component < 2, 1.0, 0.0)) * scaling
    else:
        weight = tl.where(tl.arange(0, COLUMNS // RANK)[None, :] == 0, 1.0, 0.0)
    by_component = tl.reshape(product, [ROWS, ALL_COLUMNS // COLUMNS, COLUMNS // RANK, RANK])
    total = tl.reshape(tl.sum(by_component * weight[:, None, :, None], axis=2), [ROWS, ALL_COLUMNS // COLUMNS * RANK])
    target_column = tl.arange(0, ALL_COLUMNS // COLUMNS * RANK)
    target = out + (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * out_stride + target_column[None, :]
    mask = row_mask[:, None] & (target_column < LAYERS * RANK)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _project_up(y, t, split_stride, row_stride, components, component_stride, up_offsets, scales, scaling, bias, rows,
                rows_per_member, outer, SPLITS: tl.constexpr, COMPONENTS: tl.constexpr, RANK: tl.constexpr,
                COLUMNS: tl.constexpr, BIAS: tl.constexpr, EXACT: tl.constexpr,
                ROWS: tl.constexpr, OUTER: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    layer = tl.program_id(2)
    row_mask, output_mask = row < rows, output < outer
    scale = tl.load(scales + row // rows_per_member, mask=row_mask, other=0.0)[:, None]
    total = add_up_projection(tl.zeros((ROWS, OUTER), tl.float32), t, split_stride, row_stride, components,
                              component_stride, up_offsets, scale, scaling, row, row_mask, output, output_mask, layer,
                              SPLITS, COMPONENTS, RANK, COLUMNS, EXACT)  # fmt: skip
    if BIAS:
        total += tl.load(bias + layer * outer + output, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    target = y + (layer.to(tl.int64) * rows + row.to(tl.int64)[:, None]) * outer + output[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


def project_down(x: Tensor, factors: Factors, scales: Tensor) -> Tensor:
    """t[splits, rows, G·rank or more] for G layers that share x[rows, inner]; the caller sums over the splits.

    Three components are LoRA's D [rank, inner], one is that of low-rank noise, [inner, rank]. `scales` holds one s a member;
    members own equal, consecutive blocks of rows. `rank` is a power of two.
    """
    rows, inner = x.shape
    layers, offsets = len(factors.down_offsets), factors.down_offsets
    distance = offsets[1] - offsets[0] if layers > 1 else 0
    even = offsets == tuple(range(offsets[0], offsets[0] + layers * distance, distance) if distance else offsets[:1])
    columns = factors.columns * triton.next_power_of_2(layers)
    if layers > 1 and (not even or columns > MAX_COLUMNS):
        each = (project_down(x, replace(factors, down_offsets=(offset,)), scales) for offset in offsets)
        return torch.cat([t[..., : factors.rank] for t in each], 2)
    programs = triton.cdiv(rows, DOWN_LAUNCH["ROWS"])
    splits = max(1, min(TARGET_PROGRAMS // programs, inner // MIN_SPLIT, MAX_SPLITS))
    split = triton.cdiv(triton.cdiv(inner, splits), DOWN_LAUNCH["INNER"]) * DOWN_LAUNCH["INNER"]
    width = -(-layers * factors.rank // MIN_COLUMNS) * MIN_COLUMNS  # every row begins where vectors can be loaded
    out = torch.empty((splits, rows, width), device=x.device, dtype=x.dtype)
    column_stride, row_stride = (1, factors.rank) if len(factors.components) == 1 else (inner, 1)
    _project_down[(programs, splits)](
        x, factors.components, factors.components.shape[1], offsets[0], distance, scales, out, width, rows,
        rows // len(scales), factors.scaling, INNER_SIZE=inner, SPLIT=split, COLUMN_STRIDE=column_stride,
        ROW_STRIDE=row_stride, LAYERS=layers, COMPONENTS=len(factors.components), RANK=factors.rank,
        COLUMNS=factors.columns, ALL_COLUMNS=columns, EXACT=x.dtype == torch.float32,
        num_stages=4 if columns * x.element_size() <= 128 else 2, **DOWN_LAUNCH,
    )  # fmt: skip
    return out


def project_up(y: Tensor, term: LowRankTerm, bias: Tensor | None) -> None:
    """y[G, rows, outer] = up-projection + bias[G, outer]; each E is [outer, rank] in every component."""
    _, rows, outer = y.shape
    _project_up[(triton.cdiv(rows, UP_LAUNCH["ROWS"]), triton.cdiv(outer, UP_LAUNCH["OUTER"]), len(y))](
        y, *term.arguments, y if bias is None else bias, rows, rows // len(term.scales), outer,
        **term.sizes, BIAS=bias is not None, EXACT=y.dtype == torch.float32, **UP_LAUNCH,
    )  # fmt: skip
