"""A model larger than its device: frozen layers stay in host memory and are copied to the device when they run, the next one
while the last computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engines.torch import catalog
from mezzo.errors import ModelError

ALIGNMENT = 256


class LayerStream:
    """The layers of a model in host memory, and room for two of them on the device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device, self.layers = device, _find_stack(model)
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.parameters = [list(layer.parameters()) for layer in self.layers]
        inside = {id(parameter) for layer in self.parameters for parameter in layer}
        for parameter in model.parameters():
            if id(parameter) not in inside:
                parameter.data = parameter.data.to(device)
            elif self.copies is not None:
                parameter.data = parameter.data.pin_memory()  # only such memory is copied while the device computes
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        self.host = [[parameter.data for parameter in layer] for layer in self.parameters]
        size = max(sum(_padded_size(tensor) for tensor in layer) for layer in self.host)
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(2, len(self.layers)))]
        self.held: list[int | None] = [None] * len(self.slots)
        """The layer in each slot."""
        self._hooks: list[Any] = []
        self.install()

    def install(self) -> None:
        for index, layer in enumerate(self.layers):
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, index=index: self._load(index)))
            # Also after an exception: a cache of frozen layers ends a forward by one.
            unload = lambda *_, index=index: self._unload(index)  # noqa: E731
            self._hooks.append(layer.register_forward_hook(unload, always_call=True))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The model without hooks, for the duration."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            yield
        finally:
            self.install()

    def _load(self, index: int) -> None:
        """Let a layer compute with its copy on the device, and begin to copy the next one."""
        if self.held[index % len(self.slots)] != index:
            self._copy(index)
        if self.copies is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.copies)
        for parameter, value in zip(self.parameters[index], self._views(index), strict=True):
            parameter.data = value
        if index + 1 < len(self.layers):
            self._copy(index + 1)

    def _unload(self, index: int) -> None:
        for parameter, value in zip(self.parameters[index], self.host[index], strict=True):
            parameter.data = value

    def _copy(self, index: int) -> None:
        """Copy a layer to its slot, once the layer that is there has been computed."""
        if self.copies is not None:
            self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            for value, tensor in zip(self._views(index), self.host[index], strict=True):
                value.copy_(tensor, non_blocking=True)
        self.held[index % len(self.slots)] = index

    def _views(self, index: int) -> Iterator[Tensor]:
        slot, start = self.slots[index % len(self.slots)], 0
        for tensor in self.host[index]:
            part = slot[start : start + tensor.numel() * tensor.element_size()]
            yield part.view(tensor.dtype).view(tensor.shape)
            start += _padded_size(tensor)


def _find_stack(model: nn.Module) -> list[nn.Module]:
    """The layers of the deepest list of modules that all run."""
    order = catalog.trace_modules(model).order
    stacks = [
        list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and all(c in order for c in m)
    ]
    if not stacks:
        raise ModelError(f"{type(model).__name__} has no stack of layers to keep in host memory: leave out --offload")
    return max(stacks, key=len)


def _padded_size(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
