"""The size of the perturbation for rewards of generated text is found by trying."""

from __future__ import annotations

import json

import mezzo
from mezzo.config import from_mapping
from mezzo.runs.defaults import ES_EPS
from mezzo.runs.eps_test import MOST_RISE, find_eps
from mezzo.runs.resolve import resolve_setup

OPTIONS = {"model": "mezzo/llama-mini", "task": "countdown", "objective": "countdown", "device": "cpu", "threads": 1}
QUICK = {"steps": 1, "samples": 2, "batch_size": 2, "train_limit": 8, "eval_limit": 4, "max_new_tokens": 4}


def test_it_is_the_largest_that_leaves_the_model_intact():
    setup = resolve_setup(from_mapping({**OPTIONS, "eps": 0.4}))
    engine = setup.open_engine()
    before = engine.digest()
    found = find_eps(setup, engine)
    assert engine.digest() == before
    assert found.sizes == tuple(0.4 / 2**number for number in range(len(found.sizes)))
    assert all(rise > MOST_RISE for rise in found.rises[:-1]) and 0.9 < found.rises[-1] <= MOST_RISE
    assert "0.4" in found.describe() and f"{found.chosen:g}" in found.describe()


def test_a_run_keeps_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setitem(ES_EPS, "b", 80)  # too large for this model
    run = mezzo.finetune(**OPTIONS, **QUICK, out=str(tmp_path / "run"))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["eps"] in (0.2, 0.1, 0.05) and config["lr"] == config["eps"]
    assert "perplexity of the held-out text" in (tmp_path / "run" / "metrics.jsonl").read_text()
    again = mezzo.finetune(**OPTIONS, **QUICK, eps=config["eps"], lr=config["lr"], out=str(tmp_path / "again"))
    assert again.digest == run.digest and mezzo.verify(run.out).ok
