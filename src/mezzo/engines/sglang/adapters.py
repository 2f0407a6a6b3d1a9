"""Probes as LoRA adapters: the shape that all adapters of a run have, and the factors A and B of a probe, from seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.model_facts import ModelFacts
from mezzo.engines.sglang.module_names import FUSED, module_of, projection_of, sglang_path
from mezzo.engines.sglang.support import TRAINABLE_SPACES
from mezzo.engines.sglang.tensor_parts import Array, to_tensor
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.initial_values import initial_lora_factor
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.errors import ModelError
from mezzo.method.space import Space, lora_names
from mezzo.types import Probe, TrainedTensor, Update

# The two signs of a direction, each an adapter of one batch.
PROBES_PER_FORWARD = 2


@dataclass(frozen=True)
class AdapterShape:
    """Rank, scale and modules of the adapters: those of LoRA, or the rank of the noise at scale one."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def peft_config(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "bias": "none",
            "lora_dropout": 0.0,
            "task_type": "CAUSAL_LM",
        }


def adapter_shape(space: Space, trained: Sequence[TrainedTensor]) -> AdapterShape | None:
    """The shape of a space's adapters; None if SGLang cannot train it."""
    if space.kind not in TRAINABLE_SPACES:
        return None
    targets = {projection_of(sglang_path(module_of(t.name))) for t in trained}
    for projections in FUSED.values():  # SGLang stacks these and needs all of a stack
        targets |= set(projections) if targets & set(projections) else set()
    rank = space.rank if space.kind == "lora" else space.noise_rank
    alpha = space.alpha if space.kind == "lora" else float(rank)
    return AdapterShape(rank, alpha, tuple(sorted(targets)))


def peft_names(module: str) -> list[str]:
    """The names of a module's factors A and B in an adapter file of PEFT."""
    return [f"base_model.model.{module}.lora_{factor}.weight" for factor in "AB"]


def adapter_tensors(module: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The factors of one module, by their names in an adapter file."""
    return dict(zip(peft_names(module), (a.clone(), b.clone()), strict=True))


# ---- space `lora`: an adapter is the trained factors at a probe


class LoraFactors:
    """The LoRA factors, complete because they are small; trained from their initial values on."""

    def __init__(self, spec: EngineSpec, facts: ModelFacts, device: torch.device) -> None:
        initial = {t.name: initial_lora_factor(t, spec.seed).to(device) for t in (*facts.trained, *facts.frozen)}
        frozen = {t.name: initial[t.name] for t in facts.frozen}
        source = NoiseSource(spec.noise_kind, device)
        self.population = Population([(t, initial[t.name]) for t in facts.trained], source, frozen)

    def at_probes(self, probes: Sequence[Probe]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(module, A[P, r, in], B[P, out, r]) of every adapted module at the probes."""
        with self.population.at(probes):
            for module in dict.fromkeys(module_of(name) for name in self.population.trained):
                a, b = (self.population.member_tensor(name) for name in lora_names(module))
                yield module, a, b

    @torch.no_grad()
    def apply(self, updates: Sequence[Update]) -> None:
        self.population.apply_all(updates)

    def load(self, tensors: Mapping[str, Array]) -> None:
        load_values(self.population, tensors)


@torch.no_grad()
def load_values(population: Population, tensors: Mapping[str, Array]) -> None:
    for name, values in tensors.items():
        population.value(name).copy_(to_tensor(values))


# ---- space `matrices`: an adapter is the low-rank noise itself


def noise_factors(
    source: NoiseSource, trained: Sequence[TrainedTensor], probe: Probe
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(module, A, B) that add scale·z to each matrix: W + s·U·Vᵀ/√r has A = Vᵀ and B = s/√r·U. None for the base weights."""
    if len(probe.terms) > 1:  # the rank of the adapters has room for one
        raise ModelError("on the sglang engine a probe of space 'matrices' has one direction")
    for seed, scale in probe.terms:
        for each in trained:
            left, right = source.factors(seed, each.name, each.shape, each.rank)
            factor = torch.tensor(scale, dtype=torch.float32) * (1 / each.rank**0.5)
            yield module_of(each.name), right.T, left * factor
