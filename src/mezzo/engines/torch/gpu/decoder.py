"""Llama-like layers with one kernel for what plain torch does in many: rotary positions of query and key, and the gate.

Products, attention and everything that members differ in stay where they are, so these hold at any point.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mezzo.engines.architectures import ATTENTION_FUNCTIONS, SILU, Part, part_of
from mezzo.engines.torch.forward.choice import Choice
from mezzo.engines.torch.forward.last_layer import attend, project, split_heads
from mezzo.engines.torch.forward.modules import Forward
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.gpu.kernels import decoder


def choose(module: Any, population: Population) -> Choice | None:
    """Kernels for attention with rotary positions and for gated MLPs."""
    match part_of(module):
        case Part.ROTARY_ATTENTION:
            if (function := module.config._attn_implementation) not in ATTENTION_FUNCTIONS:
                return Choice("rotary kernel", reason=f"its attention is {function!r}")
            return Choice("rotary kernel", lambda inner: _attention(module, inner, population))
        case Part.GATED_MLP:
            if type(module.act_fn).__name__ not in SILU:
                return Choice("gate kernel", reason=f"its activation is {type(module.act_fn).__name__}")
            return Choice("gate kernel", lambda inner: _gated_mlp(module, inner, population))
    return None


def _attention(module: Any, inner: Forward, population: Population) -> Forward:
    size = module.head_dim

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        cos, sin = position_embeddings
        if not population.members or hidden_states.dtype != population.compute or cos.shape[2] != size:
            return inner(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        query, key = (project(module, name, hidden_states).contiguous() for name in "qk")
        value = split_heads(module.v_proj(hidden_states), size)
        decoder.rotate(query, key, cos.contiguous(), sin.contiguous())  # in place
        query, key = split_heads(query, size), split_heads(key, size)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, module.layer_idx)
        output, weights = attend(module, query, key, value, attention_mask, **kwargs)
        return module.o_proj(output), weights

    return forward


def _gated_mlp(module: Any, inner: Forward, population: Population) -> Forward:
    def forward(x: Tensor) -> Any:
        if not population.members or x.dtype != population.compute:
            return inner(x)
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(decoder.gate(gate.contiguous(), up.contiguous()))

    return forward
