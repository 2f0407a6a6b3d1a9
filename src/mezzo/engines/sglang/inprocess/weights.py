"""The trained tensors in one of SGLang's workers: probes are written into adapter slots, updates made from seeds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo.engines.arrays import to_numpy
from mezzo.engines.base import EngineSpec
from mezzo.engines.lora_factors import LoraFactors, module_of
from mezzo.engines.sglang.adapters import noise_factors
from mezzo.engines.sglang.internals.adapter_slots import AdapterSlots
from mezzo.engines.sglang.matrices import MatrixShards
from mezzo.engines.sglang.model_facts import ModelFacts
from mezzo.engines.sglang.tensor_parts import TensorPart
from mezzo.engines.torch.forward.probe_point import ProbePoint
from mezzo.engines.torch.weights.flat_buffer import FlatBuffer
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.types import Probe, TrainedTensor


class LoraWeights(LoraFactors):
    """LoRA factors, complete on every rank."""

    def __init__(self, spec: EngineSpec, facts: ModelFacts, device: torch.device, slots: AdapterSlots) -> None:
        super().__init__(spec, facts.trained, facts.frozen, device)
        self.slots = slots
        self._frozen = facts.frozen
        self._flat_views: dict[tuple[int, ...], list[Tensor] | None] = {}

    def write_probes(self, probes: Sequence[Probe]) -> list[str | None]:
        """Write the probes into adapter slots; return the adapter id of each."""
        slots = self.slots.make_resident()[: len(probes)]
        if not self._write_flat_buffers(slots, probes):
            self.slots.write(
                (slot, module, a[member], b[member])
                for module, a, b in self.at_probes(probes)
                for member, slot in enumerate(slots)
            )
        return list(self.slots.ids[: len(probes)])

    def _write_flat_buffers(self, slots: Sequence[int], probes: Sequence[Probe]) -> bool:
        """Write all factors of all probes in a few operations; False if some are split over ranks.

        Looking up each factor would cost a step some milliseconds.
        """
        population = self.population
        point = ProbePoint(tuple(probes), population.source.device)
        if not point.seeds:
            return False
        frozen = [population.frozen[factor.name].view(-1) for factor in self._frozen] * len(slots)
        copies = [(self._views_of(-1, self._frozen, slots), frozen)]
        for index, flat in enumerate(population.flat_buffers):
            values, sizes = population.ops.perturb_flat(flat, point), _sizes_and_gaps(flat)
            targets = self._views_of(index, [entry.trained for entry in flat.entries], slots)
            copies.append((targets, [factor for row in values for factor in row.split(sizes)[::2]]))
        if any(targets is None for targets, _ in copies):
            return False
        torch._foreach_copy_([t for targets, _ in copies for t in targets or ()], [v for _, vs in copies for v in vs])
        return True

    def _views_of(self, part: int, factors: Sequence[TrainedTensor], slots: Sequence[int]) -> list[Tensor] | None:
        """Where a part of the factors stands in the slots; found once, because looking it up takes longer than the copies."""
        key = (part, *slots)
        if key not in self._flat_views:
            self._flat_views[key] = self.slots.flat_views(slots, factors)
        return self._flat_views[key]

    def state(self) -> list[TensorPart]:
        values = ((name, self.population.value(name)) for name in self.population.trained)
        return [TensorPart(name, (0, len(value)), (0, value.shape[1]), to_numpy(value)) for name, value in values]


def _sizes_and_gaps(flat: FlatBuffer) -> list[int]:
    """The length of each tensor in the buffer, and of the unused gap behind it, in turns."""
    ends = [*(entry.start for entry in flat.entries[1:]), flat.values.numel()]
    return [
        n for entry, end in zip(flat.entries, ends, strict=True) for n in (entry.count, end - entry.start - entry.count)
    ]


class MatrixWeights(MatrixShards):
    """Projection matrices with low-rank noise: a probe is an adapter, an update is written into SGLang's own weights."""

    def __init__(self, spec: EngineSpec, facts: ModelFacts, device: torch.device, slots: AdapterSlots) -> None:
        self.slots = slots
        shards = {t.name: slots.buffer(module_of(t.name)).shard for t in facts.trained}
        super().__init__(facts.trained, shards, NoiseSource(spec.noise_kind, device))

    def write_probes(self, probes: Sequence[Probe]) -> list[str | None]:
        """Write the probes into adapter slots; return the adapter id of each, None for the base weights."""
        self.slots.write(
            (slot, module, a, b)
            for slot, probe in zip(self.slots.make_resident(), probes, strict=False)
            for module, a, b in noise_factors(self.source, self.trained, probe)
        )
        return [adapter if probe.terms else None for adapter, probe in zip(self.slots.ids, probes, strict=False)]


WorkerWeights = LoraWeights | MatrixWeights
WEIGHTS: dict[str, type[WorkerWeights]] = {"lora": LoraWeights, "matrices": MatrixWeights}
