"""Shapes of well-known models, filled with random weights on the device: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mezzo.errors import ConfigError, nearest
from mezzo.types import Batch, Family, Prompt, Readout


@dataclass(frozen=True, slots=True)
class Shape:
    """An architecture by its sizes. `small_tensor` names one: an engine that trains only that does a bare forward."""

    family: Family
    config: dict[str, Any]
    small_tensor: str


def roberta_shape(hidden: int, layers: int, heads: int, vocabulary: int = 50265) -> Shape:
    sizes = _sizes(hidden, layers, heads, vocabulary, inner=4 * hidden, positions=514)
    return Shape("masked", {**sizes, "type_vocab_size": 1}, "roberta.embeddings.LayerNorm.bias")


def llama_shape(hidden: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int, tie: bool) -> Shape:
    sizes = _sizes(hidden, layers, heads, vocabulary, inner, positions=4096)
    others = {"num_key_value_heads": groups, "tie_word_embeddings": tie, "pad_token_id": 1}
    return Shape("causal", {**sizes, **others}, "model.norm.weight")


def _sizes(hidden: int, layers: int, heads: int, vocabulary: int, inner: int, positions: int) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "max_position_embeddings": positions,
    }


SHAPES = {
    "roberta-mini": roberta_shape(256, 6, 4, vocabulary=8000),
    "roberta-base": roberta_shape(768, 12, 12),
    "roberta-large": roberta_shape(1024, 24, 16),
    "llama-mini": llama_shape(256, 6, 4, 4, 704, 8000, tie=True),
    "llama-1b": llama_shape(2048, 16, 32, 8, 8192, 128256, tie=True),
    "llama-7b": llama_shape(4096, 32, 32, 32, 11008, 32000, tie=False),
}


def find_shape(name: str) -> Shape:
    """A shape by the name of a model that has it."""
    shape = SHAPES.get(name.removeprefix("mezzo/"))
    if shape is None:
        raise ConfigError(f"unknown model shape {name!r}{nearest(name, SHAPES)} (shapes: {', '.join(SHAPES)})")
    return shape


def max_tokens(shape: Shape) -> int:
    """The longest input, by the model's positions. RoBERTa's begin after its padding id."""
    return int(shape.config["max_position_embeddings"]) - (2 if shape.family == "masked" else 0)


def random_model(shape: Shape, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with random weights, created on the device in its own dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaForMaskedLM

    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            if shape.family == "masked":
                model: nn.Module = RobertaForMaskedLM(RobertaConfig(**shape.config))
            else:
                model = LlamaForCausalLM(LlamaConfig(**shape.config))
    finally:
        torch.set_default_dtype(default_dtype)
    return model.eval()


def random_batch(shape: Shape, count: int, length: int, spread: float) -> Batch:
    """Prompts of about `length` tokens; the readout position is near the end, like the mask in real prompts."""
    rng = np.random.default_rng(0)
    low, high = max(4, round(length * (1 - spread))), round(length * (1 + spread))
    prompts = []
    for _ in range(count):
        size = int(rng.integers(low, high + 1))
        ids = tuple(int(token) for token in rng.integers(10, shape.config["vocab_size"], size=size))
        position = size - 3 if shape.family == "masked" else size - 1
        prompts.append(Prompt(ids, label=int(rng.integers(2)), position=position))
    return Batch(tuple(prompts), Readout("words", words=(11, 47)))
