"""Weights that a checkpoint lacks: a fresh head is the same every time, anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mezzo import api
from mezzo.engines.hf_hub import load_tokenizer
from mezzo.engines.torch.loading import load_model
from mezzo.errors import ModelError, TaskError
from mezzo.runs.resolve import resolve_setup
from tests.conftest import scale_up_weights, train_tokenizer
from tests.torch_engine.test_families import FAMILIES, GPT2, make

IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])


def saved(family: str, folder: Path, base: bool = False) -> str:
    model: Any = make(*FAMILIES[family])
    (model.base_model if base else model).save_pretrained(folder)
    return str(folder)


def with_head(folder: str, seed: int = 3) -> Any:
    return load_model(folder, "masked", classes=2, seed=seed)


@pytest.mark.parametrize(
    ("family", "pooler"), {"bert": "bert.pooler.dense.weight", "albert": "albert.pooler.weight"}.items()
)
def test_fresh_pooler_and_head_depend_on_the_seed_alone(family, pooler, tmp_path):
    folder = saved(family, tmp_path)
    torch.manual_seed(1)
    first = with_head(folder)
    torch.manual_seed(2)
    again, other = with_head(folder), with_head(folder, seed=4)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    for name in (pooler, "classifier.weight"):
        assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
        assert 0.01 < float(first.get_parameter(name).std()) < 0.03
    logits = first(input_ids=IDS).logits
    assert torch.equal(logits, again(input_ids=IDS).logits)
    assert logits.abs().max() > 1e-3


def test_missing_weights_of_the_base_model_are_refused(tmp_path):
    """Only the pooler may be missing below the head."""
    model: Any = make(*FAMILIES["bert"])
    kept = {name: value for name, value in model.state_dict().items() if "layer.1.output.dense" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(
        ModelError,
        match=r"lacks weights .*\(bert.encoder.layer.1.output.dense.bias.*; use a checkpoint that holds the whole model$",
    ):
        with_head(str(tmp_path))


@pytest.mark.parametrize("family", ["modernbert", "bert", "distilbert", "electra"])
def test_fresh_vectors_are_initialised_as_transformers_does(family, tmp_path):
    """Gains of norms are one, everything else is zero; gains of zero would make every score zero."""
    folder = saved(family, tmp_path, base=True)
    ours = with_head(folder)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    vectors = {name: value for name, value in ours.named_parameters() if value.ndim < 2}
    assert vectors
    for name, value in vectors.items():
        assert torch.equal(value, theirs.get_parameter(name)), name
    if family == "modernbert":
        assert torch.equal(vectors["head.norm.weight"], torch.ones(32))
    assert ours(input_ids=IDS).logits.abs().max() > 1e-3


CLASSIFIER = {"classifier.weight", "classifier.bias"}
TRAINED = {
    "bert": CLASSIFIER | {"bert.pooler.dense.weight", "bert.pooler.dense.bias"},
    "albert": CLASSIFIER | {"albert.pooler.weight", "albert.pooler.bias"},
    "modernbert": CLASSIFIER | {"head.dense.weight", "head.norm.weight"},
}


@pytest.mark.parametrize("family", TRAINED)
def test_fresh_head_is_trained_and_rebuilt(family, tiny_data, tmp_path):
    tokenizer, (kind, options) = train_tokenizer(), FAMILIES[family]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model = scale_up_weights(cls(cls.config_class(**{**options, "vocab_size": len(tokenizer)})))
    (model.base_model if family == "modernbert" else model).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run = api.finetune(
        str(tmp_path / "base"), task="sst-2", train=tiny_data, dev=tiny_data, readout="head", space="head", method="spsa",
        steps=4, batch_size=4, eval_every=4, threads=1, device="cpu", out=str(tmp_path / "run"),
    )  # fmt: skip
    assert all(np.ptp(record.losses) > 0 for record in api.records(run.out)), "every slope is other than zero"
    assert api.verify(run.out).ok
    trained = {tensor.name for tensor in api.open_journal(run.out).header.tensors}
    assert trained == TRAINED[family], "all that is fresh is trained"


def test_default_length_is_limited_by_model_and_tokenizer(tmp_path):
    """The model has fewer positions than the task would use, and its tokenizer takes fewer still."""
    tokenizer = train_tokenizer()
    tokenizer.model_max_length = 48
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, "vocab_size": len(tokenizer)}))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    values = {"model": str(tmp_path), "task": "sst-2"}
    assert resolve_setup(api.resolve(values)).encoder.max_length == 48
    assert resolve_setup(api.resolve({**values, "max_length": 32})).encoder.max_length == 32
    with pytest.raises(TaskError, match="max_length 60 is more than the 48 tokens this model takes; lower it"):
        resolve_setup(api.resolve({**values, "max_length": 60}))
    tokenizer.model_max_length = 4096
    tokenizer.save_pretrained(tmp_path)
    assert resolve_setup(api.resolve(values)).encoder.max_length == 64


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "gemma3", "modernbert", "mistral"])
@pytest.mark.parametrize("left", ["nothing", "tokenizer_config.json"])
def test_folder_without_a_tokenizer_is_refused(family, left, tmp_path):
    """transformers creates an empty one for some families and fails obscurely for others."""
    saved(family, tmp_path)
    train_tokenizer().save_pretrained(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        if file.name != left:
            file.unlink()
    with pytest.raises(ModelError, match=r"is a folder without a tokenizer; put the files of the model's own"):
        load_tokenizer(str(tmp_path))
