"""TrainedTensor keys and values in front of a layer's own, through transformers' attention interface.

The prefix meets the model where attention happens: after the rotary positions, outside the key-value cache. So no token moves to
another position, every token sees the whole prefix whatever the mask or the window, and generation works as without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.engines.torch.catalog import layer_of
from mezzo.engines.torch.forward.population import Population
from mezzo.errors import ModelError
from mezzo.method.space import prefix_names
from mezzo.types import TensorInfo

ROUTED = "mezzo_prefix_"
"""Names of our attention functions: this, then the name of the one that does the work."""
WORKERS = ("sdpa", "eager")
SOURCE = "mezzo_prefix"
"""Attribute of an attention module: a function from a number of rows to their prefix keys and values."""

Pair = tuple[Tensor, Tensor]
Activations = dict[str, Pair]
_recording: dict[nn.Module, Pair] | None = None


def activations(model: nn.Module, ids: Tensor) -> Activations:
    """Path of every attention module → keys[heads, tokens, dim] and values that a text gives there; ModelError if it has none.

    Rounded to bfloat16, which is plenty for a starting point and halves what a journal must keep of it.
    """
    global _recording
    _route(model)
    seen: dict[nn.Module, Pair] = {}
    _recording = seen
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        _recording = None
    paths = {module: path for path, module in model.named_modules()}
    found = {paths[module]: pair for module, pair in seen.items()}
    if not found or any(key.shape[0] != 1 or key.shape[2] != ids.shape[1] for key, _ in found.values()):
        raise ModelError(
            f"{type(model).__name__} does not compute attention through transformers' attention interface, so it cannot take "
            "a prefix; choose another --space"
        )
    return {path: (_coarse(key[0]), _coarse(value[0])) for path, (key, value) in found.items()}


def catalogue(found: Activations) -> list[TensorInfo]:
    """The tensors a prefix could have, as `space` sees them: (heads, dim), to which it adds the number of tokens."""
    infos = []
    for path, pair in found.items():
        for name, tensor in zip(prefix_names(path), pair, strict=True):
            heads, _, dim = tensor.shape
            infos.append(TensorInfo(name, (heads, dim), "prefix", layer_of(name)))
    return infos


def attach(model: nn.Module, population: Population, moved: Callable[[str], Tensor | None]) -> None:
    """Give every attention module that has a trained prefix its members' keys and values; `moved` may stand in for them."""
    for path, module in model.named_modules():
        names = prefix_names(path)
        if any(name in population.trained for name in names):
            setattr(module, SOURCE, _of_population(population, names, moved))


def give(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a finished prefix on an ordinary model, whose forward and `generate` then use it."""
    _route(model)
    left = set(tensors)
    for path, module in model.named_modules():
        names = prefix_names(path)
        if left.issuperset(names):
            setattr(module, SOURCE, _fixed(tensors[names[0]], tensors[names[1]]))
            left -= set(names)
    if left:
        raise ModelError(f"this prefix belongs to another model: {type(model).__name__} has no place for {min(left)}")


@contextmanager
def withheld(model: nn.Module) -> Iterator[None]:
    """The model without its prefixes, for a moment."""
    kept = [(module, module.__dict__.pop(SOURCE)) for module in model.modules() if SOURCE in module.__dict__]
    try:
        yield
    finally:
        for module, source in kept:
            setattr(module, SOURCE, source)


def _of_population(
    population: Population, names: tuple[str, str], moved: Callable[[str], Tensor | None]
) -> Callable[[int], Pair]:
    def one(name: str, rows: int) -> Tensor:
        if (stated := moved(name)) is not None:
            return stated.expand(rows, *stated.shape)
        if not population.probes:
            value = population.value(name)
            return value.expand(rows, *value.shape)
        members = population.member(name)
        each = rows // population.members
        return members[:, None].expand(-1, each, *members.shape[1:]).flatten(0, 1)

    return lambda rows: (one(names[0], rows), one(names[1], rows))


def _fixed(key: Tensor, value: Tensor) -> Callable[[int], Pair]:
    return lambda rows: (key.expand(rows, *key.shape), value.expand(rows, *value.shape))


def _coarse(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).float().clone()


# ---- the attention function


def _route(model: nn.Module) -> None:
    """Let the model's attention pass through us on its way to the function that did the work so far."""
    worker = str(getattr(model.config, "_attn_implementation", None))
    if worker.startswith(ROUTED):
        return
    if worker not in WORKERS:
        raise ModelError(f"a prefix needs eager or sdpa attention; this model is set to {worker!r}")
    import transformers

    _register(worker)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # a model that cannot is refused below, in our own words
    try:
        model.set_attn_implementation(ROUTED + worker)  # type: ignore[operator]
    finally:
        transformers.logging.set_verbosity(verbosity)


def _register(worker: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    make = {"sdpa": sdpa_mask, "eager": eager_mask}[worker]

    def mask(*args: Any, **options: Any) -> Any:
        # "Causal" said by a flag instead of a mask would count the prefix among the tokens.
        return make(*args, **{**options, "allow_is_causal_skip": False})

    AttentionInterface.register(ROUTED + worker, _attention(worker))
    AttentionMaskInterface.register(ROUTED + worker, mask)


def _attention(worker: str) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        # Each model file has an eager function of its own (Gemma 2 caps its scores there).
        plain = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        compute = ALL_ATTENTION_FUNCTIONS.get_interface(worker, plain)
        if _recording is not None:
            _recording.setdefault(module, (key, value))
        elif (source := module.__dict__.get(SOURCE)) is not None:
            if attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", False):
                raise ModelError(f"{type(module).__name__} masks by a flag; it cannot take a prefix")
            before_keys, before_values = source(key.shape[0])
            length = before_keys.shape[2]
            key = torch.cat([before_keys.to(key), key], dim=2)
            value = torch.cat([before_values.to(value), value], dim=2)
            if attention_mask is not None:
                visible = True if attention_mask.dtype == torch.bool else 0.0
                attention_mask = F.pad(attention_mask, (length, 0), value=visible)
        return compute(module, query, key, value, attention_mask, **options)

    return attention
