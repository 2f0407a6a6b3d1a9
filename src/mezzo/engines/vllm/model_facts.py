"""What is known about the model before vLLM is involved: digest, tensors and sizes, read with transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mezzo.engines.base import EngineSpec
from mezzo.engines.torch import catalog
from mezzo.engines.torch.forward.generation import end_tokens
from mezzo.engines.torch.initial_values import untrained_partners
from mezzo.engines.torch.loading import load_model
from mezzo.method.space import select
from mezzo.types import TrainedTensor


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint and its trained tensors, with the names and the digest that they have on the torch engine."""

    base_digest: str
    parameters: int
    trained: tuple[TrainedTensor, ...]
    frozen: tuple[TrainedTensor, ...]
    """LoRA factors that are not trained, but whose partner is."""
    end_tokens: tuple[int, ...]
    """The tokens that end a generated text."""


def read_model_facts(spec: EngineSpec) -> ModelFacts:
    """Read the checkpoint once with transformers."""
    model = load_model(
        spec.model, spec.family, seed=spec.seed, dtype=getattr(torch, spec.dtype), remote_code=spec.remote_code
    )
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    tensors = catalog.catalogue(model)
    trained = select(spec.space, tensors)
    return ModelFacts(
        base_digest=catalog.digest_of(parameters.items()),
        parameters=sum(p.numel() for p in parameters.values()),
        trained=trained,
        frozen=untrained_partners(spec.space, trained, tensors),
        end_tokens=end_tokens(model),
    )
