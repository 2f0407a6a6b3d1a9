"""Noise in memory, for what a forward reads repeatedly: LoRA factors and the factors of low-rank noise. And rows of a perturbed
embedding, whose noise is generated in registers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import words_on
from mezzo.engines.torch.gpu.kernels import flat_buffer, philox
from mezzo.engines.torch.weights.noise import ALIGN, quantiles
from mezzo.method import noise

FILL = {"CHUNKS": 32, "num_warps": 4}
# Rows of a factor that a program transposes.
TRANSPOSE_ROWS = 256


@triton.jit
def _perturb_rows(value, ids, seeds, scales, keys, table, out, count,
                  WIDTH: tl.constexpr, MEMBERS: tl.constexpr, KIND: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """out[m, i] = θ[ids[i]] + scale[m]·z of that row, which is made of whole chunks."""
    place = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    start = tl.load(ids + place) * WIDTH
    offset = chunk[:, None] * 64 + tl.arange(0, 64)[None, :]
    mask = offset < WIDTH
    theta = tl.load(value + start + offset, mask=mask, other=0).to(tl.float32)
    seed = tl.load(seeds).to(tl.uint64, bitcast=True)
    number = (start // 64 + chunk).to(tl.uint64)
    key = tl.load(keys).to(tl.uint64, bitcast=True) + tl.zeros_like(number)
    z = philox.scaled_noise(1.0, seed, key, number, table, KIND, CHUNKS)
    for member in tl.static_range(MEMBERS):
        perturbed = theta + tl.load(scales + member) * z
        tl.store(out + (member * count + place) * WIDTH + offset, perturbed, mask=mask)


@triton.jit
def _transpose(source, target, entries, RANK: tl.constexpr, ROWS: tl.constexpr):
    """Copy factors [rows, RANK] of `source` to [RANK, rows]; entries[factor] = (source offset, target offset, rows)."""
    entry = entries + 3 * tl.program_id(1)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
    rows = tl.load(entry + 2)
    mask = (row < rows)[:, None] & (column >= 0)[None, :]
    values = tl.load(source + tl.load(entry) + row[:, None] * RANK + column[None, :], mask=mask, other=0.0)
    tl.store(target + tl.load(entry + 1) + column[None, :] * rows + row[:, None], values, mask=mask)


class TransposedFactors:
    """Copies [rank, rows] of factors that lie as [rows, rank] in one buffer; the copies may be anywhere in memory."""

    def __init__(self, copies: Sequence[tuple[int, Tensor]]) -> None:
        """`copies`: the offset of each factor in the buffer, and the tensor its transposed copy is written to."""
        self.base = copies[0][1]
        self.rank, self.max_rows = len(self.base), max(target.shape[1] for _, target in copies)
        words: list[int] = []
        for offset, target in copies:
            assert target.is_contiguous() and len(target) == self.rank
            distance = (target.data_ptr() - self.base.data_ptr()) // target.element_size()
            words += (offset, distance % 2**64, target.shape[1])
        self.entries = words_on(self.base.device, words)

    def fill(self, source: Tensor) -> None:
        _transpose[(triton.cdiv(self.max_rows, TRANSPOSE_ROWS), len(self.entries) // 3)](
            source, self.base, self.entries, RANK=self.rank, ROWS=TRANSPOSE_ROWS
        )


class NoiseBuffer:
    """The noise of several (name, elements) in the layout of a flat buffer, for one seed at a time."""

    def __init__(self, kind: noise.Kind, sizes: Sequence[tuple[str, int]], values: Tensor) -> None:
        self.kind, self.values = kind, values
        self.keys, self.numbers = flat_buffer.chunk_table(sizes, values.device)
        self.zeros = torch.zeros_like(values)
        self.one = torch.ones(1, device=values.device)

    def fill(self, seed: Tensor) -> None:
        """Write the noise under `seed` into `values`: zeros, perturbed with a scale of one."""
        count = self.zeros.numel()
        flat_buffer.perturb[(triton.cdiv(count, ALIGN * FILL["CHUNKS"]),)](
            self.zeros, self.values, count, self.keys, self.numbers, seed, self.one, quantiles(self.zeros.device), 1,
            MEMBERS=1, SINGLE=True, KIND=philox.KINDS[self.kind], FLAT=True, **FILL,
        )  # fmt: skip


def perturb_rows(value: Tensor, ids: Tensor, key: Tensor, seed: Tensor, scales: Tensor, kind: noise.Kind) -> Tensor:
    """[P, *ids.shape, width] in float32: rows of a matrix at members that differ by their scale along one direction.

    `key` is that of the matrix's name; the width is a multiple of 64.
    """
    members, width = len(scales), value.shape[1]
    out = torch.empty((members, *ids.shape, width), device=value.device)
    _perturb_rows[(ids.numel(),)](
        value, ids.contiguous(), seed, scales, key, quantiles(value.device), out, ids.numel(),
        WIDTH=width, MEMBERS=members, KIND=philox.KINDS[kind], CHUNKS=triton.next_power_of_2(width // ALIGN),
        num_warps=4,
    )  # fmt: skip
    return out
