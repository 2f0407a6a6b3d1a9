"""Noise written to memory, for what reads it again and again within a forward: thin factors, and rows of embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import words_on
from mezzo.engines.torch.gpu.kernels import philox
from mezzo.engines.torch.weights.noise import ALIGN, quantiles
from mezzo.method import noise

KINDS = {"rademacher": philox.SIGNS, "gaussian": philox.NORMALS}


@triton.jit
def _rows(value, ids, seeds, scales, key, table, out, count,
          WIDTH: tl.constexpr, MEMBERS: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out[m, i] = θ[ids[i]] + scale[m]·z of that row, whose elements are whole rows of 64."""
    place = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, R)
    start = tl.load(ids + place) * WIDTH
    at = line[:, None] * 64 + tl.arange(0, 64)[None, :]
    real = at < WIDTH
    theta = tl.load(value + start + at, mask=real, other=0).to(tl.float32)
    seed = tl.load(seeds).to(tl.uint64, bitcast=True)
    row = (start // 64 + line).to(tl.uint64)
    key_of = tl.load(key).to(tl.uint64, bitcast=True) + tl.zeros_like(row)
    z = philox.scaled_noise(1.0, seed, key_of, row, table, KIND, R)
    for member in tl.static_range(MEMBERS):
        moved = theta + tl.load(scales + member) * z
        tl.store(out + (member * count + place) * WIDTH + at, moved, mask=real)


@triton.jit
def _turned(source, target, entries, RANK: tl.constexpr, LINES: tl.constexpr):
    """Factors [lines, RANK] of `source` as RANK rows; entries[factor]: where it begins, where it goes to, how many lines."""
    entry = entries + 3 * tl.program_id(1)
    line, column = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, RANK)
    lines = tl.load(entry + 2)
    real = (line < lines)[:, None] & (column >= 0)[None, :]
    found = tl.load(source + tl.load(entry) + line[:, None] * RANK + column[None, :], mask=real, other=0.0)
    tl.store(target + tl.load(entry + 1) + column[None, :] * lines + line[:, None], found, mask=real)


class Turned:
    """Where factors that lie as [lines, rank] in one buffer are kept as [rank, lines] too, anywhere in memory."""

    def __init__(self, places: Sequence[tuple[int, Tensor]]) -> None:
        self.target = places[0][1]
        self.rank, self.longest = len(self.target), max(rows.shape[1] for _, rows in places)
        words: list[int] = []
        for start, rows in places:
            assert rows.is_contiguous() and len(rows) == self.rank
            apart = (rows.data_ptr() - self.target.data_ptr()) // rows.element_size()
            words += (start, apart % 2**64, rows.shape[1])
        self.entries = words_on(self.target.device, words)

    def fill(self, source: Tensor) -> None:
        lines = 256
        _turned[(triton.cdiv(self.longest, lines), len(self.entries) // 3)](
            source, self.target, self.entries, RANK=self.rank, LINES=lines
        )


class Streams:
    """Noise of tensors laid side by side, each starting at a multiple of 64 elements."""

    def __init__(
        self, kind: noise.Kind, tensors: Sequence[tuple[str, int]], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.kind = kind
        lines = [-(-count // ALIGN) for _, count in tensors]
        keys = [[noise.name_hash(name)] * 2 * rows for (name, _), rows in zip(tensors, lines, strict=True)]
        self.keys = words_on(device, [key for many in keys for key in many])
        self.index = torch.cat([torch.arange(rows) for rows in lines]).to(device)
        self.zeros = torch.zeros(sum(lines) * ALIGN, device=device, dtype=dtype)
        self.one = torch.ones(1, device=device)
        self.values = torch.empty_like(self.zeros)

    def fill(self, seed: Tensor) -> None:
        """The noise under `seed` into `values`: a point one step away from zero."""
        count, rows = self.zeros.numel(), 32
        philox.perturb[(triton.cdiv(count, ALIGN * rows),)](
            self.zeros, self.values, count, self.keys, self.index, seed, self.one, quantiles(self.zeros.device),
            MEMBERS=1, TERMS=1, KIND=KINDS[self.kind], FLAT=True, R=rows, num_warps=4,
        )  # fmt: skip


def moved_rows(value: Tensor, ids: Tensor, key: Tensor, seed: Tensor, scales: Tensor, kind: noise.Kind) -> Tensor:
    """[P, *ids.shape, width] in float32: rows of a matrix, each member's moved by its scale along the matrix's noise.

    `key` is the name's; the width is a multiple of 64.
    """
    members, width = len(scales), value.shape[1]
    out = torch.empty((members, *ids.shape, width), device=value.device)
    _rows[(ids.numel(),)](
        value, ids.contiguous(), seed, scales, key, quantiles(value.device), out, ids.numel(),
        WIDTH=width, MEMBERS=members, KIND=KINDS[kind], R=triton.next_power_of_2(width // ALIGN), num_warps=4,
    )  # fmt: skip
    return out
