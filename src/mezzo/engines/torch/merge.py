"""A plain copy of an engine's model with what was trained in its weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from mezzo.errors import ConfigError

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


@torch.no_grad()
def merge(engine: TorchEngine) -> nn.Module:
    """The copy, in the types that the weights were stored in."""
    if engine.space.kind == "prefix":
        raise ConfigError("a prefix is not part of a model's weights: export the adapter instead")
    if engine.quantized:
        raise ConfigError("a quantised base cannot take in what was trained: export the adapter instead")
    with engine.plan.suspended():
        model = copy.deepcopy(engine.model)
    for name, parameter in model.named_parameters():
        delta = engine.lora_delta(name)
        merged = parameter.data.clone() if delta is None else parameter.data + delta
        parameter.data = merged.to(engine.stored_types[name])
    return model
