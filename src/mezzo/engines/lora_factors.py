"""LoRA factors beside a model that another program serves: trained here, and written into its adapters at each probe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mezzo.engines.arrays import Array, to_numpy, to_tensor
from mezzo.engines.base import EngineSpec
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.initial_values import initial_lora_factor
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.method.space import lora_names
from mezzo.types import Probe, TrainedTensor, Update


class LoraFactors:
    """The LoRA factors, complete because they are small; trained from their initial values on."""

    def __init__(
        self,
        spec: EngineSpec,
        trained: Sequence[TrainedTensor],
        untrained: Sequence[TrainedTensor],
        device: torch.device,
    ) -> None:
        initial = {t.name: initial_lora_factor(t, spec.seed).to(device) for t in (*trained, *untrained)}
        frozen = {t.name: initial[t.name] for t in untrained}
        source = NoiseSource(spec.noise_kind, device)
        self.population = Population([(t, initial[t.name]) for t in trained], source, frozen)

    def at_probes(self, probes: Sequence[Probe]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(module, A[P, r, in], B[P, out, r]) of every adapted module at the probes."""
        with self.population.at(probes):
            for module in dict.fromkeys(module_of(name) for name in self.population.trained):
                a, b = (self.population.member_tensor(name) for name in lora_names(module))
                yield module, a, b

    @torch.no_grad()
    def apply(self, updates: Sequence[Update]) -> None:
        self.population.apply_all(updates)

    def arrays(self) -> dict[str, Array]:
        """A copy of the trained factors."""
        return {name: to_numpy(self.population.value(name)) for name in self.population.trained}

    def load(self, tensors: Mapping[str, Array]) -> None:
        load_values(self.population, tensors)


@torch.no_grad()
def load_values(population: Population, tensors: Mapping[str, Array]) -> None:
    for name, values in tensors.items():
        population.value(name).copy_(to_tensor(values))


def module_of(tensor: str) -> str:
    """The Hugging Face module of a trained tensor, which is a weight or a LoRA factor."""
    return tensor.removesuffix(".weight").removesuffix(".lora_A").removesuffix(".lora_B")


def projection_of(path: str) -> str:
    """The last part of a module path, such as `q_proj`."""
    return path.rsplit(".", 1)[-1]


def peft_names(module: str) -> list[str]:
    """The names of a module's factors A and B in an adapter file of PEFT."""
    return [f"base_model.model.{module}.lora_{factor}.weight" for factor in "AB"]
