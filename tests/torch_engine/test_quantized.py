"""LoRA and prefix on a base in 8 or 4 bits: scores equal plain forwards of the quantised model, whose weights do not change."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

from mezzo import api
from mezzo.cli import main
from mezzo.engines.torch import quantized
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.loading import load_model
from mezzo.errors import ConfigError, SpaceError
from mezzo.method.space import Space
from mezzo.types import MicroBatch, Probe
from tests.conftest import make_batch, train_tokenizer

KINDS = ("8bit", "4bit")
PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Wide enough for the blocks of 64 values that share a scale."""
    folder, tokenizer = tmp_path_factory.mktemp("wide-roberta"), train_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = RobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, **sizes
    )
    RobertaForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def packed(folder: str, kind: str) -> Any:
    return load_model(folder, "masked", quantize=quantized.loading_options(kind, torch.device("cpu")))


@pytest.mark.parametrize("space", [Space("lora", rank=4), Space("prefix"), Space("lora", layers="1:")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_those_of_single_examples(kind, space, folder):
    engine = TorchEngine(packed(folder, kind), space, micro_batch=MicroBatch(4), pad_id=1, cache_mb=1)
    rng = np.random.default_rng(0)
    engine.load_state({n: (v + rng.normal(0, 0.1, v.shape)).astype(np.float32) for n, v in engine.state().items()})
    assert {p.dtype for p in engine.model.parameters() if p.ndim == 2} & {torch.int8, torch.uint8}
    before = {name: value.clone() for name, value in engine.model.named_parameters()}
    batch = make_batch(7)
    engine.check(batch, 1e-2)
    together = engine.score(batch, PAIR)
    alone = TorchEngine(packed(folder, kind), space, micro_batch=MicroBatch(1, members=1), pad_id=1)
    alone.load_state(engine.state())
    np.testing.assert_allclose(together, alone.score(batch, PAIR), rtol=1e-4, atol=1e-4)
    assert (together[0] != together[1]).any(axis=-1).all(), "the probes move every example"
    assert all(torch.equal(value, before[name]) for name, value in engine.model.named_parameters())


@pytest.mark.parametrize("space", [Space("lora", rank=4), Space("prefix")], ids=str)
def test_4bit_scores_and_their_slopes_are_those_of_the_dequantised_model(space, folder):
    """Whatever the processor: activations that were rounded to bfloat16 would hide the effect of a probe."""
    engine, plain = (
        TorchEngine(model, space, micro_batch=MicroBatch(4), pad_id=1)
        for model in (packed(folder, "4bit"), packed(folder, "4bit").dequantize())
    )
    assert engine.quantized and not plain.quantized
    batch = make_batch(7)
    found, expected = (each.score(batch, PAIR) for each in (engine, plain))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    effect = expected[0] - expected[1]
    np.testing.assert_allclose(found[0] - found[1], effect, atol=0.05 * np.abs(effect).max())


def test_4bit_lora_of_the_bundled_model_passes_the_check(tiny_data, tmp_path):
    files = {"task": "sst-2", "train": tiny_data, "dev": tiny_data, "threads": 1, "device": "cpu"}
    run = api.finetune(space="lora", quantize="4bit", **files, steps=1, batch_size=4, out=str(tmp_path / "run"))
    assert run.steps == 1


@pytest.mark.parametrize("kind", KINDS)
def test_run_is_verified_and_its_adapter_loads_on_the_quantised_model(kind, folder, tiny_data, tmp_path):
    options = {"steps": 6, "batch_size": 4, "eval_every": 3, "threads": 1, "device": "cpu", "eps": 1e-2, "lr": 1e-2}
    files = {"task": "sst-2", "train": tiny_data, "dev": tiny_data}
    run = api.finetune(folder, space="lora", quantize=kind, **files, **options, out=str(tmp_path / "run"))
    assert api.verify(run.out).ok
    assert api.finetune(resume=run.out, steps=8).steps == 8
    with pytest.raises(ConfigError, match="export the adapter instead"):
        api.export(run.out, "model", tmp_path / "model")
    engine, _ = api.open_run(run.out, at=8)
    adapter = api.export(run.out, "adapter", tmp_path / "adapter", at=8)
    how = quantized.loading_options(kind, torch.device("cpu"))
    model = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32, **how), adapter)
    batch = make_batch(4, words=(7, 9))
    expected = engine.score(batch, [Probe()])[0]
    for row, prompt in enumerate(batch.prompts):
        logits = model(input_ids=torch.tensor([prompt.ids])).logits[0, prompt.position, [7, 9]]
        np.testing.assert_allclose(logits.detach(), expected[row], rtol=1e-3, atol=1e-3)
    assert api.evaluate(model=folder, quantize=kind, task="sst-2", data=tiny_data).n == 16


def test_digest_depends_on_the_number_of_bits(folder):
    found = {kind: quantized.checkpoint_digest(folder, kind) for kind in KINDS}
    assert found["8bit"] != found["4bit"]
    assert quantized.checkpoint_digest(folder, "8bit") == found["8bit"]


def test_impossible_options_are_refused_in_one_line(folder, tiny_data, tmp_path, capsys, monkeypatch):
    def say(*more: str) -> str:
        arguments = ["--model", folder, "--task", "sst-2", "--train", tiny_data, "--out", str(tmp_path / "run")]
        assert main(["train", *arguments, *more]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert not Path(tmp_path / "run").exists()
        return said

    assert "with --quantize: it goes with --space lora or prefix" in say("--quantize", "8bit", "--space", "full")
    assert "quantize is one of 8bit, 4bit" in say("--quantize", "3bit", "--space", "lora")
    assert "belongs to the torch engine" in say("--quantize", "4bit", "--engine", "sglang", "--space", "lora")
    with pytest.raises(SpaceError, match="stays as it is"):
        TorchEngine(packed(folder, "8bit"), Space("full"))
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "bitsandbytes":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install bitsandbytes accelerate" in say("--quantize", "8bit", "--space", "lora")
