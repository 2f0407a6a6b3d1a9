"""A model larger than its device: frozen layers stay in host memory and are copied to the device when they run, the next one
while the last computes."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.engines.torch.forward.frozen_cache import FrozenCache
from mezzo.engines.torch.module_hooks import ModuleHooks, find_stack, move_tensors
from mezzo.errors import ModelError, RunFailed

ALIGNMENT = 256
PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device."""


class LayerStream(ModuleHooks):
    """The layers of a model in host memory, and room for two of them on the device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.device, self.layers = device, find_stack(model)
        if not self.layers:
            raise ModelError(
                f"{type(model).__name__} has no stack of layers to keep in host memory: leave out --offload"
            )
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.cache: FrozenCache | None = None
        """Layers whose output it has are not copied."""
        self.parameters = [list(layer.parameters()) for layer in self.layers]
        self.sizes = [sum(map(_padded_size, layer)) for layer in self.parameters]
        self.pool = self._fill_pool()
        inside = {module for layer in self.layers for module in layer.modules()}
        for module in model.modules():
            if module not in inside:
                move_tensors(module, device)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        self.host = [[parameter.data for parameter in layer] for layer in self.parameters]
        self.slots = [
            torch.empty(max(self.sizes), dtype=torch.uint8, device=device) for _ in range(min(2, len(self.layers)))
        ]
        self.held: list[int | None] = [None] * len(self.slots)
        """The layer in each slot."""
        self.copied_bytes = 0
        self.install()

    def register(self) -> Iterator[RemovableHandle]:
        for index, layer in enumerate(self.layers):
            yield layer.register_forward_pre_hook(lambda *_, index=index: self._load(index))
            # Also after an exception: a cache of frozen layers ends a forward by one.
            unload = lambda *_, index=index: self._unload(index)  # noqa: E731
            yield layer.register_forward_hook(unload, always_call=True)

    def _fill_pool(self) -> list[Tensor]:
        """The bytes of each layer one behind the other, in memory that is locked for a GPU: only such memory is copied while
        the GPU computes. Layer by layer, so that the model is in memory once."""
        memory = mmap.mmap(-1, sum(self.sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or without large pages, which are locked faster
            memory.madvise(mmap.MADV_HUGEPAGE)
        pool = torch.frombuffer(memory, dtype=torch.uint8)
        layers = list(torch.split(pool, self.sizes))
        for part, parameters in zip(layers, self.parameters, strict=True):
            for parameter, value in zip(parameters, _views(part, parameters), strict=True):
                parameter.data = value.copy_(parameter.data)
        if self.copies is not None:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if code := int(runtime.cudaHostRegister(pool.data_ptr(), pool.numel(), PORTABLE)):
                raise RunFailed(
                    f"the GPU's driver cannot lock {pool.numel() / 2**30:.1f} GiB of host memory for --offload (error {code}): "
                    "free some of it, or use a smaller model"
                )
            weakref.finalize(self, runtime.cudaHostUnregister, pool.data_ptr()).atexit = False
        return layers

    def _load(self, index: int) -> None:
        """Let a layer compute with its copy on the device, and begin to copy the one that runs after it."""
        if self._is_skipped(index):
            return
        if index not in self.held:
            self.copy_layer(index, 0)
        slot = self.held.index(index)
        if self.copies is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.copies)
        for parameter, value in zip(self.parameters[index], self._device_views(index, slot), strict=True):
            parameter.data = value
        following = (index + 1) % len(self.layers)  # behind the last layer, the first one of the next forward
        while self._is_skipped(following):
            following = (following + 1) % len(self.layers)
        if following not in self.held:
            self.copy_layer(following, 1 - slot)

    def _unload(self, index: int) -> None:
        for parameter, value in zip(self.parameters[index], self.host[index], strict=True):
            parameter.data = value

    def _is_skipped(self, index: int) -> bool:
        return self.cache is not None and self.cache.replaces(self.layers[index])

    def copy_layer(self, index: int, slot: int) -> None:
        """Copy a layer to a slot, once the layer that is there has been computed."""
        if self.copies is not None:
            self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            self.slots[slot][: self.sizes[index]].copy_(self.pool[index], non_blocking=True)
        self.held[slot] = index
        self.copied_bytes += self.sizes[index]

    def _device_views(self, index: int, slot: int) -> Iterator[Tensor]:
        return _views(self.slots[slot], self.host[index])


def _views(memory: Tensor, tensors: list[Tensor] | list[nn.Parameter]) -> Iterator[Tensor]:
    """Parts of a layer's bytes as tensors like these."""
    starts = accumulate(map(_padded_size, tensors), initial=0)
    for start, tensor in zip(starts, tensors, strict=False):
        yield memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _padded_size(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
