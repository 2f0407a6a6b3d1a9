"""What both engines on SGLang share: the facts of the checkpoint, refusals, digests and the description of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mezzo.engines.arrays import Array, to_numpy, to_tensor
from mezzo.engines.base import Engine, EngineSpec
from mezzo.engines.liveness import check_alive
from mezzo.engines.microbatch import check_state
from mezzo.engines.registry import refuse_space
from mezzo.engines.sglang.adapters import adapter_shape, choose_micro_batch
from mezzo.engines.sglang.model_facts import read_matrices, read_model_facts
from mezzo.engines.sglang.support import refuse_head
from mezzo.engines.token_rows import TokenCounts
from mezzo.engines.torch import catalog
from mezzo.engines.torch.initial_values import initial_lora_factor
from mezzo.types import Batch


class SGLangEngine(Engine):
    """An engine whose probes are adapters; where the weights are and how they move is left to its subclasses."""

    pipeline = None

    def __init__(self, spec: EngineSpec) -> None:
        refuse_head(spec.classes)
        self.spec, self.space, self.facts = spec, spec.space, read_model_facts(spec)
        self.trained, self.base_digest = self.facts.trained, self.facts.base_digest
        self.micro_batch = choose_micro_batch(spec)
        self.adapter_shape = adapter_shape(spec.space, self.trained)
        self.token_counts = TokenCounts()

    def check(self, batch: Batch, eps: float) -> None:
        """Refuse a space that SGLang cannot perturb, or whose perturbation changes no score."""
        refuse_space("sglang", self.space)
        check_alive(self, batch, eps)

    def load_state(self, tensors: Mapping[str, Array]) -> None:
        """Refuse tensors of another run; a subclass then loads them."""
        check_state(self.trained, tensors)

    def reset(self) -> bool:
        """Put the trained tensors back to the base without starting SGLang again; False if the result is not the base."""
        if self.space.kind == "matrices":
            self.load_state(read_matrices(self.spec, [t.name for t in self.trained]))
        else:
            self.load_state({t.name: to_numpy(initial_lora_factor(t, self.spec.seed)) for t in self.trained})
        return self.digest() == self.facts.initial_digest

    def digest(self) -> str:
        """The digest of the tensors in the dtype they are stored in: the model's own for matrices, float32 for LoRA."""
        dtype = getattr(torch, self.spec.dtype) if self.space.kind == "matrices" else torch.float32
        return catalog.digest_of((name, to_tensor(values).to(dtype)) for name, values in self.state().items())

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "sglang",
            "dtype": self.spec.dtype,
            "parameters": self.facts.parameters,
            "trained_parameters": sum(int(np.prod(t.shape)) for t in self.trained),
            "cached_tokens": self.token_counts.cached,
            "computed_tokens": self.token_counts.computed,
        }
