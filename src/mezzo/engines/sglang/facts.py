"""What is known of the model before SGLang starts: its digest and tensors, in the words of the torch engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.support import TRAINABLE, refuse_space, refuse_tensors
from mezzo.engines.torch import catalog
from mezzo.engines.torch.loading import load_model
from mezzo.method import noise
from mezzo.method.space import Space, lora_names, select
from mezzo.types import TrainedTensor

SAMPLE = tuple(range(4, 12))


@dataclass(frozen=True)
class Facts:
    """`start` is the digest of the trained tensors as Hugging Face has them: SGLang's copies must equal it. `sample` are the
    log-probabilities of the tokens SAMPLE after the prompt SAMPLE: by them a server's model is recognised. `values` are the
    matrices that servers train in place."""

    base_digest: str
    parameters: int
    trained: tuple[TrainedTensor, ...]
    frozen: tuple[TrainedTensor, ...]
    start: str
    sample: tuple[float, ...] = ()
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)


def facts_of(spec: EngineSpec) -> Facts:
    """Read the checkpoint once with transformers; names, digest and selection are then those of any other engine."""
    space = spec.space
    if space.kind in TRAINABLE:
        refuse_space(space)
    model = load_model(
        spec.model, spec.family, seed=spec.seed, dtype=getattr(torch, spec.dtype), remote_code=spec.remote_code
    )
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    model.float()  # what runs here runs on a CPU, which computes in float32; `parameters` keep the type they are stored as
    ids = torch.tensor([[0, 1]])
    used = catalog.used_modules(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    tensors = catalog.catalogue(model, used)
    trained = select(space, tensors)
    if space.kind in TRAINABLE:
        refuse_tensors(space, trained)
    frozen: tuple[TrainedTensor, ...] = ()
    if space.kind == "lora":
        whole = select(Space("lora", space.rank, space.alpha, space.targets), tensors)
        names = {t.name for t in trained}
        frozen = tuple(t for t in whole if t.name not in names and partner(t.name) in names)
    start = ((t.name, parameters[t.name] if t.name in parameters else fresh(t, spec.seed)) for t in trained)
    return Facts(
        base_digest=catalog.digest_of(parameters.items()),
        parameters=sum(p.numel() for p in parameters.values()),
        trained=trained,
        frozen=frozen,
        start=catalog.digest_of(start),
        sample=_sample(model) if spec.urls else (),
        values={t.name: parameters[t.name] for t in trained} if spec.urls and space.kind == "matrices" else {},
    )


def stored_as(spec: EngineSpec) -> torch.dtype:
    """The type of the trained tensors: the model's own for matrices, float32 for LoRA's factors."""
    return getattr(torch, spec.dtype) if spec.space.kind == "matrices" else torch.float32  # type: ignore[no-any-return]


@torch.no_grad()
def _sample(model: torch.nn.Module) -> tuple[float, ...]:
    logits = model(input_ids=torch.tensor([SAMPLE])).logits[0, -1].float()
    return tuple(float(value) for value in logits.log_softmax(-1)[list(SAMPLE)])


def fresh(trained: TrainedTensor, seed: int) -> torch.Tensor:
    """LoRA's start, the torch engine's bit for bit: A uniform as a linear layer's weight, B zero."""
    if trained.kind != "lora_A":
        return torch.zeros(trained.shape)
    values = noise.uniform(seed, f"init/{trained.name}", int(np.prod(trained.shape)), trained.shape[1] ** -0.5)
    return torch.from_numpy(values).view(trained.shape)


def partner(name: str) -> str:
    """The other factor of a LoRA pair."""
    a, b = lora_names(name.replace(".lora_A.weight", ".weight").replace(".lora_B.weight", ".weight"))
    return b if name == a else a
