"""Architectures that one forward cannot compute, saved as users have them: refused in one line, or trained in another space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mezzo import api
from mezzo.cli import main
from tests.conftest import scale_up_weights, train_tokenizer
from tests.torch_engine.test_families import DECODER, SMALL

T5 = {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 48, "pad_token_id": 1}
BART = {"d_model": 32, "max_position_embeddings": 64}
BART |= {f"{side}_{part}": size for side in ("encoder", "decoder") for part, size in (("layers", 2), ("ffn_dim", 48))}
BART |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
RELATIVE = {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
QWEN = {k: v for k, v in DECODER.items() if k != "head_dim"}
QWEN |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
    "deberta": ("DebertaForMaskedLM", RELATIVE),
    "deberta-v2": ("DebertaV2ForMaskedLM", {**RELATIVE, "position_buckets": 8}),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", QWEN),
}
PAIR, EXPERTS = "pair an encoder with a decoder", "experts cannot be trained: use --space lora"
HEAD, TARGETS = "use --space head, or another model", "cannot tell query and value apart"
INTERFACE = "cannot take a prefix; choose another --space"
REFUSED = [
    *[(name, space, PAIR) for name in ("t5", "bart") for space in ("full", "lora", "prefix")],
    *[(name, space, HEAD) for name in ("deberta", "deberta-v2") for space in ("full", "matrices")],
    *[(name, "lora", TARGETS) for name in ("deberta", "deberta-v2")],
    *[(name, "prefix", INTERFACE) for name in ("deberta", "deberta-v2")],
    *[(name, "full", EXPERTS) for name in ("mixtral", "qwen2-moe")],
]
WORKS = [
    *[(name, "head") for name in ("deberta", "deberta-v2")],
    *[(name, space) for name in ("mixtral", "qwen2-moe") for space in ("lora", "matrices", "prefix")],
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, root = train_tokenizer(), tmp_path_factory.mktemp("models")
    for name, (kind, options) in MODELS.items():
        torch.manual_seed(0)
        cls = getattr(transformers, kind)
        scale_up_weights(cls(cls.config_class(**{**options, "vocab_size": len(tokenizer)}))).save_pretrained(
            root / name
        )
        tokenizer.save_pretrained(root / name)
    return root


@pytest.mark.parametrize(("name", "space", "message"), REFUSED)
def test_unsupported_model_is_refused_in_one_line(name, space, message, saved, tiny_data, tmp_path, capfd):
    arguments = {"model": saved / name, "task": "sst-2", "train": tiny_data, "dev": tiny_data, "space": space}
    arguments |= {"steps": 2, "threads": 1, "device": "cpu", "eps": 1e-2, "out": tmp_path / "run"}
    capfd.readouterr()
    code = main(["train", "--json", *[part for key, value in arguments.items() for part in (f"--{key}", str(value))]])
    said = capfd.readouterr().err.strip()
    assert code == 2
    assert message in said
    assert said.startswith("mezzo: ")
    assert "\n" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "space"), WORKS)
def test_model_is_trained_in_other_spaces(name, space, saved, tiny_data, tmp_path):
    """The check before step 1 has compared it with plain forwards; the run must then be rebuilt to the bit."""
    run = api.finetune(
        str(saved / name), task="sst-2", train=tiny_data, dev=tiny_data, space=space, steps=4, batch_size=4, eval_every=4,
        eps=1e-2, threads=1, device="cpu", out=str(tmp_path / "run"),
    )  # fmt: skip
    assert run.steps == 4
    assert api.verify(run.out).ok
