"""A model larger than one device: its layers in order, about as many bytes on each device, and activations that are moved when
they arrive at a module elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.engines.torch.module_hooks import ModuleHooks, find_stack, move_tensors
from mezzo.errors import ConfigError, ModelError


class DeviceMap(ModuleHooks):
    """Where each module of a model computes. A device that is listed twice gets two shares."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__()
        if len({device.type for device in devices}) > 1 and model.dtype != torch.float32:
            raise ConfigError("a CPU computes in float32: use --dtype float32, or leave cpu out of --device")
        self.devices = tuple(devices)
        self.parts = split_modules(model, len(devices))
        """The number of the device of each layer, and of each module outside the stack of layers."""
        inside = {module: part for unit, part in self.parts.items() for module in unit.modules()}
        # Tensor by tensor: the model is in memory once, and never whole on one device. Parents come first: what they share with
        # a module inside them belongs to that.
        for module in model.modules():
            if module not in inside:
                move_tensors(module, devices[0])
        for module, part in inside.items():
            move_tensors(module, devices[part])
        self._devices = {path: devices[inside.get(module, 0)] for path, module in model.named_modules()}
        self.install()

    def register(self) -> Iterator[RemovableHandle]:
        for module, part in self.parts.items():
            move = lambda _, args, kwargs, device=self.devices[part]: _move((args, kwargs), device)  # noqa: E731
            yield module.register_forward_pre_hook(move, with_kwargs=True)

    def device_of(self, path: str) -> torch.device:
        """Where the module at a path computes."""
        return self._devices[path]


def split_modules(model: nn.Module, count: int) -> dict[nn.Module, int]:
    """What is before the layers in part 0, what is behind them in the last part, and the layers in the part in which their
    middle lies when all bytes are divided evenly. A module behind the layers that shares a tensor with the embeddings stays
    with these."""
    stack = find_stack(model)
    if not stack:
        raise ModelError(f"{type(model).__name__} has no stack of layers to split: name one --device")
    modules = list(model.modules())
    layers, first = {module for layer in stack for module in layer.modules()}, modules.index(stack[0])
    leaves = [m for m in modules if m not in layers and not list(m.children()) and (m._parameters or m._buffers)]
    before = [module for module in leaves if modules.index(module) < first]
    shared = {id(parameter) for module in before for parameter in module.parameters()}
    before += [m for m in leaves if m not in before and any(id(p) in shared for p in m.parameters())]
    behind = [module for module in leaves if module not in before]
    total = sum(tensor.nbytes for tensor in model.parameters())
    end = sum(tensor.nbytes for tensor in {id(p): p for m in before for p in m.parameters()}.values())
    parts = dict.fromkeys(before, 0)
    for layer in stack:
        size = sum(parameter.nbytes for parameter in layer.parameters())
        parts[layer] = min(count - 1, int(count * (end + size / 2) / total))
        end += size
    return parts | dict.fromkeys(behind, count - 1)


def _move(value: Any, device: torch.device) -> Any:
    """A module's arguments, or what they consist of, on a device; what is no tensor, such as a key-value cache, stays."""
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_move(each, device) for each in value)
    if type(value) is dict:
        return {key: _move(each, device) for key, each in value.items()}
    return value
