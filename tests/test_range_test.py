"""`--lr auto`: the learning rate of spsa is found by trying."""

from __future__ import annotations

import json

import pytest

import mezzo
from mezzo.config import from_mapping
from mezzo.errors import ConfigError
from mezzo.runs.defaults import apply_defaults
from mezzo.runs.range_test import CAUTION, RangeTest, find_rate
from mezzo.runs.resolve import resolve_setup

HEAD = {
    "task": "reviews",
    "space": "head",
    "method": "spsa",
    "lr": "auto",
    "batch_size": 16,
    "steps": 2,
    "train_limit": 200,
    "eval_limit": 20,
    "device": "cpu",
}


def test_the_rate_lowers_the_loss_and_the_weights_stay():
    setup = resolve_setup(from_mapping(HEAD))
    engine = setup.open_engine()
    before = engine.digest()
    found = find_rate(setup, engine, setup.objective)
    assert engine.digest() == before
    assert found.changes[found.best] < found.changes[0] < 0, "short moves along measured slopes go downhill"
    assert found.best < len(found.rates) - 1, "the largest rate is too large"
    assert found.chosen == pytest.approx(found.rates[found.best] / CAUTION, rel=0.05)


def test_a_run_keeps_the_rate_it_found(tmp_path):
    run = mezzo.finetune(**HEAD, out=str(tmp_path / "run"))
    header = json.loads((tmp_path / "run" / "journal.jsonl").read_bytes().splitlines()[0])
    rate = json.loads((tmp_path / "run" / "config.json").read_text())["lr"]
    assert 1e-6 < rate < 1
    assert header["config"]["lr"] == rate
    again = mezzo.finetune(**{**HEAD, "lr": rate}, out=str(tmp_path / "again"))
    assert again.digest == run.digest, "a run with that rate is the same run"
    assert "rates from" in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_it_is_the_default_of_a_model_without_settings():
    def rate(model: str, **options: str) -> object:
        return apply_defaults(from_mapping({"model": model, "method": "spsa", **options}), "causal").lr

    assert rate("some/folder", space="lora") == "auto"
    assert rate("mezzo/llama-mini", space="lora") == 1e-3


@pytest.mark.parametrize("options", [{"method": "adam"}, {"method": "es"}])
def test_it_is_refused_where_it_means_nothing(options):
    with pytest.raises(ConfigError, match="--lr auto"):
        apply_defaults(from_mapping({**HEAD, **options}), "causal")


def test_a_word_that_is_no_rate():
    with pytest.raises(ConfigError, match="lr must be a number or auto, not 'fast'"):
        from_mapping({"lr": "fast"})


def test_losses_that_are_not_finite_are_never_the_best():
    found = RangeTest((1.0, 2.0, 4.0), (-0.1, float("nan"), float("-inf")))
    assert found.chosen == 1 / CAUTION
    assert "none of" in RangeTest((1.0, 2.0), (0.5, 0.7)).describe()
    assert "a guess: no direction changed the loss" in RangeTest((1.0,), (0.0,)).describe()
