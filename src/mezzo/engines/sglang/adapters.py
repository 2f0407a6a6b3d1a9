"""Probes as LoRA adapters: the shape that all adapters of a run have, and the factors A and B of a probe, from seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.engines.base import EngineSpec
from mezzo.engines.lora_factors import LoraFactors, module_of, peft_names, projection_of
from mezzo.engines.sglang.module_names import ENCODER_PROJECTIONS, FUSED, sglang_path
from mezzo.engines.sglang.support import PROJECTIONS, TRAINABLE_SPACES
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.errors import ModelError
from mezzo.method.space import Space
from mezzo.types import Family, MicroBatch, Probe, TrainedTensor

# The two signs of a direction, each an adapter of one batch.
PROBES_PER_FORWARD = 2
# Probes of one forward, and sequences in all, where a question has many probes: few examples at each of them, so that what a
# forward costs before it computes is paid seldom.
MANY_PROBES, SEQUENCES = 32, 1024
# Adapters that SGLang holds at once where texts are generated at a population.
MOST_ADAPTERS = 128


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
    return _shape_on(space, {projection_of(sglang_path(module_of(t.name))) for t in trained})


def likely_shape(space: Space, family: Family) -> AdapterShape | None:
    """The same before the model's tensors are known, for advice."""
    if space.kind not in TRAINABLE_SPACES:
        return None
    matrices = PROJECTIONS[:-1] if family == "causal" else ("q_proj", "v_proj", "o_proj", "down_proj")
    targets = (space.targets or ("q_proj", "v_proj")) if space.kind == "lora" else matrices
    known = {path.rpartition(".")[2]: name for path, name in ENCODER_PROJECTIONS.items()}
    return _shape_on(space, {known.get(name, name) for name in targets})


def _shape_on(space: Space, targets: set[str]) -> AdapterShape:
    for projections in FUSED.values():  # SGLang stacks these and needs all of a stack
        targets |= set(projections) if targets & set(projections) else set()
    rank = space.rank if space.kind == "lora" else space.noise_rank
    alpha = space.alpha if space.kind == "lora" else float(rank)
    return AdapterShape(rank, alpha, tuple(sorted(targets)))


def choose_micro_batch(spec: EngineSpec) -> MicroBatch:
    """The examples and probes of one forward."""
    if not scores_many_probes(spec):
        return MicroBatch(rows=spec.rows, members=PROBES_PER_FORWARD)
    rows = min(spec.rows, SEQUENCES // MANY_PROBES) if spec.fewer_rows else spec.rows
    return MicroBatch(rows=rows, members=max(PROBES_PER_FORWARD, min(MANY_PROBES, SEQUENCES // rows)))


def adapter_count(spec: EngineSpec) -> int:
    """Adapters that SGLang is to hold at once: those of a forward, or of the population that generates together."""
    scored = MANY_PROBES if scores_many_probes(spec) else PROBES_PER_FORWARD
    return max(scored, min(spec.population, MOST_ADAPTERS))


def scores_many_probes(spec: EngineSpec) -> bool:
    """Whether questions of many probes are about scores; those of a population are about texts."""
    return spec.many_probes and not spec.population


def adapter_tensors(module: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The factors of one module, by their names in an adapter file."""
    return dict(zip(peft_names(sglang_path(module)), (a.clone(), b.clone()), strict=True))


def lora_adapters(factors: LoraFactors, probes: Sequence[Probe]) -> list[dict[str, Tensor]]:
    """The complete adapter of each probe."""
    adapters: list[dict[str, Tensor]] = [{} for _ in probes]
    for module, a, b in factors.at_probes(probes):
        for member, adapter in enumerate(adapters):
            adapter |= adapter_tensors(module, a[member], b[member])
    return adapters


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


def noise_adapters(source: NoiseSource, trained: Sequence[TrainedTensor], probe: Probe) -> dict[str, Tensor]:
    """The complete adapter of a probe; empty for the base weights."""
    adapter: dict[str, Tensor] = {}
    for module, a, b in noise_factors(source, trained, probe):
        adapter |= adapter_tensors(module, a, b)
    return adapter
