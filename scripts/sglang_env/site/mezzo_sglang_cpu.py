"""What unmodified SGLang needs to run without a GPU, done when the modules concerned are imported; no file is changed.

- torchvision's CPU-less build registers operators that do not exist here: their schemas are defined first.
- SGLang's LoRA modules ask for pinned host memory, which only exists beside an accelerator: there, the request is dropped.
"""

import importlib.abc
import importlib.machinery
import sys
import types

PINNING = {"sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend"}
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library = []


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; prepares the ground before, or adjusts the module after, the real import."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)  # its own submodules need no help, and neither does a second import
            _define_operators()
            sys.meta_path.insert(0, self)
            return None
        if name not in PINNING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Unpinned(spec.loader)
        return spec


class Unpinned(importlib.abc.Loader):
    """Loads a module, then lets it see a `torch` that ignores `pin_memory`."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        import torch

        if torch.accelerator.is_available():
            return
        torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
        module.torch = _without_pinning(torch)


def _without_pinning(torch):
    proxy = types.ModuleType("torch")
    proxy.__getattr__ = lambda name: getattr(torch, name)
    for name in ("tensor", "empty", "zeros", "ones", "arange", "full"):
        setattr(proxy, name, _dropping(getattr(torch, name)))
    return proxy


def _dropping(function):
    def call(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return call


def _define_operators():
    import torch

    if _library or torch.accelerator.is_available():
        return
    _library.append(torch.library.Library("torchvision", "DEF"))
    for schema in OPERATORS:
        _library[0].define(schema)


sys.meta_path.insert(0, Finder())
