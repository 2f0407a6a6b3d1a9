"""The last layer at the readout only: its keys and values come from every position, its queries and all that follows only
from positions that are read.

Exact, because after the last layer no position looks at another one any more. Only for layers whose arithmetic is written
out here or is known to be position by position; any other model computes its last layer whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mezzo.engines.architectures import ATTENTION_FUNCTIONS, Part, part_of
from mezzo.engines.torch.forward.inputs import picked
from mezzo.engines.torch.forward.population import Population


def attach(model: nn.Module, population: Population, aside: Sequence[nn.Module] = ()) -> None:
    """Override the last layer where that is known to be exact, and it is not one of those that step aside."""
    config: Any = model.config
    layer = last_of(model)
    if layer is None or layer in aside or config._attn_implementation not in ATTENTION_FUNCTIONS:
        return
    if part_of(layer) is Part.ENCODER_LAYER and not config.is_decoder:
        _encoder(layer, population)
    if part_of(layer) is Part.DECODER_LAYER:
        _decoder(layer, population)


def last_of(model: nn.Module) -> Any:
    """The last layer of the stack, if the model has one."""
    trunk = getattr(model, "base_model", model)
    stack = getattr(getattr(trunk, "encoder", trunk), "layer", None) or getattr(trunk, "layers", None)
    return stack[-1] if isinstance(stack, nn.ModuleList) and len(stack) else None


def _encoder(layer: Any, population: Population) -> None:
    attention, residual, whole = layer.attention.self, layer.attention.output, layer.forward
    attend, add = attention.forward, residual.forward
    at: Tensor | None = None

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal at
        at = population.take_readout()
        try:
            return whole(hidden, *args, **kwargs)
        finally:
            at = None

    def narrow_attend(hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if at is None:
            return attend(hidden_states, attention_mask=attention_mask, **kwargs)
        query = heads_of(attention.query(picked(hidden_states, at)), attention.attention_head_size)
        key = heads_of(attention.key(hidden_states), attention.attention_head_size)
        value = heads_of(attention.value(hidden_states), attention.attention_head_size)
        return attended(attention, query, key, value, _mask_rows(attention_mask, at))

    def narrow_add(hidden_states: Tensor, input_tensor: Tensor) -> Any:
        return add(hidden_states, input_tensor if at is None else picked(input_tensor, at))

    layer.forward, attention.forward, residual.forward = forward, narrow_attend, narrow_add


def _decoder(layer: Any, population: Population) -> None:
    whole = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        at = population.take_readout()
        if at is None:
            return whole(hidden_states, *args, **kwargs)
        found = picked(hidden_states, at) + _causal(layer, layer.input_layernorm(hidden_states), at, **kwargs)
        return found + layer.mlp(layer.post_attention_layernorm(found))

    layer.forward = forward


def _causal(
    layer: Any,
    rows: Tensor,
    at: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Tensor:
    attention = layer.self_attn
    query = heads_of(projected(attention, "q", picked(rows, at)), attention.head_dim)
    key = heads_of(projected(attention, "k", rows), attention.head_dim)
    value = heads_of(attention.v_proj(rows), attention.head_dim)
    cos, sin = position_embeddings
    query = _turned(attention, query, _table_rows(cos, at), _table_rows(sin, at))
    key = _turned(attention, key, cos, sin)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, attention.layer_idx)
    mask = _mask_rows(attention_mask, at)
    if mask is None and kwargs.get("is_causal") is not False:
        mask = (torch.arange(key.shape[2], device=at.device) <= at[:, :, None])[:, None]
    return attention.o_proj(attended(attention, query, key, value, mask, **kwargs)[0])


def attended(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """[rows, L, heads·size] by the model's own attention function, which may be told more (`is_causal`)."""
    eager = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    found, weights = interface(module, query, key, value, mask, dropout=0.0, scaling=module.scaling, **kwargs)
    return found.flatten(2), weights


def heads_of(projected: Tensor, size: int) -> Tensor:
    """[rows, L, heads·size] → [rows, heads, L, size]."""
    return projected.view(*projected.shape[:-1], -1, size).transpose(1, 2)


def projected(attention: Any, name: str, hidden: Tensor) -> Tensor:
    """Query or key before its positions, [rows, L, heads·size]; some models norm each head."""
    found = getattr(attention, f"{name}_proj")(hidden)
    norm = getattr(attention, f"{name}_norm", None)
    return found if norm is None else norm(found.view(*found.shape[:-1], -1, attention.head_dim)).view(found.shape)


def _turned(attention: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of one of query and key."""
    half = sys.modules[type(attention).__module__].rotate_half  # type: ignore[attr-defined]
    return heads * cos[:, None] + half(heads) * sin[:, None]


def _table_rows(table: Tensor, at: Tensor) -> Tensor:
    """[1 or rows, L, n] at positions[rows, k] → [rows, k, n]."""
    return picked(table.expand(len(at), -1, -1), at)


def _mask_rows(mask: Tensor | None, at: Tensor) -> Tensor | None:
    """The mask's lines of the queries that are left: [rows, 1, L, L] → [rows, 1, k, L]."""
    if mask is None or mask.shape[2] == 1:
        return mask
    lines = at[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
    return mask.expand(len(at), -1, -1, -1).gather(2, lines)
