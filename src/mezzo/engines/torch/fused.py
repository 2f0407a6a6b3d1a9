"""`plain`'s work on a GPU: noise, perturbation and update of a tensor in one kernel each. Same weights, bit for bit."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo import noise, rounding
from mezzo.engines.torch import kernels
from mezzo.engines.torch.flat import Flat
from mezzo.engines.torch.noise import ALIGN, NoiseSource, quantiles
from mezzo.engines.torch.plain import Plain
from mezzo.engines.torch.points import Move, Point, words_on
from mezzo.types import Trained

LARGEST_RANK = 32
"""Signs of a factor's row that fit into the kernel's number; noise of a higher rank is left to plain torch."""
KINDS = {"rademacher": kernels.SIGNS, "gaussian": kernels.NORMALS}
TYPES = {torch.float32: kernels.FLOAT32, torch.bfloat16: kernels.BFLOAT16, torch.float16: kernels.FLOAT16}
PERTURB = UPDATE = {"R": 128, "num_warps": 4}
"""Rows of 64 elements a program: as many as it has threads, so that each makes the noise of one row."""
EXACT = {"enable_fp_fusion": False}
"""A product and a sum are two roundings, as everywhere else."""


class DeviceNoise(NoiseSource):
    """Streams made where they are used: nothing is sent to the device but seeds."""

    def __init__(self, kind: noise.Kind, device: torch.device) -> None:
        super().__init__(kind, device)
        self._keys: dict[str, Tensor] = {}
        self._seeds: dict[int, Tensor] = {}

    def stream(self, seed: int, name: str, first: int, last: int) -> Tensor:
        return self._words(seed, name, last - first, first, None, 1)

    def rows(self, seed: int, name: str, shape: tuple[int, int], ids: Tensor) -> Tensor:
        """Only the words of these rows are made, where rows are whole words."""
        per_row, rest = divmod(shape[1] * noise.BITS[self.kind], 64)
        if rest:
            return super().rows(seed, name, shape, ids)
        packed = self._words(seed, name, ids.numel() * per_row, 0, ids.contiguous(), per_row)
        return self.spread(packed, None).view(*ids.shape, shape[1])

    def _words(self, seed: int, name: str, count: int, first: int, rows: Tensor | None, per_row: int) -> Tensor:
        out = torch.empty(count, dtype=torch.int64, device=self.device)
        size = 256
        if count:
            keys = self.keys(name)
            kernels.words[(-(-count // size),)](
                *(out, count, first, keys if rows is None else rows, per_row, self.seed(seed), keys),
                PICKED=rows is not None,
                B=size,
            )
        return out.view(torch.uint8)

    def keys(self, name: str) -> Tensor:
        """The keys of a tensor's streams: its noise's, its rounding's, and those of low-rank factors."""
        if name not in self._keys:
            named = (name, rounding.stream(name), f"{name}/U", f"{name}/V")
            self._keys[name] = words_on(self.device, [noise.name_hash(one) for one in named])
        return self._keys[name]

    def seed(self, seed: int) -> Tensor:
        if seed not in self._seeds:
            self._seeds[seed] = words_on(self.device, [seed])
        return self._seeds[seed]

    def forget(self) -> None:
        super().forget()
        self._seeds.clear()


class Fused(Plain):
    """Kernels for flat buffers and for matrices; what they do not cover is left to plain torch."""

    source: DeviceNoise

    def __init__(self, source: DeviceNoise) -> None:
        super().__init__(source)
        self._tables: weakref.WeakKeyDictionary[Flat, tuple[Tensor, Tensor]] = weakref.WeakKeyDictionary()

    def small_members(self, flat: Flat, point: Point) -> Tensor:
        out = torch.empty(len(point.probes), flat.values.numel(), device=self.source.device)
        keys, index = self._table(flat)
        self._perturb(flat.values, out, keys, index, point)
        return out

    def members(self, trained: Trained, value: Tensor, point: Point, out: Tensor) -> None:
        if trained.rank or not point.seeds:
            super().members(trained, value, point, out)
        else:
            self._perturb(value, out, self.source.keys(trained.name), None, point)

    def move_small(self, flat: Flat, move: Move) -> None:
        keys, index = self._table(flat)
        self._update(flat.values, keys, index, flat.decay, move)

    def move(self, trained: Trained, value: Tensor, move: Move) -> None:
        if trained.rank > LARGEST_RANK:
            super().move(trained, value, move)
        else:
            self._update(value, self.source.keys(trained.name), None, trained.decay, move, trained)

    def _perturb(self, value: Tensor, out: Tensor, keys: Tensor, index: Tensor | None, point: Point) -> None:
        count = value.numel()
        kernels.perturb[_grid(count, PERTURB)](
            value,
            out,
            count,
            keys,
            keys if index is None else index,
            point.keys,
            point.scales,
            quantiles(self.source.device),
            MEMBERS=len(point.probes),
            TERMS=len(point.seeds),
            KIND=KINDS[self.source.kind],
            FLAT=index is not None,
            **PERTURB,
            **EXACT,
        )

    def _update(
        self,
        value: Tensor,
        keys: Tensor,
        index: Tensor | None,
        decay: bool,
        move: Move,
        trained: Trained | None = None,
    ) -> None:
        count, rank = value.numel(), trained.rank if trained else 0
        left = right = keys
        rows = width = 1
        if trained and rank:
            rows, width = trained.shape
            left, right = self._factors(rows, keys[2:], move, rank), self._factors(width, keys[3:], move, rank)
        kernels.update[_grid(count, UPDATE)](
            value if value.dtype == torch.float32 else value.view(torch.int16),
            count,
            keys,
            keys if index is None else index,
            move.keys,
            move.coefs,
            quantiles(self.source.device),
            left,
            right,
            rows,
            width,
            rank,
            float(np.float32(1 / np.sqrt(rank))) if rank else 1.0,
            ALIGNED=width % ALIGN == 0,
            TERMS=len(move.update.terms),
            KIND=kernels.FACTORS if rank else KINDS[self.source.kind],
            FLAT=index is not None,
            DECAY=decay,
            DTYPE=TYPES[value.dtype],
            **UPDATE,
            **EXACT,
        )

    def _factors(self, count: int, keys: Tensor, move: Move, rank: int) -> Tensor:
        terms, size = len(move.update.terms), 128
        out = torch.empty(max(1, terms), count, dtype=torch.int32, device=self.source.device)
        if terms:
            kernels.factor_rows[(-(-count // size), terms)](out, count, move.keys, keys, RANK=rank, B=size)
        return out

    def _table(self, flat: Flat) -> tuple[Tensor, Tensor]:
        """For every row of 64 elements in a flat buffer: its tensor's keys, and its number within that tensor."""
        if flat not in self._tables:
            keys: list[int] = []
            index: list[int] = []
            for name, count in flat.named:
                rows = -(-count // ALIGN)
                keys += [noise.name_hash(name), noise.name_hash(rounding.stream(name))] * rows
                index += range(rows)
            device = self.source.device
            self._tables[flat] = words_on(device, keys), torch.tensor(index, dtype=torch.int64, device=device)
        return self._tables[flat]


def _grid(count: int, shape: dict[str, Any]) -> tuple[int]:
    return (-(-count // (ALIGN * shape["R"])),)
