"""What is done to trained tensors, in plain torch on any device: members at a point, and the update in place.

`fused` does the same in kernels. Large matrices are worked on a piece at a time, so that their noise takes little room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint
from mezzo.engines.torch.weights.flat_buffer import FlatBuffer
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.engines.torch.weights.rounding import store
from mezzo.method import noise, rounding
from mezzo.types import TrainedTensor, Update

PIECE = {"cpu": 2**18}
LARGEST_PIECE = 2**24
"""Elements worked on at once: what a core's cache holds, or enough to keep another device busy."""


class ReferenceOps:
    """The reference: every other way of doing this gives the same weights bit for bit."""

    kernels = False
    """True where noise is made by kernels that read seeds and scales from device memory."""

    def __init__(self, source: NoiseSource) -> None:
        self.source = source

    def begin(self, point: ProbePoint) -> None:
        """A forward at `point` is about to run."""

    def small_members(self, flat: FlatBuffer, point: ProbePoint) -> Tensor:
        """[P, n] of a flat buffer, in float32 whatever it is stored as."""
        values = flat.values.float()
        out = torch.empty((len(point.probes), values.numel()), device=values.device)
        noises = {seed: self._flat_noise(flat, seed) for seed in point.seeds}
        for row, probe in zip(out, point.probes, strict=True):
            moved = values
            for seed, scale in probe.terms:
                moved = torch.add(moved, noises[seed], alpha=scale, out=row)
            if not probe.terms:
                row.copy_(values)
        return out

    def members(self, trained: TrainedTensor, value: Tensor, point: ProbePoint, out: Tensor) -> None:
        """A matrix at every member into `out` [P, *shape], rounded once to the type of `out`."""
        flat, rows = value.reshape(-1), out.view(len(point.probes), -1)
        for start, stop in self._pieces(trained, value):
            base = flat[start:stop].float()
            noises = {seed: self._noise(trained, seed, start, stop) for seed in point.seeds}
            for row, probe in zip(rows[:, start:stop], point.probes, strict=True):
                moved = base
                for seed, scale in probe.terms[:-1]:
                    moved = torch.add(moved, noises[seed], alpha=noise.factor_scale(scale, trained.rank))
                for seed, scale in probe.terms[-1:]:
                    torch.add(moved, noises[seed], alpha=noise.factor_scale(scale, trained.rank), out=row)
                if not probe.terms:
                    row.copy_(base)

    def joint_members(self, trained: Sequence[TrainedTensor], value: Tensor, point: ProbePoint, out: Tensor) -> None:
        """Matrices of one shape that lie below each other in `value`, at every member: out[P, *value.shape]."""
        for one, own, room in zip(trained, value.chunk(len(trained)), out.chunk(len(trained), 1), strict=True):
            self.members(one, own, point, room)

    def moved_rows(self, trained: TrainedTensor, value: Tensor, ids: Tensor, point: ProbePoint) -> Tensor:
        """[P, *ids.shape, width] in float32: rows of a matrix at every member, without touching the others."""
        if trained.rank:
            scales = point.scales * (1 / trained.rank**0.5)
            pairs = (self.source.factors(seed, trained.name, trained.shape, trained.rank) for seed in point.seeds)
            noises = [left[ids] @ right.T for left, right in pairs]
        else:
            scales = point.scales
            rows, width = trained.shape
            noises = [self.source.rows(seed, trained.name, (rows, width), ids) for seed in point.seeds]
        return value[ids].float() + torch.tensordot(scales, torch.stack(noises), dims=1)

    def factors(self, trained: TrainedTensor, point: ProbePoint) -> tuple[Tensor, Tensor]:
        """U[out, K·r] and V[in, K·r] of low-rank noise, the seeds' columns side by side."""
        pairs = [self.source.factors(seed, trained.name, trained.shape, trained.rank) for seed in point.seeds]
        return torch.cat([u for u, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1)

    def add_bias(self, y: Tensor, bias: Tensor) -> None:
        """y[P, …, n] += bias[P, n]; what is added in float32 to sixteen-bit activations is rounded once, as part of the sum."""
        y.add_(bias.view(len(bias), *[1] * (y.ndim - 2), -1))

    def move_small(self, flat: FlatBuffer, move: DeviceUpdate) -> None:
        """A flat buffer after the move, in place."""

        def bits() -> Tensor:
            return self.source.rounding_side_by_side(rounding.seed_of(move.update), flat.named)

        move_values(
            flat.values, flat.decay, move.update, lambda seed: self._flat_noise(flat, seed), bits, self._signs_only
        )

    def move_all(self, every: Sequence[tuple[TrainedTensor, Tensor]], move: DeviceUpdate) -> None:
        """Matrices after the move, in place."""
        for trained, value in every:
            self.move(trained, value, move)

    def move(self, trained: TrainedTensor, value: Tensor, move: DeviceUpdate) -> None:
        """A matrix after the move, in place."""
        flat, update = value.view(-1), move.update
        scaled = [(seed, noise.factor_scale(coef, trained.rank)) for seed, coef in update.terms]
        for start, stop in self._pieces(trained, value):
            move_values(
                flat[start:stop],
                trained.decay,
                Update(tuple(scaled), update.keep),
                lambda seed, a=start, b=stop: self._noise(trained, seed, a, b),  # type: ignore[misc]
                lambda a=start, b=stop: self.source.rounding(rounding.seed_of(update), trained.name, a, b),  # type: ignore[misc]
                self._signs_only and not trained.rank,
            )

    @property
    def _signs_only(self) -> bool:
        """Products with this noise are exact."""
        return self.source.kind == "rademacher"

    def _flat_noise(self, flat: FlatBuffer, seed: int) -> Tensor:
        return self.source.spread(self.source.side_by_side(seed, flat.named), None)

    def _noise(self, trained: TrainedTensor, seed: int, start: int, stop: int) -> Tensor:
        """A piece of a matrix's noise; low-rank noise as the integers U·Vᵀ, without its 1/√r."""
        if not trained.rank:
            return self.source.dense(seed, trained.name, math.prod(trained.shape), start, stop)
        left, right = self.source.factors(seed, trained.name, trained.shape, trained.rank)
        width = trained.shape[1]
        return (left[start // width : stop // width] @ right.T).view(-1)

    def _pieces(self, trained: TrainedTensor, value: Tensor) -> Iterator[tuple[int, int]]:
        """Ranges of elements: whole rows for low-rank noise, whole words of the stream otherwise."""
        size = PIECE.get(value.device.type, LARGEST_PIECE)
        if trained.rank:
            width = trained.shape[1]
            size = max(1, size // width) * width
        for start in range(0, value.numel(), size):
            yield start, min(start + size, value.numel())


def move_values(
    values: Tensor,
    decays: bool,
    update: Update,
    noise_of: Callable[[int], Tensor],
    bits: Callable[[], Tensor],
    signs_only: bool = False,
) -> None:
    """acc = fl(keep·θ), then fl(acc − fl(c·z)) a term at a time in float32: separate operations, so that every machine rounds
    alike. Sixteen-bit weights are rounded once, at the end."""
    acc = values.float()  # float32 weights themselves, or a copy
    if decays and update.keep != 1.0:
        acc.mul_(update.keep)
    for seed, coef in update.terms:
        if coef == 0.0:
            continue
        if signs_only:  # ±coef is exact, so that one operation rounds as two do
            acc.sub_(noise_of(seed), alpha=coef)
        else:
            acc.sub_(noise_of(seed).mul_(coef))
    if values.dtype != torch.float32:
        store(values, acc, bits())
