"""What is known about the model before SGLang is involved: digest, tensors and sizes, read with transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import load_config
from mezzo.engines.sglang.support import TRAINABLE_SPACES, refuse_architecture, refuse_space, refuse_tensors
from mezzo.engines.torch import catalog
from mezzo.engines.torch.initial_values import initial_lora_factor, untrained_partners
from mezzo.engines.torch.loading import load_model
from mezzo.method.space import select
from mezzo.types import TrainedTensor

SAMPLE_TOKENS = tuple(range(4, 12))


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint, its trained tensors, and what is needed to recognise SGLang's copy of it."""

    base_digest: str
    parameters: int
    trained: tuple[TrainedTensor, ...]
    frozen: tuple[TrainedTensor, ...]
    """LoRA factors that are not trained, but whose partner is."""
    initial_digest: str
    """Digest of the trained tensors before step 1; SGLang's copy of them must have it too."""
    sample_logprobs: tuple[float, ...] = ()
    """Log-probabilities of SAMPLE_TOKENS after the prompt SAMPLE_TOKENS; a server of another model has others."""
    matrices: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The trained matrices themselves, where servers train them in place."""


def read_model_facts(spec: EngineSpec) -> ModelFacts:
    """Read the checkpoint once with transformers; names, digest and selection are then the same as on the torch engine."""
    space = spec.space
    refuse_architecture(load_config(spec.model, spec.remote_code).model_type, spec.family)
    if space.kind in TRAINABLE_SPACES:
        refuse_space(space)
    model = load_model(
        spec.model, spec.family, seed=spec.seed, dtype=getattr(torch, spec.dtype), remote_code=spec.remote_code
    )
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    model.float()  # it runs here on a CPU, in float32; `parameters` keep the dtype they are stored in
    tensors = catalog.catalogue(model)
    trained = select(space, tensors)
    if space.kind in TRAINABLE_SPACES:
        refuse_tensors(space, trained)
    initial = (
        (t.name, parameters[t.name] if t.name in parameters else initial_lora_factor(t, spec.seed)) for t in trained
    )
    return ModelFacts(
        base_digest=catalog.digest_of(parameters.items()),
        parameters=sum(p.numel() for p in parameters.values()),
        trained=trained,
        frozen=untrained_partners(space, trained, tensors),
        initial_digest=catalog.digest_of(initial),
        sample_logprobs=_sample_logprobs(model) if spec.urls else (),
        matrices={t.name: parameters[t.name] for t in trained} if spec.urls and space.kind == "matrices" else {},
    )


@torch.no_grad()
def _sample_logprobs(model: torch.nn.Module) -> tuple[float, ...]:
    logits = model(input_ids=torch.tensor([SAMPLE_TOKENS])).logits[0, -1].float()
    return tuple(float(value) for value in logits.log_softmax(-1)[list(SAMPLE_TOKENS)])
