"""A plain copy of an engine's model: nothing of the engine in it but what was trained."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from mezzo.errors import ConfigError

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


@torch.no_grad()
def merged(engine: TorchEngine) -> nn.Module:
    """The copy, in the types that the weights were stored in."""
    if engine.space.kind == "prefix":
        raise ConfigError("a prefix is not part of a model's weights: export the adapter instead")
    if engine.quantized:
        raise ConfigError("a quantised base cannot take in what was trained: export the adapter instead")
    twin = copy.deepcopy(engine.model, {id(engine.forward): engine.forward})  # hooks lead there: no part of the copy
    for module in twin.modules():
        module.__dict__.pop("forward", None)
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__self__", None) is engine.forward:
                del module._forward_hooks[key]
    for name, parameter in twin.named_parameters():
        delta = engine.lora_delta(name)
        moved = parameter.data.clone() if delta is None else parameter.data + delta
        parameter.data = moved.to(engine.stored_as[name])
    return twin
