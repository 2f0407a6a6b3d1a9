"""What a Hugging Face model is made of, as `space` sees it: every tensor the readout uses, its kind and depth."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mezzo.errors import ModelError, is_out_of_memory
from mezzo.types import TensorInfo, TensorKind

LAYER = re.compile(r"\.(\d+)\.")


def parameter_owners(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, the module's name of a parameter, parameter) for every owner, those of tied parameters included."""
    for module in model.modules():
        for own_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, own_name, parameter


def canonical_names(model: nn.Module) -> dict[int, str]:
    """id(parameter) → the one name of a tensor, however many modules share it."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def catalogue(model: nn.Module) -> list[TensorInfo]:
    """The tensors of modules that run in a forward, not of a pooler that the readout ignores; a tied tensor once, under the
    name of its first owner."""
    names, used = canonical_names(model), trace_modules(model).order
    base = getattr(model, "base_model_prefix", "")
    infos: dict[str, TensorInfo] = {}
    for module, own_name, parameter in parameter_owners(model):
        name = names[id(parameter)]
        if name in infos or module not in used:
            continue
        if not parameter.is_floating_point():
            if isinstance(module, nn.Linear):  # quantised: LoRA can still be added to it
                shape = (module.out_features, module.in_features)
                infos[name] = TensorInfo(name, shape, "matrix", layer_of(name), linear=True)
            continue
        kind = _kind(name, own_name, module, base)
        linear = kind == "matrix" and own_name == "weight"
        infos[name] = TensorInfo(
            name, tuple(parameter.shape), kind, layer_of(name), linear, linear and isinstance(module, Conv1D)
        )
    return list(infos.values())


def layer_of(name: str) -> int:
    """The depth in the stack, by a tensor's name; -1 outside it."""
    depth = LAYER.search(name)
    return int(depth[1]) if depth else -1


def base_models(model: nn.Module) -> list[nn.Module]:
    """The modules whose last hidden states the LM head reads: the base model, or the decoder inside it that is called alone."""
    getter = getattr(model, "get_decoder", None)
    candidates = dict.fromkeys([getattr(model, "base_model", None), getter() if getter else None])
    return [module for module in candidates if module is not None and module is not model]


@dataclass(frozen=True, slots=True)
class ModuleTrace:
    """How the modules of a model ran in one forward."""

    order: dict[nn.Module, int] = field(default_factory=dict)
    """When each module first ran."""
    output_values: dict[nn.Module, int] = field(default_factory=dict)
    """How many values it returned; 0 for a bare tensor."""
    repeated: set[nn.Module] = field(default_factory=set)
    """Modules that ran more than once."""


def trace_modules(model: nn.Module) -> ModuleTrace:
    """Run one forward of two tokens and record the modules; ModelError if it fails."""
    trace, ids = ModuleTrace(), torch.tensor([[0, 1]], device=next(model.parameters()).device)

    def before(module: nn.Module, _: Any) -> None:
        if module in trace.order:
            trace.repeated.add(module)
        trace.order.setdefault(module, len(trace.order))

    def after(module: nn.Module, _: Any, output: Any) -> None:
        trace.output_values[module] = len(output) if isinstance(output, tuple) else 0

    try:
        with torch.no_grad(), ExitStack() as hooks:
            for module in model.modules():
                hooks.enter_context(module.register_forward_pre_hook(before))
                hooks.enter_context(module.register_forward_hook(after))
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        message = (str(error).splitlines() or [type(error).__name__])[0]
        if "on the same device" in message:
            raise ModelError(f"{type(model).__name__} cannot be split ({message}); name one --device") from None
        raise ModelError(
            f"{type(model).__name__} itself fails on a few tokens ({message}); is its config.json complete?"
        ) from None
    return trace


def digest_of(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """SHA-256 over names, types, shapes and bits, in order of names; with `dtype`, of what they are in that type."""
    total = hashlib.sha256()
    for name, stored in sorted(tensors, key=lambda item: item[0]):
        tensor = stored.to(dtype) if dtype and stored.is_floating_point() else stored
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def refuse_nonfinite(tensors: Iterable[tuple[str, Tensor]], name: str) -> None:
    """A value that no batch reads would pass unnoticed, and be trained, saved and exported with the rest."""
    for key, tensor in tensors:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            half = "; float16 holds none above 65504: use --dtype bfloat16" if tensor.dtype == torch.float16 else ""
            raise ModelError(f"{name} cannot be used: {key} holds values that are not finite numbers{half}")


def is_pooler(name: str) -> bool:
    """BERT-like models have a pooler inside the base model, for a head alone: a checkpoint saved with its LM head has none."""
    return "pooler" in name.split(".")


def _kind(name: str, own_name: str, module: nn.Module, base: str) -> TensorKind:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if is_pooler(name) or (base and not name.startswith(base + ".")):
        return "head"
    if "norm" in type(module).__name__.lower():
        return "norm" if own_name == "weight" else "bias"
    if own_name == "bias":
        return "bias"
    return "matrix" if isinstance(module, (nn.Linear, Conv1D)) else "other"
