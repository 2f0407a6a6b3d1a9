"""Every architecture that SGLang is used with: a tiny random one scores there, with adapters, as on the torch engine.

Starting SGLang takes half a minute for each. Those that differ most run always, all of them with MEZZO_ALL_ARCHITECTURES=1;
the table in docs/sglang.md is made of the same models by scripts/sglang_architectures.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.inprocess import launch
from mezzo.engines.sglang.model_facts import SAMPLE_TOKENS, read_model_facts
from mezzo.engines.sglang.support import ARCHITECTURES, ENCODERS
from mezzo.errors import ModelError
from mezzo.method.space import Space
from tests.sglang.tiny_models import CAUSAL, MASKED, SPACES, save_tiny, score_difference
from tests.test_docs import import_script

PAGE = Path(__file__).parents[2] / "docs" / "sglang.md"
# Without grouped heads in its configuration; with another name for its activation function.
ALWAYS = ("opt", "gemma2")


def test_each_architecture_has_a_tiny_model():
    assert set(CAUSAL) == set(ARCHITECTURES) and set(MASKED) == set(ENCODERS)


def test_table_in_the_docs_has_every_architecture():
    """Made by the script, with a figure in every row that is not a refusal; those of LoRA are small for all."""
    script = import_script("sglang_architectures")
    rows = script.read_table(PAGE.read_text())
    assert list(rows) == script.expected_rows()
    for name in (*ARCHITECTURES, *ENCODERS):
        _, _, _, lora, matrices, _ = (cell.strip() for cell in rows[name].split("|"))
        assert float(lora) < 2e-4 and (matrices.startswith("refused: ") or float(matrices) < 2e-4)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize(
    "model_type", [name for name in (*ARCHITECTURES, *ENCODERS) if name != "llama"]
)  # all other files use a Llama
def test_scores_are_those_of_the_torch_engine(model_type, tmp_path):
    if model_type not in ALWAYS and not os.environ.get("MEZZO_ALL_ARCHITECTURES"):
        pytest.skip("runs with MEZZO_ALL_ARCHITECTURES=1")
    family = "causal" if model_type in CAUSAL else "masked"
    model = save_tiny(model_type, tmp_path / model_type, family, **(CAUSAL | MASKED)[model_type])
    assert score_difference(model, family, SPACES["lora"]) < 2e-4


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_16_bit_checkpoint_is_compared_in_float32(model_type, tmp_path):
    """A client of servers reads it as it is stored; each module computes in float32."""
    from transformers import AutoModelForCausalLM

    folder = save_tiny(model_type, tmp_path, **CAUSAL[model_type])
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
        model = save_tiny(model_type, tmp_path / model_type, **CAUSAL[model_type])
        arguments = launch.engine_arguments(EngineSpec(model, "causal", Space("lora"), rows=4), None, cpu=True)
        assert arguments["json_model_override_args"] == expected
    model = save_tiny("llama", tmp_path / "llama", **CAUSAL["llama"])
    spec = EngineSpec(model, "causal", Space("lora"), rows=4)
    assert "json_model_override_args" not in launch.engine_arguments(spec, None, cpu=True)


@pytest.mark.parametrize(
    ("model_type", "family", "settings"),
    [
        ("gpt2", "causal", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}),
        ("modernbert", "masked", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}),
        ("distilbert", "masked", {"dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2}),
    ],
)
def test_other_architectures_are_refused_before_anything_starts(model_type, family, settings, tmp_path):
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
    model = save_tiny(model_type, tmp_path, family, vocab_size=64, **special, **settings)
    message = f"{family} '{model_type}' models are not tested on SGLang with adapters: use --engine torch"
    with pytest.raises(ModelError, match=message):
        read_model_facts(EngineSpec(model, family, Space("lora"), rows=4))
