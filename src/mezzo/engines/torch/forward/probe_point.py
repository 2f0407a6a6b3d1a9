"""Probes and updates, as values and as small tensors on the device that kernels read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mezzo.types import Probe, Update


@dataclass(frozen=True)
class ProbePoint:
    """The members of a forward: one probe each, and their distinct seeds."""

    probes: tuple[Probe, ...]
    device: torch.device

    @classmethod
    def in_memory(cls, members: int, keys: Tensor, scales: Tensor) -> ProbePoint:
        """One direction whose seed and scales kernels read from device memory when they run, not when they are launched."""
        point = cls((Probe(((0, 0.0),)),) * members, keys.device)
        point.__dict__.update(keys=keys, scales=scales)
        return point

    @property
    def single(self) -> bool:
        """True where all members lie on one line through the weights, like a ± pair."""
        return len(self.seeds) == 1

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(seed for probe in self.probes for seed, _ in probe.terms))

    @cached_property
    def scales(self) -> Tensor:
        """[P, K]: the scale of seed k at member m."""
        table = [[sum(scale for s, scale in probe.terms if s == seed) for seed in self.seeds] for probe in self.probes]
        return torch.tensor(table, dtype=torch.float32, device=self.device)

    @cached_property
    def keys(self) -> Tensor:
        """[K]: the seeds' bits."""
        return words_on(self.device, self.seeds)


def places_of(points: Sequence[ProbePoint]) -> list[slice]:
    """Where the scores of each point's probes are among those of all."""
    ends = list(itertools.accumulate(len(point.probes) for point in points))
    return [slice(end - len(point.probes), end) for end, point in zip(ends, points, strict=True)]


@dataclass(frozen=True)
class DeviceUpdate:
    """An update of the weights."""

    update: Update
    device: torch.device

    @classmethod
    def in_memory(cls, terms: int, keys: Tensor, coefs: Tensor) -> DeviceUpdate:
        """An update of so many terms, whose seeds and coefficients kernels read from device memory when they run."""
        update = cls(Update(((0, 1.0),) * terms), keys.device)
        update.__dict__.update(keys=keys, coefs=coefs)
        return update

    @cached_property
    def keys(self) -> Tensor:
        """[K]: the bits of every term's seed, also of those with coefficient 0: the first one determines the rounding."""
        return words_on(self.device, [seed for seed, _ in self.update.terms] or [0])

    @cached_property
    def coefs(self) -> Tensor:
        """[K + 1]: keep, then the coefficients."""
        values = [self.update.keep, *(coef for _, coef in self.update.terms)]
        return torch.tensor(values, dtype=torch.float32, device=self.device)


def words_on(device: torch.device, words: Sequence[int]) -> Tensor:
    """Unsigned 64-bit numbers as the int64 tensor with the same bits."""
    return torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64)).to(device)
