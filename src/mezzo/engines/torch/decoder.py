"""Llama-like layers with one kernel for what plain torch does in many: rotary positions of query and key, and the gate.

Products, attention and all that members differ in stay where they are; norms are in `blocks`. So this holds at any point.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mezzo.engines.torch import decoder_kernels
from mezzo.engines.torch.last_layer import IMPLEMENTATIONS, attended, heads_of, normed
from mezzo.engines.torch.population import Population

ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
SILU = ("SiLU", "SiLUActivation")


def attach(model: nn.Module, population: Population) -> None:
    """Override the forward of every attention and every gated block that is known."""
    config: Any = model.config
    for module in model.modules():
        kind = type(module).__name__
        if kind in ATTENTIONS and config._attn_implementation in IMPLEMENTATIONS:
            _attention(module, population)
        elif kind in GATED and type(module.act_fn).__name__ in SILU:
            _gated(module, population)


def _attention(module: Any, population: Population) -> None:
    plain = module.forward

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        cos, sin = position_embeddings
        if not population.probes or hidden_states.dtype != population.compute or cos.shape[2] != module.head_dim:
            return plain(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        query = _projected(module, "q", hidden_states)
        key = _projected(module, "k", hidden_states)
        value = heads_of(module.v_proj(hidden_states), module.head_dim)
        decoder_kernels.turn(query, key, cos.contiguous(), sin.contiguous())
        query, key = heads_of(query, module.head_dim), heads_of(key, module.head_dim)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, module.layer_idx)
        found, weights = attended(module, query, key, value, attention_mask)
        return module.o_proj(found), weights

    module.forward = forward


def _projected(module: Any, name: str, hidden: Tensor) -> Tensor:
    """Query or key before its positions, [rows, L, heads·n], in memory of its own."""
    found = getattr(module, f"{name}_proj")(hidden)
    found = normed(module, f"{name}_norm", found.view(*found.shape[:-1], -1, module.head_dim))
    return found.reshape(*hidden.shape[:-1], -1).contiguous()


def _gated(module: Any, population: Population) -> None:
    plain = module.forward

    def forward(x: Tensor) -> Any:
        if not population.probes or x.dtype != population.compute:
            return plain(x)
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(decoder_kernels.gate(gate.contiguous(), up.contiguous()))

    module.forward = forward
