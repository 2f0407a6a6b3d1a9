"""Perturbing and updating trained tensors in plain torch, on any device.

`FusedOps` does the same in kernels. Large matrices are processed in chunks, so that their noise takes little memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint
from mezzo.engines.torch.weights.flat_buffer import FlatBuffer
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.engines.torch.weights.rounding import store_rounded
from mezzo.method import noise, rounding
from mezzo.types import TrainedTensor, Update

# What the cache of a core holds.
CPU_CHUNK_ELEMENTS = 2**18
# Enough to keep another device busy.
DEVICE_CHUNK_ELEMENTS = 2**24


class ReferenceOps:
    """The reference: all other weight ops leave the same weights bit for bit."""

    uses_kernels = False

    def __init__(self, source: NoiseSource) -> None:
        self.source = source

    def begin_forward(self, point: ProbePoint) -> None:
        """Prepare for a forward at `point`."""

    def perturb_flat(self, flat: FlatBuffer, point: ProbePoint) -> Tensor:
        """[P, n]: a flat buffer at every member, in float32 whatever it is stored as."""
        values = flat.values.float()
        out = torch.empty((len(point.probes), values.numel()), device=values.device)
        noises = {seed: self._flat_noise(flat, seed) for seed in point.seeds}
        for row, probe in zip(out, point.probes, strict=True):
            perturbed = values
            for seed, scale in probe.terms:
                perturbed = torch.add(perturbed, noises[seed], alpha=scale, out=row)
            if not probe.terms:
                row.copy_(values)
        return out

    def perturb_matrix(self, trained: TrainedTensor, value: Tensor, point: ProbePoint, out: Tensor) -> None:
        """A matrix at every member into `out` [P, *shape], rounded once to the dtype of `out`."""
        flat, rows = value.reshape(-1), out.view(len(point.probes), -1)
        for start, stop in _chunks(trained, value):
            base = flat[start:stop].float()
            noises = {seed: self._matrix_noise(trained, value, seed, start, stop) for seed in point.seeds}
            for row, probe in zip(rows[:, start:stop], point.probes, strict=True):
                perturbed = base
                for number, (seed, scale) in enumerate(probe.terms, 1):
                    alpha, target = noise.factor_scale(scale, trained.rank), row if number == len(probe.terms) else None
                    perturbed = torch.add(perturbed, noises[seed], alpha=alpha, out=target)
                if not probe.terms:
                    row.copy_(base)

    def perturb_stacked(self, trained: Sequence[TrainedTensor], value: Tensor, point: ProbePoint, out: Tensor) -> None:
        """Matrices of one shape, stacked in `value`, at every member: out[P, *value.shape]."""
        for each, matrix, target in zip(trained, value.chunk(len(trained)), out.chunk(len(trained), 1), strict=True):
            self.perturb_matrix(each, matrix, point, target)

    def perturb_rows(self, trained: TrainedTensor, value: Tensor, ids: Tensor, point: ProbePoint) -> Tensor:
        """[P, *ids.shape, width] in float32: rows of a matrix at every member, without touching the others."""
        source = self.source.on(value.device)
        if trained.rank:
            scales = point.scales * (1 / trained.rank**0.5)
            pairs = (source.factors(seed, trained.name, trained.shape, trained.rank) for seed in point.seeds)
            noises = [left[ids] @ right.T for left, right in pairs]
        else:
            scales = point.scales
            noises = [source.rows(seed, trained.name, trained.shape, ids) for seed in point.seeds]
        return value[ids].float() + torch.tensordot(scales.to(value.device), torch.stack(noises), dims=1)

    def factors(self, trained: TrainedTensor, point: ProbePoint) -> tuple[Tensor, Tensor]:
        """U[out, K·r] and V[in, K·r] of low-rank noise, the columns of all seeds side by side."""
        pairs = [self.source.factors(seed, trained.name, trained.shape, trained.rank) for seed in point.seeds]
        return torch.cat([u for u, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1)

    def add_bias(self, y: Tensor, bias: Tensor) -> None:
        """y[P, …, n] += bias[P, n]. A float32 bias is added to 16-bit activations before these are rounded."""
        y.add_(bias.view(len(bias), *[1] * (y.ndim - 2), -1))

    def update_flat(self, flat: FlatBuffer, device_update: DeviceUpdate) -> None:
        """Update a flat buffer in place."""
        update = device_update.update
        update_values(
            flat.values,
            flat.decay,
            update,
            lambda seed: self._flat_noise(flat, seed),
            lambda: self.source.on(flat.values.device).flat_rounding_bits(rounding.first_seed(update), flat.sizes),
            self._signs_only,
        )

    def update_matrices(self, weights: Sequence[tuple[TrainedTensor, Tensor]], device_update: DeviceUpdate) -> None:
        """Update matrices in place."""
        for trained, value in weights:
            self._update_matrix(trained, value, device_update.update)

    def _update_matrix(self, trained: TrainedTensor, value: Tensor, update: Update) -> None:
        flat, rounding_seed, source = value.view(-1), rounding.first_seed(update), self.source.on(value.device)
        scaled = [(seed, noise.factor_scale(coef, trained.rank)) for seed, coef in update.terms]
        for start, stop in _chunks(trained, value):
            update_values(
                flat[start:stop],
                trained.decay,
                Update(tuple(scaled), update.keep),
                lambda seed, a=start, b=stop: self._matrix_noise(trained, value, seed, a, b),  # type: ignore[misc]
                lambda a=start, b=stop: source.rounding_bits(rounding_seed, trained.name, a, b),  # type: ignore[misc]
                self._signs_only and not trained.rank,
            )

    @property
    def _signs_only(self) -> bool:
        """Products with this noise are exact."""
        return self.source.kind == "rademacher"

    def _flat_noise(self, flat: FlatBuffer, seed: int) -> Tensor:
        source = self.source.on(flat.values.device)
        return source.unpack(source.flat_packed_bits(seed, flat.sizes))

    def _matrix_noise(self, trained: TrainedTensor, value: Tensor, seed: int, start: int, stop: int) -> Tensor:
        """A chunk of the noise of a matrix `value`; low-rank noise as the integers U·Vᵀ, without its 1/√r."""
        source = self.source.on(value.device)
        if not trained.rank:
            return source.dense(seed, trained.name, math.prod(trained.shape), start, stop)
        left, right = source.factors(seed, trained.name, trained.shape, trained.rank)
        width = trained.shape[1]
        return (left[start // width : stop // width] @ right.T).view(-1)


def _chunks(trained: TrainedTensor, value: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of elements: whole rows for low-rank noise, whole words of the stream otherwise."""
    size = CPU_CHUNK_ELEMENTS if value.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    if trained.rank:
        width = trained.shape[1]
        size = max(1, size // width) * width
    for start in range(0, value.numel(), size):
        yield start, min(start + size, value.numel())


def update_values(
    values: Tensor,
    decays: bool,
    update: Update,
    noise_of: Callable[[int], Tensor],
    rounding_bits: Callable[[], Tensor],
    signs_only: bool = False,
) -> None:
    """acc = fl(keep·θ), then acc = fl(acc − fl(c·z)) term by term in float32, as separate operations: every machine then
    rounds alike. 16-bit weights are rounded once, at the end."""
    acc = values.float()  # float32 weights themselves, or a copy
    if decays and update.keep != 1.0:
        acc.mul_(update.keep)
    for seed, coef in update.terms:
        if coef == 0.0:
            continue
        if signs_only:  # ±coef is exact, so one operation rounds as two do
            acc.sub_(noise_of(seed), alpha=coef)
        else:
            acc.sub_(noise_of(seed).mul_(coef))
    if values.dtype != torch.float32:
        store_rounded(values, acc, rounding_bits())
