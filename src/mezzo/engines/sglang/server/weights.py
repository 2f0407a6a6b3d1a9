"""The trained tensors as a client of SGLang servers holds them: LoRA factors are here, matrices are in the servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mezzo.engines.arrays import Array, to_numpy
from mezzo.engines.base import EngineSpec
from mezzo.engines.lora_factors import LoraFactors, load_values
from mezzo.engines.sglang.adapters import adapter_tensors, noise_factors
from mezzo.engines.sglang.model_facts import ModelFacts
from mezzo.engines.sglang.server.loader import encode_updates, group_by_size
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.types import Probe, Update

AdapterTensors = dict[str, Tensor]
# Sends named tensors to the loader of every server.
WriteWeights = Callable[[Sequence[tuple[str, Tensor]]], None]


class FrozenModel:
    """A model that is evaluated, not trained."""

    def adapters(self, probes: Sequence[Probe]) -> list[AdapterTensors | None]:
        return [None for _ in probes]

    def apply(self, updates: Sequence[Update]) -> None: ...

    def state(self) -> dict[str, Array]:
        return {}

    def load(self, tensors: Mapping[str, Array]) -> None: ...


class UploadedLora(LoraFactors):
    """LoRA factors held by the client, and uploaded as adapters at each probe."""

    def adapters(self, probes: Sequence[Probe]) -> list[AdapterTensors | None]:
        """The adapter of each probe."""
        adapters: list[AdapterTensors] = [{} for _ in probes]
        for module, a, b in self.at_probes(probes):
            for member, adapter in enumerate(adapters):
                adapter |= adapter_tensors(module, a[member], b[member])
        return list(adapters)

    def state(self) -> dict[str, Array]:
        return self.arrays()


class ServerMatrices:
    """Matrices inside the servers: a probe is an adapter, an update is sent as (seed, coefficient) pairs.

    Weights cannot be read back from a server in full, so the client keeps a copy and updates it when the state is needed.
    """

    def __init__(self, spec: EngineSpec, facts: ModelFacts, write: WriteWeights) -> None:
        self.trained, self.write = facts.trained, write
        self.source = NoiseSource(spec.noise_kind, torch.device("cpu"))
        self.copy = Population([(t, facts.matrices[t.name]) for t in facts.trained], self.source)
        self.pending_updates: list[Update] = []

    def adapters(self, probes: Sequence[Probe]) -> list[AdapterTensors | None]:
        """The adapter of each probe; None where the servers' own weights are the probe."""
        adapters: list[AdapterTensors | None] = []
        for probe in probes:
            adapter: AdapterTensors = {}
            for module, a, b in noise_factors(self.source, self.trained, probe):
                adapter |= adapter_tensors(module, a, b)
            adapters.append(adapter or None)
        return adapters

    def apply(self, updates: Sequence[Update]) -> None:
        self.write([encode_updates(self.trained, updates)])
        self.pending_updates += updates
        self.source.clear_cache()

    @torch.no_grad()
    def state(self) -> dict[str, Array]:
        self.copy.apply_all(self.pending_updates)
        self.pending_updates = []
        return {t.name: to_numpy(self.copy.value(t.name)) for t in self.trained}

    def load(self, tensors: Mapping[str, Array]) -> None:
        self.pending_updates = []
        load_values(self.copy, tensors)
        for group in group_by_size(tensors):
            self.write(group)


ClientWeights = FrozenModel | UploadedLora | ServerMatrices
