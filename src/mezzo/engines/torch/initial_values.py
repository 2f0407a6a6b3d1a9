"""Initial values of tensors that a model does not have: LoRA's factors from a seed, a prefix from the activations of a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.engines.torch.forward import prefix
from mezzo.method import noise
from mezzo.method.space import Space, select
from mezzo.types import TensorInfo, TrainedTensor


def initial_prefix(model: nn.Module, space: Space, seed: int, ids: Sequence[int]) -> dict[str, Tensor]:
    """The keys and values of a text at each attention module; without a text, of some tokens of the vocabulary."""
    if space.kind != "prefix":
        return {}
    size: int = model.config.vocab_size  # type: ignore[assignment, union-attr]
    text = list(ids) or [int(n) for n in noise.order(seed, "prefix", size)[: space.tokens]]
    return prefix.record_activations(model, torch.tensor([text], device=next(model.parameters()).device))


def initial_lora_factor(trained: TrainedTensor, seed: int) -> Tensor:
    """A uniform like a linear layer's weight, B zero, so that the model is unchanged at first."""
    if trained.kind != "lora_A":
        return torch.zeros(trained.shape)
    count, bound = int(np.prod(trained.shape)), trained.shape[1] ** -0.5
    return torch.from_numpy(noise.uniform(seed, f"init/{trained.name}", count, bound)).view(trained.shape)


def untrained_partners(
    space: Space, trained: Sequence[TrainedTensor], catalogue: Sequence[TensorInfo]
) -> tuple[TrainedTensor, ...]:
    """The other tensor of each pair of which only one is trained: LoRA factors, or a prefix's keys and values."""
    if not space.adapter:
        return ()
    names = {t.name for t in trained}
    modules = {_adapted_module(name) for name in names}
    every = select(replace(space, factors="both", only=(), layers=""), catalogue)
    return tuple(t for t in every if t.name not in names and _adapted_module(t.name) in modules)


def _adapted_module(name: str) -> str:
    """The module that an adapter's tensor belongs to."""
    return re.split(r"\.(?:lora|prefix)_", name)[0]
