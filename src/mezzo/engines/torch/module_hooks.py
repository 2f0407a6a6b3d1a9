"""Hooks on the modules of a model that can be taken off for a while."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class ModuleHooks(ABC):
    """What runs before and after modules; `install` once the subclass is ready."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        self._handles += self.register()

    @abstractmethod
    def register(self) -> Iterator[RemovableHandle]:
        """Put every hook on its module."""

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The model without these hooks, for the duration."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            yield
        finally:
            self.install()


def find_stack(model: nn.Module) -> list[nn.Module]:
    """The layers of the longest list of modules that is in no other list, as experts are; empty where there is none.

    By the structure alone: nothing can run before it is decided where.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {module for each in lists for layer in each for module in layer.modules()}
    return list(max((each for each in lists if each not in inner), key=len, default=()))


def move_tensors(module: nn.Module, device: torch.device) -> None:
    """A module's own parameters and buffers to a device, not those of its children."""
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)
