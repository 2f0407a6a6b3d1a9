"""Runs with 16-bit weights are verified, resumed, replayed and exported like float32 runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mezzo
from mezzo import api
from mezzo.errors import ConfigError, JournalError
from mezzo.journal.content import read
from mezzo.method import rounding
from mezzo.runs import defaults

SPACES = {"full": {"space": "full"}, "matrices": {"space": "matrices", "noise": "gaussian"}, "lora": {"space": "lora"}}


@pytest.fixture
def options(tiny_folder: str, tiny_data: str) -> dict[str, Any]:
    method = {"steps": 12, "batch_size": 4, "eval_every": 6, "lr": 1e-3, "eps": 1e-2, "weight_decay": 0.1, "samples": 2}
    data = {"model": tiny_folder, "task": "sst-2", "train": tiny_data, "dev": tiny_data}
    return {**data, **method, "threads": 1, "device": "cpu", "snapshot_minutes": 0.0}


@pytest.mark.parametrize("dtype", rounding.DTYPES)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_resume_and_replay_give_the_digest_of_the_run(options, tmp_path, space, dtype):
    run = api.finetune(**options, **space, dtype=dtype, out=str(tmp_path / "r"))
    header = read(tmp_path / "r").header
    assert (header.dtype, header.rounding) == (dtype, rounding.VERSION)
    assert (
        api.finetune(**{**options, "steps": 5}, **space, dtype=dtype, out=str(tmp_path / "short")).digest != run.digest
    )
    assert api.finetune(resume=str(tmp_path / "short"), steps=12, threads=1).digest == run.digest
    shutil.rmtree(tmp_path / "r" / "snapshots")
    verified = api.verify(tmp_path / "r")
    assert verified.ok
    assert verified.digest == run.digest
    api.export(tmp_path / "r", "journal", tmp_path / "c.mezzo")
    from_compact, _ = api.open_run(tmp_path / "c.mezzo", at=5)
    from_folder, _ = api.open_run(tmp_path / "short", at=5)
    assert from_compact.digest() == from_folder.digest()


@pytest.mark.parametrize("dtype", rounding.DTYPES)
def test_exports_load_elsewhere(options, tmp_path, dtype):
    from peft import PeftModel
    from transformers import AutoModelForMaskedLM

    api.finetune(**options, space="full", dtype=dtype, out=str(tmp_path / "full"))
    engine, _ = api.open_run(tmp_path / "full", at=12)
    api.export(tmp_path / "full", "model", tmp_path / "model", at=12)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)
    weights = dict(loaded.named_parameters())
    for name, value in engine.state().items():
        np.testing.assert_array_equal(weights[name].detach().float().numpy(), value)

    api.finetune(**options, space="lora", dtype=dtype, out=str(tmp_path / "lora"))
    engine, _ = api.open_run(tmp_path / "lora", at=12)
    api.export(tmp_path / "lora", "adapter", tmp_path / "adapter", at=12)
    base = AutoModelForMaskedLM.from_pretrained(options["model"], dtype=getattr(torch, dtype))
    adapted = dict(PeftModel.from_pretrained(base, str(tmp_path / "adapter")).named_parameters())
    for name, value in engine.state().items():
        peft_name = name.replace("lora_A", "lora_A.default").replace("lora_B", "lora_B.default")
        parameter = adapted[f"base_model.model.{peft_name}"]
        assert parameter.dtype == torch.float32
        np.testing.assert_array_equal(parameter.detach().numpy(), value)


@pytest.mark.parametrize(("dtype", "noise"), defaults.NOISE.items())
def test_default_noise_depends_on_the_dtype(options, tmp_path, dtype, noise):
    api.finetune(**{**options, "steps": 1}, space="full", dtype=dtype, out=str(tmp_path / "r"))
    header = read(tmp_path / "r").header
    assert header.config["noise"] == noise
    assert any(t.rank for t in header.tensors) == (noise == "lowrank")


def test_unknown_or_different_dtype_is_refused(options, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        mezzo.finetune(**options, dtype="bfloat", out=str(tmp_path / "r"))
    api.finetune(**options, dtype="bfloat16", out=str(tmp_path / "r"))
    with pytest.raises(ConfigError, match="dtype belongs to the run"):
        api.open_run(tmp_path / "r", dtype="float16")
    content = read(tmp_path / "r")
    config = {**content.header.config, "dtype": "float16"}  # loads the base model with other bits than the journal's
    content = replace(content, header=replace(content.header, config=config))
    with pytest.raises(JournalError, match="the base model has changed"):
        api.open_base_engine(content)
