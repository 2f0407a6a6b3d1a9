"""Tiny random models of the architectures that SGLang is used with, and how far its scores are from the torch engine's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mezzo.engines.base import EngineSpec
from mezzo.method.space import Space
from mezzo.types import Batch, Family, Prompt, Readout
from tests.sglang.conftest import PAIR, candidates_batch, distance, open_both_engines, tokens, words_batch

SHAPE: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DENSE = {**SHAPE, "intermediate_size": 128}
GROUPED = {**DENSE, "num_key_value_heads": 2}
HEADS = {"head_dim": 16, "query_pre_attn_scalar": 16}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
CAUSAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "granite", "olmo2", "stablelm", "cohere"), GROUPED),
    **{key: {**GROUPED, "sliding_window": None} for key in ("mistral", "starcoder2")},
    **{key: {**GROUPED, **HEADS} for key in ("gemma2", "gemma3_text")},
    **{key: {**GROUPED, "head_dim": 16} for key in ("gemma", "qwen3", "cohere2", "glm4", "arcee", "ministral3")},
    **{key: {**GROUPED, "num_local_experts": 2} for key in ("mixtral", "granitemoe")},
    "olmoe": {**DENSE, **EXPERTS},
    "qwen3_moe": {**GROUPED, **EXPERTS, "head_dim": 16},
    **dict.fromkeys(("phi", "olmo"), DENSE),
    "opt": {**SHAPE, "ffn_dim": 128, "word_embed_proj_dim": 64},
}
MASKED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "bert"), DENSE),
}
SPACES = {"lora": Space("lora", rank=2), "matrices": Space("matrices", noise_rank=2)}


def save_tiny(model_type: str, folder: Any, family: Family = "causal", **settings: Any) -> str:
    """Save a random model whose weights are large enough to tell right scores from wrong ones."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    torch.manual_seed(0)
    kind = AutoModelForCausalLM if family == "causal" else AutoModelForMaskedLM
    model = kind.from_config(AutoConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return str(folder)


def masked_batch(vocabulary: bool = False) -> Batch:
    """Prompts of mixed lengths, read somewhere inside."""
    rng = np.random.default_rng(2)
    prompts = []
    for index in range(11):
        ids = tokens(rng, 4, 40)
        prompts.append(Prompt(ids, label=index % 2, position=int(rng.integers(len(ids)))))
    return Batch(tuple(prompts), Readout("words", words=(300, 900, 41), vocabulary=vocabulary))


def score_difference(model: str, family: Family, space: Space) -> float:
    """The largest difference between the scores of both signs on SGLang and on the torch engine, after the same updates."""
    spec = EngineSpec(model, family, space, rows=8, seed=3, threads=1)
    batches = (words_batch(6), candidates_batch()) if family == "causal" else (masked_batch(), masked_batch(True))
    for ours, reference in open_both_engines(spec):
        scores = [(ours.score(batch, PAIR), reference.score(batch, PAIR)) for batch in batches]
        assert ours.digest() == reference.digest()
    found = max(distance(*each) for each in scores)
    finite = np.isfinite(scores[0][0][0])
    assert np.abs(scores[0][0][0] - scores[0][0][1])[finite].max() > 100 * found  # the adapters' effect is seen
    return found
