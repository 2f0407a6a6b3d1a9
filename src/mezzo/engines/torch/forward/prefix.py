"""Trained keys and values in front of a layer's own, through transformers' attention interface.

The prefix joins the model where attention happens: after the rotary positions, outside the key-value cache. So no token moves to
another position, every token attends to the whole prefix whatever the mask or the window, and generation works as without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.engines.architectures import ATTENTION_FUNCTIONS
from mezzo.engines.hf_hub import quiet
from mezzo.engines.torch.catalog import layer_of
from mezzo.engines.torch.forward.population import Population
from mezzo.errors import ModelError
from mezzo.method.space import prefix_names
from mezzo.types import TensorInfo

# Names of our attention functions: this, then the name of the function that does the work.
REGISTERED = "mezzo_prefix_"
# Attribute of an attention module: a function from a number of rows to their prefix keys and values.
SOURCE = "mezzo_prefix"

KeyValue = tuple[Tensor, Tensor]
Source = Callable[[int], KeyValue]
_recorded: dict[nn.Module, KeyValue] | None = None


def record_activations(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Keys[heads, tokens, dim] and values of a text at every attention module, by tensor name; ModelError if there are none.

    Rounded to bfloat16, which is plenty for a starting point and halves what a journal must keep of it.
    """
    global _recorded
    _route_attention(model)
    recorded: dict[nn.Module, KeyValue] = {}
    _recorded = recorded
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        _recorded = None
    if not recorded or any(key.shape[0] != 1 or key.shape[2] != ids.shape[1] for key, _ in recorded.values()):
        raise ModelError(
            f"{type(model).__name__} does not compute attention through transformers' attention interface, so it cannot take "
            "a prefix; choose another --space"
        )
    paths = {module: path for path, module in model.named_modules()}
    return {
        name: tensor[0].to(torch.bfloat16).float().clone()
        for module, pair in recorded.items()
        for name, tensor in zip(prefix_names(paths[module]), pair, strict=True)
    }


def tensor_infos(activations: Mapping[str, Tensor]) -> list[TensorInfo]:
    """The tensors a prefix could have, as `space` sees them: (heads, dim), to which it adds the number of tokens."""
    return [TensorInfo(name, (t.shape[0], t.shape[2]), "prefix", layer_of(name)) for name, t in activations.items()]


def member_source(population: Population, path: str, override: Mapping[str, Tensor]) -> Source | None:
    """The members' keys and values for the attention module at `path`, if its prefix is trained; tensors in `override` take
    their place."""
    names = prefix_names(path)
    if not any(name in population.trained for name in names):
        return None

    def rows_of(name: str, rows: int) -> Tensor:
        if name in override or not population.members:
            value = override[name] if name in override else population.value(name)
            return value.expand(rows, *value.shape)
        members = population.member_tensor(name)
        each = rows // population.members
        return members[:, None].expand(-1, each, *members.shape[1:]).flatten(0, 1)

    return lambda rows: (rows_of(names[0], rows), rows_of(names[1], rows))


def set_prefix(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a finished prefix on an ordinary model, whose forward and `generate` then use it."""
    _route_attention(model)
    left = set(tensors)
    for path, module in model.named_modules():
        names = prefix_names(path)
        if left.issuperset(names):
            setattr(module, SOURCE, _constant_source(tensors[names[0]], tensors[names[1]]))
            left -= set(names)
    if left:
        raise ModelError(f"this prefix belongs to another model: {type(model).__name__} has no place for {min(left)}")


@contextmanager
def without_prefix(model: nn.Module) -> Iterator[None]:
    """Take the model's prefixes off for the duration."""
    sources = [(module, module.__dict__.pop(SOURCE)) for module in model.modules() if SOURCE in module.__dict__]
    try:
        yield
    finally:
        for module, source in sources:
            setattr(module, SOURCE, source)


def _constant_source(key: Tensor, value: Tensor) -> Source:
    return lambda rows: (key.expand(rows, *key.shape), value.expand(rows, *value.shape))


# ---- the attention function


def _route_attention(model: nn.Module) -> None:
    """Let the model's attention pass through our function on its way to the one it has used so far."""
    function = str(getattr(model.config, "_attn_implementation", None))
    if function.startswith(REGISTERED):
        return
    if function not in ATTENTION_FUNCTIONS:
        raise ModelError(f"a prefix needs eager or sdpa attention; this model is set to {function!r}")
    _register(function)
    with quiet():  # a model that cannot take a prefix is refused later, with our own message
        model.set_attn_implementation(REGISTERED + function)  # type: ignore[operator]


def _register(function: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    make_mask = {"sdpa": sdpa_mask, "eager": eager_mask}[function]

    def mask(*args: Any, **options: Any) -> Any:
        # Causal attention by a flag instead of a mask would count the prefix among the tokens.
        return make_mask(*args, **{**options, "allow_is_causal_skip": False})

    AttentionInterface.register(REGISTERED + function, _attention(function))
    AttentionMaskInterface.register(REGISTERED + function, mask)


def _attention(function: str) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        # Each model file has an eager function of its own (Gemma 2 caps its scores there).
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        compute = ALL_ATTENTION_FUNCTIONS.get_interface(function, eager)
        if _recorded is not None:
            _recorded.setdefault(module, (key, value))
        elif (source := module.__dict__.get(SOURCE)) is not None:
            if attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", False):
                raise ModelError(f"{type(module).__name__} masks by a flag; it cannot take a prefix")
            prefix_key, prefix_value = source(key.shape[0])
            key = torch.cat([prefix_key.to(key), key], dim=2)
            value = torch.cat([prefix_value.to(value), value], dim=2)
            if attention_mask is not None:
                visible = True if attention_mask.dtype == torch.bool else 0.0
                attention_mask = F.pad(attention_mask, (prefix_key.shape[2], 0), value=visible)
        return compute(module, query, key, value, attention_mask, **options)

    return attention
