"""What is known about model architectures, in one place: add a row here to give an architecture its fast path.

Nothing here imports torch: classes and settings are known by the names that transformers gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Part(Enum):
    """A module whose arithmetic is written out in this package."""

    ENCODER_LAYER = "encoder layer"
    """Has the submodules of `ENCODER_LINEARS` and `ENCODER_NORMS`."""
    DECODER_LAYER = "decoder layer"
    """Has `input_layernorm`, `self_attn`, `post_attention_layernorm` and `mlp`, each with a residual around its pair."""
    ROTARY_ATTENTION = "rotary attention"
    """Has `q_proj`, `k_proj`, `v_proj`, `o_proj`, rotary positions, and perhaps norms of each query and key head."""
    GATED_MLP = "gated MLP"
    """down_proj(act_fn(gate_proj(x)) · up_proj(x))."""
    RMS_NORM = "RMS norm"
    """weight · x / rms(x), with `variance_epsilon`."""
    FIRST_TOKEN_CLASSIFIER = "first-token classifier"
    """A model whose classification head reads the first position only."""


def _bert_like(name: str) -> dict[str, Part]:
    return {f"{name}Layer": Part.ENCODER_LAYER, f"{name}ForSequenceClassification": Part.FIRST_TOKEN_CLASSIFIER}


def _llama_like(name: str) -> dict[str, Part]:
    return {
        f"{name}DecoderLayer": Part.DECODER_LAYER,
        f"{name}Attention": Part.ROTARY_ATTENTION,
        f"{name}MLP": Part.GATED_MLP,
        f"{name}RMSNorm": Part.RMS_NORM,
    }


# Model type → names of its classes → what they are.
ARCHITECTURES: Mapping[str, Mapping[str, Part]] = {
    "bert": _bert_like("Bert"),
    "roberta": _bert_like("Roberta"),
    "xlm-roberta": _bert_like("XLMRoberta"),
    "electra": _bert_like("Electra"),
    "llama": _llama_like("Llama"),
    "mistral": _llama_like("Mistral"),
    "qwen2": _llama_like("Qwen2"),
    "qwen3": _llama_like("Qwen3"),
}
PARTS = {name: part for classes in ARCHITECTURES.values() for name, part in classes.items()}

# The linear layers of an encoder layer in the order they run; those of a group read the same input.
ENCODER_LINEARS = (
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    ("attention.output.dense",),
    ("intermediate.dense",),
    ("output.dense",),
)
ENCODER_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")
# Classes of the activation function x·sigmoid(x).
SILU = ("SiLU", "SiLUActivation")
# Attention implementations that take any number of queries and a mask for each of them.
ATTENTION_FUNCTIONS = ("sdpa", "eager")
# Linear layers that read the output of their siblings, never the input that those share, even where both are equally
# wide.
OUTPUT_LINEARS = ("o_proj", "out_proj", "down_proj", "fc2", "dense", "dense_4h_to_h")

WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "keep_window_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Parts of the model types that count positions from the one after their padding id.
POSITIONS_AFTER_PADDING = ("roberta", "camembert", "longformer", "mpnet")


def part_of(module: object) -> Part | None:
    """What a module is, if its class is one of transformers' own: other code may use the same names for something else."""
    kind = type(module)
    return PARTS.get(kind.__name__) if kind.__module__.startswith("transformers.") else None


def attention_windows(config: Any) -> list[int]:
    """How many tokens back the layers attend, for those that are limited."""
    return [size for name in WINDOWS if isinstance(size := getattr(config, name, None), int) and size]


def has_experts(config: Any) -> bool:
    """True for a mixture of experts."""
    return any(getattr(config, name, None) for name in EXPERTS)


def layer_count(config: Any) -> int:
    """The number of layers that a configuration states; 0 if it states none."""
    return max((value for name in DEPTHS if isinstance(value := getattr(config, name, 0), int)), default=0)


def positions_follow_padding(config: Any) -> bool:
    """True where the first position is not 0 but the padding id plus one."""
    return any(name in config.model_type for name in POSITIONS_AFTER_PADDING)
