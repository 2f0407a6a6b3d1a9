"""The trained tensors where SGLang's weights live: perturbed into adapter slots, updated from (seed, coefficient)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo import noise
from mezzo.engines.sglang.facts import fresh
from mezzo.engines.sglang.slots import Slots
from mezzo.engines.sglang.support import module_of
from mezzo.engines.torch.noise import NoiseSource
from mezzo.engines.torch.population import Population
from mezzo.errors import ModelError
from mezzo.space import lora_names
from mezzo.types import Probe, Trained, Update

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Plan:
    """What a worker must know of the run: names, shapes and seeds; never a weight."""

    kind: str
    trained: tuple[Trained, ...]
    frozen: tuple[Trained, ...]
    noise_kind: noise.Kind
    seed: int
    adapters: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """This rank's share of a trained tensor: rows and columns [start, stop) of the whole."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    values: Array


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
        for trained in plan.trained:
            slots.refuse_padding(trained)

    def place(self, probes: Sequence[Probe]) -> list[str | None]:
        slots = self.slots.resident()
        for module, downs, ups in members(self.population, self.modules, probes):
            for index in range(len(probes)):
                self.slots.write(slots[index], module, downs[index], ups[index])
        return list(self.slots.ids[: len(probes)])

    def apply(self, update: Update) -> None:
        self.population.apply(update)
        self.population.source.forget()

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
    """Projection matrices with low-rank noise: a probe W + s·U·Vᵀ is an adapter (A = Vᵀ, B = s·U); an update is written
    into SGLang's own fused and split weights."""

    def __init__(self, plan: Plan, slots: Slots, device: torch.device) -> None:
        self.slots, self.trained = slots, plan.trained
        self.source = NoiseSource(plan.noise_kind, device)
        self.places = {t.name: slots.place(module_of(t.name)) for t in plan.trained}
        for trained in plan.trained:
            slots.refuse_padding(trained)
            held, part = self._view(trained), self.places[trained.name].part
            if tuple(held.shape) != (part.rows[1] - part.rows[0], part.cols[1] - part.cols[0]):
                raise ModelError(f"SGLang stores {trained.name} in another layout: {tuple(held.shape)} on this rank")

    def place(self, probes: Sequence[Probe]) -> list[str | None]:
        slots = self.slots.resident()
        for slot, probe in zip(slots, probes, strict=False):
            if len(probe.terms) > 1:
                raise ModelError("on the sglang engine a probe of space 'matrices' has one direction")
            for seed, scale in probe.terms:
                for trained in self.trained:
                    left, right = self.source.factors(seed, trained.name, trained.shape, trained.rank)
                    factor = torch.tensor(scale, dtype=torch.float32) * (1 / trained.rank**0.5)
                    self.slots.write(slot, module_of(trained.name), right.T, left * factor)
        return [adapter if probe.terms else None for adapter, probe in zip(self.slots.ids, probes, strict=False)]

    def apply(self, update: Update) -> None:
        """As every engine: fl(keep·θ), then fl(θ − fl(c·z)) a term at a time; U·Vᵀ is integers, exact in any order."""
        for trained in self.trained:
            held, part = self._view(trained), self.places[trained.name].part
            if trained.decay and update.keep != 1.0:
                held.mul_(update.keep)
            for seed, coef in update.terms:
                if coef == 0.0:
                    continue
                left, right = self.source.factors(seed, trained.name, trained.shape, trained.rank)
                z = left[slice(*part.rows)] @ right[slice(*part.cols)].T
                held.sub_(z.mul_(noise.factor_scale(coef, trained.rank)))
        self.source.forget()

    def state(self) -> list[Piece]:
        return [
            Piece(t.name, self.places[t.name].part.rows, self.places[t.name].part.cols, _numpy(self._view(t)))
            for t in self.trained
        ]

    def load(self, tensors: Mapping[str, Array]) -> None:
        for trained in self.trained:
            part = self.places[trained.name].part
            share = tensors[trained.name][slice(*part.rows), slice(*part.cols)]
            self._view(trained).copy_(torch.from_numpy(np.ascontiguousarray(share)))

    def _view(self, trained: Trained) -> Tensor:
        place = self.places[trained.name]
        weight: Tensor = place.layer.weight.data
        return weight[place.part.local_rows]


WEIGHTS: dict[str, type[LoraWeights] | type[MatrixWeights]] = {"lora": LoraWeights, "matrices": MatrixWeights}


def _whole(name: str, value: Tensor) -> Piece:
    rows, cols = value.shape
    return Piece(name, (0, rows), (0, cols), _numpy(value))


def _numpy(value: Tensor) -> Array:
    return value.detach().float().cpu().numpy().copy()
