"""Llama-like layers with one kernel for what plain torch does in many: rotary positions of query and key, and the gate.

Products, attention and all that members differ in stay where they are; norms are in `blocks`. So this holds at any point.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from mezzo.engines.torch.catalog import known
from mezzo.engines.torch.forward.last_layer import IMPLEMENTATIONS, attended, heads_of, projected
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.gpu.kernels import decoder

ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
SILU = ("SiLU", "SiLUActivation")


def attach(model: nn.Module, population: Population) -> None:
    """Override the forward of every attention and every gated block that is known."""
    every: Iterable[Any] = model.modules()
    for module in every:
        if known(module, ATTENTIONS) and module.config._attn_implementation in IMPLEMENTATIONS:
            _attention(module, population)
        elif known(module, GATED) and type(module.act_fn).__name__ in SILU:
            _gated(module, population)


def _attention(module: Any, population: Population) -> None:
    plain, size = module.forward, module.head_dim

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        cos, sin = position_embeddings
        if not population.probes or hidden_states.dtype != population.compute or cos.shape[2] != size:
            return plain(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        query, key = (projected(module, name, hidden_states).contiguous() for name in "qk")
        value = heads_of(module.v_proj(hidden_states), size)
        decoder.rotate(query, key, cos.contiguous(), sin.contiguous())  # in what the projections left
        query, key = heads_of(query, size), heads_of(key, size)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, module.layer_idx)
        found, weights = attended(module, query, key, value, attention_mask, **kwargs)
        return module.o_proj(found), weights

    module.forward = forward


def _gated(module: Any, population: Population) -> None:
    plain = module.forward

    def forward(x: Tensor) -> Any:
        if not population.probes or x.dtype != population.compute:
            return plain(x)
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(decoder.gate(gate.contiguous(), up.contiguous()))

    module.forward = forward
