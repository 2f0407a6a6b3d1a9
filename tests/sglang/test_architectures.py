"""Every causal architecture that SGLang is used with: a tiny random one scores there, with adapters, as on the torch engine.

Starting SGLang takes half a minute for each. Those that differ most run always, all of them with MEZZO_ALL_ARCHITECTURES=1.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.inprocess import launch
from mezzo.engines.sglang.model_facts import SAMPLE_TOKENS, read_model_facts
from mezzo.engines.sglang.support import ARCHITECTURES
from mezzo.errors import ModelError
from mezzo.method.space import Space
from tests.sglang.conftest import PAIR, candidates_batch, distance, open_both_engines, words_batch

# Without grouped heads in its configuration; with another name for its activation function.
ALWAYS = ("opt", "gemma2")
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
GROUPED = {**SHAPE, "intermediate_size": 128, "num_key_value_heads": 2}
HEADS = {"head_dim": 16, "query_pre_attn_scalar": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "granite", "olmo2", "stablelm"), GROUPED),
    **{key: {**GROUPED, "sliding_window": None} for key in ("mistral", "starcoder2")},
    **{key: {**GROUPED, **HEADS} for key in ("gemma2", "gemma3_text")},
    **{key: {**GROUPED, "head_dim": 16} for key in ("gemma", "qwen3")},
    "mixtral": {**GROUPED, "num_local_experts": 2},
    "phi": {**SHAPE, "intermediate_size": 128},
    "opt": {**SHAPE, "ffn_dim": 128, "word_embed_proj_dim": 64},
}


def save_tiny(model_type: str, folder: Any, **settings: Any) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return str(folder)


def test_each_architecture_has_a_tiny_model():
    assert set(CONFIGS) == set(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize(
    "model_type", [name for name in ARCHITECTURES if name != "llama"]
)  # all other files use a Llama
def test_scores_are_those_of_the_torch_engine(model_type, tmp_path):
    if model_type not in ALWAYS and not os.environ.get("MEZZO_ALL_ARCHITECTURES"):
        pytest.skip("runs with MEZZO_ALL_ARCHITECTURES=1")
    model = save_tiny(model_type, tmp_path / model_type, **CONFIGS[model_type])
    spec = EngineSpec(model, "causal", Space("lora", rank=2), rows=8, seed=3, threads=1)
    for ours, reference in open_both_engines(spec):
        for batch in (words_batch(6), candidates_batch()):
            assert distance(ours.score(batch, PAIR), reference.score(batch, PAIR)) < 2e-4
        assert ours.digest() == reference.digest()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_16_bit_checkpoint_is_compared_in_float32(model_type, tmp_path):
    """A client of servers reads it as it is stored; each module computes in float32."""
    from transformers import AutoModelForCausalLM

    folder = save_tiny(model_type, tmp_path, **CONFIGS[model_type])
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    facts = read_model_facts(EngineSpec(str(tmp_path), "causal", Space("lora"), rows=4, urls=("http://127.0.0.1:1",)))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([SAMPLE_TOKENS])).logits[0, -1]
    expected = logits.log_softmax(-1)[list(SAMPLE_TOKENS)]
    torch.testing.assert_close(torch.tensor(facts.sample_logprobs), expected, rtol=1e-5, atol=1e-5)


def test_sglang_is_told_what_a_configuration_does_not_state(tmp_path):
    for model_type, expected in (
        ("opt", '{"num_key_value_heads": 4}'),
        ("gemma2", '{"hidden_act": "gelu_pytorch_tanh"}'),
    ):
        model = save_tiny(model_type, tmp_path / model_type, **CONFIGS[model_type])
        arguments = launch.engine_arguments(EngineSpec(model, "causal", Space("lora"), rows=4), None, cpu=True)
        assert arguments["json_model_override_args"] == expected
    model = save_tiny("llama", tmp_path / "llama", **CONFIGS["llama"])
    spec = EngineSpec(model, "causal", Space("lora"), rows=4)
    assert "json_model_override_args" not in launch.engine_arguments(spec, None, cpu=True)


def test_other_architectures_are_refused_before_anything_starts(tmp_path):
    model = save_tiny("gpt2", tmp_path / "gpt2", vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    with pytest.raises(ModelError, match=r"'gpt2' models are not tested on SGLang with adapters: use --engine torch"):
        read_model_facts(EngineSpec(model, "causal", Space("lora"), rows=4))
