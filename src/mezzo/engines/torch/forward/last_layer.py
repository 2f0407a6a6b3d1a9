"""The last layer at the readout only: its keys and values come from every position, its queries and everything after them
only from the positions that are read.

Exact, because after the last layer no position attends to another. Only for layers whose arithmetic is written out here or
is known to work position by position; any other model computes its whole last layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mezzo.engines.architectures import ATTENTION_FUNCTIONS, Part, part_of
from mezzo.engines.torch.forward.inputs import select_positions
from mezzo.engines.torch.forward.modules import Forward
from mezzo.engines.torch.forward.population import Population


def find_last_layer(model: nn.Module) -> Any:
    """The last layer of the stack, if the model has one."""
    base = getattr(model, "base_model", model)
    stack = getattr(getattr(base, "encoder", base), "layer", None) or getattr(base, "layers", None)
    return stack[-1] if isinstance(stack, nn.ModuleList) and len(stack) else None


def trim_refusal(layer: nn.Module, config: Any) -> str:
    """Why a last layer is computed at every position; empty where it need not be."""
    part = part_of(layer)
    if part is not Part.DECODER_LAYER and (part is not Part.ENCODER_LAYER or config.is_decoder):
        return "its arithmetic is not known"
    if config._attn_implementation not in ATTENTION_FUNCTIONS:
        return f"its attention is {config._attn_implementation!r}"
    return ""


def trimmed_forward(layer: Any, population: Population, inner: Forward) -> Forward:
    """The layer's forward where positions are read, `inner` elsewhere."""
    compute = _decoder_layer if part_of(layer) is Part.DECODER_LAYER else _encoder_layer

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        positions = population.context.claim_positions() if population.context.trim_last_layer else None
        if positions is None:
            return inner(hidden_states, *args, **kwargs)
        return compute(layer, hidden_states, positions.to(hidden_states.device), *args, **kwargs)

    return forward


def readout_only(population: Population, inner: Forward) -> Forward:
    """A base model's forward whose last hidden states are those that the LM head will read, not whole sequences."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        if (positions := population.context.claim_positions()) is not None:
            output.last_hidden_state = select_positions(output.last_hidden_state, positions)
        return output

    return forward


def _encoder_layer(
    layer: Any, hidden: Tensor, positions: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any
) -> Any:
    attention, size = layer.attention.self, layer.attention.self.attention_head_size
    query = split_heads(attention.query(select_positions(hidden, positions)), size)
    key, value = (split_heads(project(hidden), size) for project in (attention.key, attention.value))
    attended, _ = attend(attention, query, key, value, _select_mask_rows(attention_mask, positions))
    return layer.feed_forward_chunk(layer.attention.output(attended, select_positions(hidden, positions)))


def _decoder_layer(layer: Any, hidden: Tensor, positions: Tensor, **kwargs: Any) -> Any:
    attended = _decoder_attention(layer.self_attn, layer.input_layernorm(hidden), positions, **kwargs)
    hidden = select_positions(hidden, positions) + attended
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _decoder_attention(
    attention: Any,
    hidden: Tensor,
    positions: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Tensor:
    query = split_heads(project(attention, "q", select_positions(hidden, positions)), attention.head_dim)
    key = split_heads(project(attention, "k", hidden), attention.head_dim)
    value = split_heads(attention.v_proj(hidden), attention.head_dim)
    cos, sin = position_embeddings
    tables = (select_positions(table.expand(len(positions), -1, -1), positions) for table in (cos, sin))
    query = _rotate(attention, query, *tables)
    key = _rotate(attention, key, cos, sin)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, attention.layer_idx)
    mask = _select_mask_rows(attention_mask, positions)
    if mask is None and kwargs.get("is_causal") is not False:
        mask = (torch.arange(key.shape[2], device=positions.device) <= positions[:, :, None])[:, None]
    return attention.o_proj(attend(attention, query, key, value, mask, **kwargs)[0])


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """[rows, L, heads·size] by the model's own attention function, which may take more arguments (`is_causal`)."""
    eager = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    output, weights = interface(module, query, key, value, mask, dropout=0.0, scaling=module.scaling, **kwargs)
    return output.flatten(2), weights


def split_heads(projected: Tensor, size: int) -> Tensor:
    """[rows, L, heads·size] → [rows, heads, L, size]."""
    return projected.view(*projected.shape[:-1], -1, size).transpose(1, 2)


def project(attention: Any, name: str, hidden: Tensor) -> Tensor:
    """Query or key before its rotary positions, [rows, L, heads·size]; some models norm each head."""
    projected = getattr(attention, f"{name}_proj")(hidden)
    norm = getattr(attention, f"{name}_norm", None)
    if norm is None:
        return projected  # type: ignore[no-any-return]
    return norm(projected.view(*projected.shape[:-1], -1, attention.head_dim)).view(projected.shape)  # type: ignore[no-any-return]


def _rotate(attention: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of query or key."""
    rotate_half = sys.modules[type(attention).__module__].rotate_half  # type: ignore[attr-defined]
    return heads * cos[:, None] + rotate_half(heads) * sin[:, None]


def _select_mask_rows(mask: Tensor | None, positions: Tensor) -> Tensor | None:
    """The rows of the mask for the queries that are left: [rows, 1, L, L] → [rows, 1, k, L]."""
    if mask is None or mask.shape[2] == 1:
        return mask
    index = positions[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
    return mask.expand(len(positions), -1, -1, -1).gather(2, index)
