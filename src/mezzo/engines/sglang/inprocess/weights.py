"""The trained tensors where SGLang's weights live: perturbed into adapter slots, updated from (seed, coefficient)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mezzo.engines.sglang.facts import fresh
from mezzo.engines.sglang.inprocess.adapter_slots import Slots
from mezzo.engines.sglang.matrices import Array, Matrices, Piece, probe_factors, to_numpy
from mezzo.engines.sglang.support import module_of
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.forward.probe_point import ProbePoint
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.errors import ModelError
from mezzo.method import noise
from mezzo.method.space import lora_names
from mezzo.types import Probe, TrainedTensor, Update


@dataclass(frozen=True)
class Plan:
    """What a worker must know of the run: names, shapes and seeds; never a weight."""

    kind: str
    trained: tuple[TrainedTensor, ...]
    frozen: tuple[TrainedTensor, ...]
    noise_kind: noise.Kind
    seed: int
    adapters: tuple[str, ...]


class Weights(Protocol):
    """A space on a worker."""

    def place(self, probes: Sequence[Probe]) -> list[str | None]:
        """Make the probes servable; the adapter id of each (None: the base weights are the probe)."""
        ...

    def apply(self, update: Update) -> None: ...

    def state(self) -> list[Piece]: ...

    def load(self, tensors: Mapping[str, Array]) -> None: ...


class LoraWeights:
    """LoRA factors, whole on every rank because they are small; members of a probe go to the adapter slots."""

    def __init__(self, plan: Plan, slots: Slots, device: torch.device) -> None:
        self.slots = slots
        self.population = Population(
            [(t, fresh(t, plan.seed).to(device)) for t in plan.trained],
            NoiseSource(plan.noise_kind, device),
            {t.name: fresh(t, plan.seed).to(device) for t in plan.frozen},
        )
        self.modules = tuple(dict.fromkeys(module_of(t.name) for t in plan.trained))
        self._whole: dict[tuple[int, ...], list[Tensor] | None] = {}
        for trained in plan.trained:
            slots.refuse_padding(trained)

    def place(self, probes: Sequence[Probe]) -> list[str | None]:
        slots = self.slots.resident()[: len(probes)]
        if not self._placed_whole(slots, probes):
            self.slots.write(
                (slots[index], module, downs[index], ups[index])
                for module, downs, ups in members(self.population, self.modules, probes)
                for index in range(len(probes))
            )
        return list(self.slots.ids[: len(probes)])

    def _placed_whole(self, slots: Sequence[int], probes: Sequence[Probe]) -> bool:
        """Every factor of every member by a few operations, where all of them are trained and lie whole on this rank. Looking
        each of them up would cost a step some milliseconds."""
        population = self.population
        point = ProbePoint(tuple(probes), population.source.device)
        if population.frozen or population.large or not point.seeds:
            return False
        for index, flat in enumerate(population.flat_buffers):
            key = (index, *slots)
            if key not in self._whole:
                self._whole[key] = self.slots.whole(slots, [entry.trained for entry in flat.entries])
            if (targets := self._whole[key]) is None:
                return False
            ends = [*(entry.start for entry in flat.entries[1:]), flat.values.numel()]
            sizes = [
                n
                for entry, end in zip(flat.entries, ends, strict=True)
                for n in (entry.count, end - entry.start - entry.count)
            ]
            values = population.ops.perturb_flat(flat, point)
            torch._foreach_copy_(targets, [piece for row in values for piece in row.split(sizes)[::2]])
        return True

    def apply(self, update: Update) -> None:
        self.population.apply(update)
        self.population.source.clear_cache()

    def state(self) -> list[Piece]:
        return [_whole(name, self.population.value(name)) for name in self.population.trained]

    def load(self, tensors: Mapping[str, Array]) -> None:
        for name, values in tensors.items():
            self.population.value(name).copy_(torch.from_numpy(np.ascontiguousarray(values)))


def members(
    population: Population, modules: Sequence[str], probes: Sequence[Probe]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(module, A[P, r, in], B[P, out, r]) at the probes, one module at a time: large factors share scratch."""
    with population.at(probes):
        for module in modules:
            down, up = (_member(population, name) for name in lora_names(f"{module}.weight"))
            yield module, down, up


def _member(population: Population, name: str) -> Tensor:
    if name not in population.large or not population.perturbed:
        return population.member(name)
    return population.member_matrix(name).clone()


class MatrixWeights:
    """Projection matrices with low-rank noise: a probe is an adapter, an update is written into SGLang's own weights."""

    def __init__(self, plan: Plan, slots: Slots, device: torch.device) -> None:
        self.slots = slots
        for trained in plan.trained:
            slots.refuse_padding(trained)
        self.source = NoiseSource(plan.noise_kind, device)
        places = {t.name: slots.place(module_of(t.name)) for t in plan.trained}
        self.matrices = Matrices(plan.trained, {n: (p.part, p.layer) for n, p in places.items()}, self.source)

    def place(self, probes: Sequence[Probe]) -> list[str | None]:
        slots = self.slots.resident()
        self.slots.write(
            (slot, module_of(trained.name), *probe_factors(self.source, trained, seed, scale))
            for slot, probe in zip(slots, probes, strict=False)
            for seed, scale in one_direction(probe)
            for trained in self.matrices.trained
        )
        return [adapter if probe.terms else None for adapter, probe in zip(self.slots.ids, probes, strict=False)]

    def apply(self, update: Update) -> None:
        self.matrices.apply(update)

    def state(self) -> list[Piece]:
        return self.matrices.state()

    def load(self, tensors: Mapping[str, Array]) -> None:
        for name, values in tensors.items():
            self.matrices.load(name, torch.from_numpy(np.ascontiguousarray(values)))


def one_direction(probe: Probe) -> tuple[tuple[int, float], ...]:
    """The probe's terms; the rank of an adapter has room for one."""
    if len(probe.terms) > 1:
        raise ModelError("on the sglang engine a probe of space 'matrices' has one direction")
    return probe.terms


WEIGHTS: dict[str, type[LoraWeights] | type[MatrixWeights]] = {"lora": LoraWeights, "matrices": MatrixWeights}


def _whole(name: str, value: Tensor) -> Piece:
    rows, cols = value.shape
    return Piece(name, (0, rows), (0, cols), to_numpy(value))
