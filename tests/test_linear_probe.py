"""Linear probing, and the language-model loss of choices: baselines that the publication has."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import mezzo
from mezzo import api
from mezzo.cli import main
from mezzo.engines.torch.engine import TorchEngine
from mezzo.errors import ConfigError
from mezzo.evaluation import linear_probe
from mezzo.method.space import Space
from tests.conftest import make_batch, make_roberta

LLAMA = "mezzo/llama-mini"
COPA = [
    {"premise": "The man broke his toe.", "choice1": "He got a hole in his sock.", "choice2": "He dropped a hammer on it.",
     "question": "cause", "label": 1},
    {"premise": "I poured water on my friend.", "choice1": "My friend laughed.", "choice2": "My friend slept.",
     "question": "effect", "label": 0},
]  # fmt: skip


def test_features_are_what_the_last_linear_layer_reads():
    batch, model = make_batch(5), make_roberta()
    features = TorchEngine(model, Space("lora", rank=2)).features(batch.prompts)
    for prompt, row in zip(batch.prompts, features, strict=True):
        with torch.no_grad():
            logits = make_roberta()(input_ids=torch.tensor([prompt.ids])).logits[0, prompt.position]
            head = make_roberta().lm_head.decoder
            torch.testing.assert_close(head(torch.from_numpy(row)), logits, atol=1e-4, rtol=1e-4)


def test_regression_is_the_minimum_that_torch_finds():
    rng = np.random.default_rng(0)
    x, labels = np.column_stack([rng.normal(size=(60, 4)), np.ones(60)]), rng.integers(0, 3, size=60)
    (found,) = linear_probe._fit_path(x, labels, 3, (0.1,))
    weights = torch.zeros(5, 3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=500, tolerance_grad=1e-10)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(torch.from_numpy(x) @ weights, torch.from_numpy(labels))
        loss = loss + 0.05 * weights[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    np.testing.assert_allclose(found[:-1], weights.detach()[:-1], atol=1e-4)


def test_probe_predicts_more_than_the_label_words(capsys):
    arguments = ["eval", "--task", "reviews", "--eval-limit", "100", "--k", "64", "--threads", "1", "--json"]
    assert main([*arguments, "--linear-probe"]) == 0
    probe = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert probe["n"] == plain["n"] == 100 and probe["value"] > plain["value"] and probe["loss"] < plain["loss"]
    few = {"eval_limit": 4, "linear_probe": True, "threads": 1}
    with pytest.raises(ConfigError, match="predicts labels, and 'copa' is a choice"):
        mezzo.evaluate(model=LLAMA, task="copa", data=COPA, **few)
    with pytest.raises(ConfigError, match="without --readout head"):
        mezzo.evaluate(task="reviews", readout="head", k=4, **few)


def test_choices_train_on_the_lm_loss_of_the_right_candidate(tmp_path):
    """As published with `--train_as_classification False`."""
    options = {"task": "copa", "train": COPA, "dev": COPA, "space": "lora", "threads": 1, "eps": 1e-3, "method": "spsa"}
    session = api.open_session(
        LLAMA, **options, objective="vocabulary_cross_entropy", steps=2, batch_size=2, out=str(tmp_path / "run")
    )
    setup, (record, _) = session.setup, list(session.records())
    assert all(len(prompt.candidates) == 1 for prompt in setup.train_prompts)
    run = session.result()
    assert run.value is not None and len(setup.encode(setup.splits.dev)[0].candidates) == 2
    from transformers import AutoModelForCausalLM

    from mezzo.engines.hf_hub import locate

    model, losses = AutoModelForCausalLM.from_pretrained(locate(LLAMA), dtype=torch.float32), []
    for prompt in setup.train_prompts:
        ids = torch.tensor([prompt.ids + prompt.candidates[0]])
        labels = ids.clone()
        labels[0, : len(prompt.ids)] = -100
        with torch.no_grad():
            losses.append(float(model(input_ids=ids, labels=labels).loss))
    assert np.mean(record.losses) == pytest.approx(np.mean(losses), rel=1e-3)
