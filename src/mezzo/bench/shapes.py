"""Shapes of well-known models, filled with random weights where they will run: nothing is downloaded."""

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
    """An architecture by its sizes. `still` is one small tensor: an engine that trains only that is a bare forward."""

    family: Family
    config: dict[str, Any]
    still: str


def _roberta(hidden: int, layers: int, heads: int, vocabulary: int = 50265) -> Shape:
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
    }
    return Shape("masked", sizes, "roberta.embeddings.LayerNorm.bias")


def _llama(hidden: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int, tie: bool) -> Shape:
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tie,
        "pad_token_id": 1,
    }
    return Shape("causal", sizes, "model.norm.weight")


SHAPES = {
    "roberta-mini": _roberta(256, 6, 4, vocabulary=8000),
    "roberta-base": _roberta(768, 12, 12),
    "roberta-large": _roberta(1024, 24, 16),
    "llama-mini": _llama(256, 6, 4, 4, 704, 8000, tie=True),
    "llama-1b": _llama(2048, 16, 32, 8, 8192, 128256, tie=True),
    "llama-7b": _llama(4096, 32, 32, 32, 11008, 32000, tie=False),
}


def shape_of(name: str) -> Shape:
    """A shape by the name of a model that has it."""
    found = SHAPES.get(name.removeprefix("mezzo/"))
    if found is None:
        raise ConfigError(f"unknown model shape {name!r}{nearest(name, SHAPES)} (shapes: {', '.join(SHAPES)})")
    return found


def room(shape: Shape) -> int:
    """Tokens of a row that the model has positions for. RoBERTa's begin behind its padding id."""
    return int(shape.config["max_position_embeddings"]) - (2 if shape.family == "masked" else 0)


def random_model(shape: Shape, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with random weights, made on the device in its own dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaForMaskedLM

    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            if shape.family == "masked":
                model: nn.Module = RobertaForMaskedLM(RobertaConfig(**shape.config))
            else:
                model = LlamaForCausalLM(LlamaConfig(**shape.config))
    finally:
        torch.set_default_dtype(kept)
    return model.eval()


def random_batch(shape: Shape, count: int, length: int, spread: float) -> Batch:
    """Prompts of about `length` tokens; the readout looks near the end, as prompts with a mask do."""
    rng = np.random.default_rng(0)
    low, high = max(4, round(length * (1 - spread))), round(length * (1 + spread))
    prompts = []
    for _ in range(count):
        size = int(rng.integers(low, high + 1))
        ids = tuple(int(token) for token in rng.integers(10, shape.config["vocab_size"], size=size))
        place = size - 3 if shape.family == "masked" else size - 1
        prompts.append(Prompt(ids, label=int(rng.integers(2)), position=place))
    return Batch(tuple(prompts), Readout("words", words=(11, 47)))
