"""A run's weights as seen from outside the servers: LoRA's factors stay here, matrices live there and are followed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.facts import Facts, fresh
from mezzo.engines.sglang.inprocess.weights import members, one_direction
from mezzo.engines.sglang.matrices import Array, probe_factors
from mezzo.engines.sglang.server.loader import order, sized
from mezzo.engines.sglang.support import module_of
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.types import Probe, Update

Adapter = dict[str, Tensor]
Write = Callable[[Sequence[tuple[str, Tensor]]], None]
"""Hands named tensors to the loader of every server."""


class ServedBase:
    """A served model as it is: evaluated, not trained."""

    def adapters(self, probes: Sequence[Probe]) -> list[Adapter | None]:
        return [None for _ in probes]

    def apply(self, updates: Sequence[Update]) -> None: ...

    def state(self) -> dict[str, Array]:
        return {}

    def load(self, tensors: Mapping[str, Array]) -> None: ...


class ServedLora:
    """LoRA's factors: small, held here, and uploaded as adapters at each probe."""

    def __init__(self, spec: EngineSpec, facts: Facts) -> None:
        self.population = Population(
            [(t, fresh(t, spec.seed)) for t in facts.trained],
            NoiseSource(spec.noise_kind, torch.device("cpu")),
            {t.name: fresh(t, spec.seed) for t in facts.frozen},
        )
        self.modules = tuple(dict.fromkeys(module_of(t.name) for t in facts.trained))

    def adapters(self, probes: Sequence[Probe]) -> list[Adapter | None]:
        """The adapter of each probe."""
        found: list[Adapter] = [{} for _ in probes]
        for module, downs, ups in members(self.population, self.modules, probes):
            for index in range(len(probes)):
                _put(found[index], module, downs[index], ups[index])
        return list(found)

    @torch.no_grad()
    def apply(self, updates: Sequence[Update]) -> None:
        self.population.replay(updates)

    def state(self) -> dict[str, Array]:
        return {name: self.population.value(name).numpy().copy() for name in self.population.trained}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Array]) -> None:
        for name, value in tensors.items():
            self.population.value(name).copy_(torch.from_numpy(np.ascontiguousarray(value)))


class ServedMatrices:
    """Matrices inside the servers: a probe is an adapter, an update an order of (seed, coefficient). The copy here follows
    the orders only when the weights are asked for."""

    def __init__(self, spec: EngineSpec, facts: Facts, write: Write) -> None:
        self.trained, self.write = facts.trained, write
        self.source = NoiseSource(spec.noise_kind, torch.device("cpu"))
        self.copy = Population([(t, facts.values[t.name]) for t in facts.trained], self.source)
        self.ahead: list[Update] = []

    def adapters(self, probes: Sequence[Probe]) -> list[Adapter | None]:
        """The adapter of each probe; None where the servers' own weights are the probe."""
        found: list[Adapter | None] = []
        for probe in probes:
            adapter: Adapter = {}
            for seed, scale in one_direction(probe):
                for trained in self.trained:
                    _put(adapter, module_of(trained.name), *probe_factors(self.source, trained, seed, scale))
            found.append(adapter or None)
        return found

    def apply(self, updates: Sequence[Update]) -> None:
        self.write([order(self.trained, updates)])
        self.ahead += updates
        self.source.clear_cache()

    @torch.no_grad()
    def state(self) -> dict[str, Array]:
        self.copy.replay(self.ahead)
        self.ahead = []
        return {t.name: self.copy.value(t.name).float().numpy().copy() for t in self.trained}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Array]) -> None:
        self.ahead = []
        for name, value in tensors.items():
            self.copy.value(name).copy_(torch.from_numpy(np.ascontiguousarray(value)))
        for group in sized(dict(tensors)):
            self.write(group)


def _put(adapter: Adapter, module: str, down: Tensor, up: Tensor) -> None:
    adapter[f"base_model.model.{module}.lora_A.weight"] = down.clone()
    adapter[f"base_model.model.{module}.lora_B.weight"] = up.clone()
