"""`plain`'s work on a GPU: noise, perturbation and update in few kernels. Same weights, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint, words_on
from mezzo.engines.torch.gpu.kernels import matrices, philox
from mezzo.engines.torch.gpu.noise_layout import Group, Matrix, Run, Signs, groups_of
from mezzo.engines.torch.weights.flat_buffer import FlatBuffer
from mezzo.engines.torch.weights.noise import ALIGN, NoiseSource, quantiles
from mezzo.engines.torch.weights.reference import ReferenceOps
from mezzo.method import noise, rounding
from mezzo.types import TrainedTensor

LARGEST_RANK = 32
"""Signs of a factor's row that fit into the kernel's number; noise of a higher rank is left to plain torch."""
KINDS = {"rademacher": philox.SIGNS, "gaussian": philox.NORMALS}
TYPES = {torch.float32: philox.FLOAT32, torch.bfloat16: philox.BFLOAT16, torch.float16: philox.FLOAT16}
FLAT = {"R": 128, "num_warps": 4}
"""Rows of 64 elements a program: as many as it has threads, so that each makes the noise of one row."""
MATRIX = {"R": 32, "num_warps": 4}
"""A quarter of the rows where their signs are in memory: each thread makes the rounding bits of sixteen elements."""
WHOLE = ALIGN * matrices.WORDS
"""Matrices whose sizes are multiples of this many elements have their signs side by side without a gap."""
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
            philox.words[(-(-count // size),)](
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


class FusedOps(ReferenceOps):
    """Kernels for flat buffers and for matrices; what they do not cover is left to plain torch."""

    source: DeviceNoise

    def __init__(self, source: DeviceNoise) -> None:
        super().__init__(source)
        self._tables: weakref.WeakKeyDictionary[FlatBuffer, tuple[Tensor, Tensor]] = weakref.WeakKeyDictionary()
        self._plans: dict[tuple[tuple[str, int], ...], list[Group]] = {}
        self._keys: dict[tuple[str, ...], Tensor] = {}
        self._shared: dict[str, Signs] = {}
        self._made: tuple[Signs, ProbePoint, Tensor] | None = None

    def small_members(self, flat: FlatBuffer, point: ProbePoint) -> Tensor:
        out = torch.empty(len(point.probes), flat.values.numel(), device=self.source.device)
        keys, index = self._table(flat)
        self._perturb(flat.values, out, keys, index, point)
        return out

    def members(self, trained: TrainedTensor, value: Tensor, point: ProbePoint, out: Tensor) -> None:
        if trained.rank or not point.seeds:
            super().members(trained, value, point, out)
        elif point.single:
            self.joint_members([trained], value, point, out)
        else:
            self._perturb(value, out, self.source.keys(trained.name), None, point)

    def joint_members(self, trained: Sequence[TrainedTensor], value: Tensor, point: ProbePoint, out: Tensor) -> None:
        """Matrices of one shape that lie side by side in `value`, at every member: out[P, *value.shape]."""
        assert len(trained) == 1 or value.numel() % (len(trained) * WHOLE) == 0
        count, rows = value.numel(), -(-value.numel() // len(trained) // ALIGN)
        keys = self._keys_of(trained)
        if self.source.kind == "rademacher":
            held, made = self._signs_of(trained, point)
            signs, shape = made[0, held.at[trained[0].name] :], MATRIX
        else:
            signs, shape = keys, FLAT
        matrices.perturb[_grid(count, shape)](
            value, out, count, rows, signs, keys, point.keys, point.scales, quantiles(self.source.device),
            MEMBERS=len(point.probes), KIND=KINDS[self.source.kind], **shape, **EXACT,
        )  # fmt: skip

    def share_signs(self, groups: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Make the signs of all tensors of a group when those of one are wanted: they will be next."""
        for named in groups:
            signs = Signs(named, self.source.device)
            self._shared |= dict.fromkeys(signs.at, signs)

    def begin(self, point: ProbePoint) -> None:
        self._made = None

    def move_small(self, flat: FlatBuffer, move: DeviceUpdate) -> None:
        keys, index = self._table(flat)
        value = flat.values
        philox.update[_grid(value.numel(), FLAT)](
            _patterns(value), value.numel(), keys, index, move.keys, move.coefs, quantiles(self.source.device),
            TERMS=len(move.update.terms), KIND=KINDS[self.source.kind], DECAY=flat.decay, DTYPE=TYPES[value.dtype],
            **FLAT, **EXACT,
        )  # fmt: skip

    def move(self, trained: TrainedTensor, value: Tensor, move: DeviceUpdate) -> None:
        self.move_all([(trained, value)], move)

    def move_all(self, every: Sequence[Matrix], move: DeviceUpdate) -> None:
        """Matrices of one shape in one launch: many small launches would leave most of a GPU idle."""
        for trained, value in every:
            if trained.rank > LARGEST_RANK:
                super().move(trained, value, move)
        mine = [matrix for matrix in every if matrix[0].rank <= LARGEST_RANK]
        key = tuple((trained.name, value.data_ptr()) for trained, value in mine)
        if key not in self._plans:
            self._plans.clear()  # tensors that moved will not come back
            self._plans[key] = groups_of(mine, self.source.device)
        for group in self._plans[key]:
            gaussian = self.source.kind == "gaussian" and isinstance(group.signs, Signs)
            made = move.keys if gaussian else group.signs.made(move.keys, len(move.update.terms))
            for run in group.runs:
                self._update(run, made, move)

    def _update(self, run: Run, made: Tensor, move: DeviceUpdate) -> None:
        rank, value = run.trained.rank, run.base
        kind = philox.FACTORS if rank else KINDS[self.source.kind]
        shape = FLAT if kind == philox.NORMALS else MATRIX
        lines, width = run.trained.shape if rank else (1, ALIGN)
        matrices.update[(*_grid(value.numel(), shape), run.matrices)](
            _patterns(value), value.numel(), run.entries, move.keys, move.coefs, quantiles(self.source.device),
            made, made.shape[-1], lines, width, float(np.float32(1 / np.sqrt(rank))) if rank else 1.0,
            RANK=rank, ALIGNED=width % ALIGN == 0, TERMS=len(move.update.terms), KIND=kind, DECAY=run.trained.decay,
            DTYPE=TYPES[value.dtype], **shape, **EXACT,
        )  # fmt: skip

    def _perturb(self, value: Tensor, out: Tensor, keys: Tensor, index: Tensor | None, point: ProbePoint) -> None:
        count = value.numel()
        philox.perturb[_grid(count, FLAT)](
            value, out, count, keys, keys if index is None else index, point.keys, point.scales,
            quantiles(self.source.device), MEMBERS=len(point.probes), TERMS=len(point.seeds),
            KIND=KINDS[self.source.kind], FLAT=index is not None, **FLAT, **EXACT,
        )  # fmt: skip

    def _signs_of(self, trained: Sequence[TrainedTensor], point: ProbePoint) -> tuple[Signs, Tensor]:
        """The signs of these tensors at a point of one direction, made for all that share their group."""
        if trained[0].name not in self._shared:
            self.share_signs([[(one.name, one.shape[0] * one.shape[1]) for one in trained]])
        signs = self._shared[trained[0].name]
        if self._made is None or self._made[0] is not signs or self._made[1] is not point:
            self._made = None  # let go of the ones before first
            self._made = signs, point, signs.made(point.keys, 1)
        return signs, self._made[2]

    def _keys_of(self, trained: Sequence[TrainedTensor]) -> Tensor:
        names = tuple(one.name for one in trained)
        if names not in self._keys:
            self._keys[names] = torch.cat([self.source.keys(name) for name in names])
        return self._keys[names]

    def _table(self, flat: FlatBuffer) -> tuple[Tensor, Tensor]:
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


def _patterns(value: Tensor) -> Tensor:
    """Sixteen-bit weights as the bit patterns that kernels round."""
    return value if value.dtype == torch.float32 else value.view(torch.int16)
