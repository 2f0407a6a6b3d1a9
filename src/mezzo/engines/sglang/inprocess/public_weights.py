"""The trained tensors by SGLang's public interface alone: kept by the driver, uploaded as adapters, matrices sent whole.

Slower than SGLang's own processes writing them from seeds, and not dependent on its internals: what the engine falls back to.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mezzo.engines.arrays import Array, to_numpy, to_tensor
from mezzo.engines.base import EngineSpec
from mezzo.engines.lora_factors import LoraFactors, load_values
from mezzo.engines.sglang.adapters import AdapterShape, lora_adapters, noise_adapters
from mezzo.engines.sglang.model_facts import ModelFacts, read_matrices
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.errors import RunFailed
from mezzo.types import Probe, Update

HOST = torch.device("cpu")


class PublicLora(LoraFactors):
    """LoRA factors."""

    def __init__(self, engine: Any, spec: EngineSpec, facts: ModelFacts) -> None:
        super().__init__(spec, facts.trained, facts.frozen, HOST)

    def adapters(self, probes: Sequence[Probe]) -> list[dict[str, torch.Tensor]]:
        return lora_adapters(self, probes)

    def state(self) -> dict[str, Array]:
        return self.arrays()


class PublicMatrices:
    """Matrices: a copy is updated here, and SGLang loads it as it loads a checkpoint's."""

    def __init__(self, engine: Any, spec: EngineSpec, facts: ModelFacts) -> None:
        self.engine, self.spec, self.trained = engine, spec, facts.trained
        self.source = NoiseSource(spec.noise_kind, HOST)
        self._copy: Population | None = None

    @property
    def copy(self) -> Population:
        if self._copy is None:
            base = read_matrices(self.spec, [t.name for t in self.trained])
            dtype = getattr(torch, self.spec.dtype)
            self._copy = Population([(t, to_tensor(base[t.name]).to(dtype)) for t in self.trained], self.source)
        return self._copy

    def adapters(self, probes: Sequence[Probe]) -> list[dict[str, torch.Tensor]]:
        return [noise_adapters(self.source, self.trained, probe) for probe in probes]

    @torch.no_grad()
    def apply(self, updates: Sequence[Update]) -> None:
        self.copy.apply_all(updates)
        self._send()

    def load(self, tensors: Mapping[str, Array]) -> None:
        load_values(self.copy, tensors)
        self._send()

    def state(self) -> dict[str, Array]:
        return {t.name: to_numpy(self.copy.value(t.name)) for t in self.trained}

    def _send(self) -> None:
        """Give SGLang all matrices, and empty its prefix cache. Newer versions take them only inside a session."""
        begin, end = (getattr(self.engine, f"{verb}_weight_update", lambda: None) for verb in ("begin", "end"))
        values = [(t.name, self.copy.value(t.name)) for t in self.trained]
        begin()
        try:
            success, message = self.engine.update_weights_from_tensor(values, flush_cache=False)
        finally:
            end()
        if not success:
            raise RunFailed(f"SGLang does not take the trained matrices: {message}")
        while not self.engine.flush_cache().success:  # it may not have finished the last request yet
            time.sleep(0.005)


PUBLIC_WEIGHTS: dict[str, type[PublicLora | PublicMatrices]] = {"lora": PublicLora, "matrices": PublicMatrices}


class UploadedProbes:
    """Adapters that SGLang holds for the probes of one request: each has a new name, and so a key of its own in its cache."""

    def __init__(self, engine: Any, shape: AdapterShape) -> None:
        self.engine, self.shape, self.count = engine, shape, 0
        self.loaded: list[str] = []

    def load(self, adapters: Sequence[Mapping[str, torch.Tensor]]) -> list[str | None]:
        """Load these in the place of the last ones; return their names, None for an empty one."""
        self.unload()
        names: list[str | None] = []
        for tensors in adapters:
            self.count += 1
            names.append(f"mezzo-upload-{self.count}" if tensors else None)
            if names[-1]:
                answer = self.engine.load_lora_adapter_from_tensors(names[-1], dict(tensors), self.shape.peft_config())
                if not answer.success:
                    raise RunFailed(f"SGLang refused an adapter: {answer.error_message}")
                self.loaded.append(names[-1])
        return names

    def unload(self) -> None:
        while self.loaded:
            self.engine.unload_lora_adapter(self.loaded.pop())
