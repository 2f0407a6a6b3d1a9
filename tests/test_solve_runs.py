"""Whole runs of `--method solve`: every space, type and readout, workers, resuming, verifying, compact journals, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mezzo
from mezzo import api
from mezzo.config import from_mapping
from mezzo.errors import ConfigError
from mezzo.journal.content import read
from mezzo.runs.budget import Budget, parse_budget
from mezzo.runs.resolve import resolve_setup


@pytest.fixture(scope="module")
def options(tiny_run: dict[str, Any]) -> dict[str, Any]:
    """A run of few directions and examples per step, so that a step takes little time."""
    free = {name: value for name, value in tiny_run.items() if name not in ("lr", "batch_size")}
    return {**free, "samples": 6, "batch_size": 16, "steps": 3}


@pytest.mark.parametrize("space", ["full", "matrices", "lora", "prefix", "head"])
@pytest.mark.parametrize(
    ("dtype", "noise"), [("float32", "gaussian"), ("float16", "rademacher"), ("bfloat16", "lowrank")]
)
def test_a_run_in_every_space_and_type_is_rebuilt_from_its_journal(options, tmp_path, space, dtype, noise):
    run = mezzo.finetune(**{**options, "space": space, "dtype": dtype, "noise": noise}, out=str(tmp_path / "run"))
    records = read(tmp_path / "run").records
    moved = [sum(not records[step].update.empty for step in range(until)) for until in range(3)]
    assert run.steps == 3 and run.moves
    assert run.example_forwards == 3 * (7 * 16 + 6 * 16) + 16 * sum(moved), "each earlier move is a direction too"
    assert mezzo.verify(run.out).ok
    mezzo.export(run.out, "journal", out=str(tmp_path / "j.mezzo"))
    engine, _ = api.open_run(tmp_path / "j.mezzo", at=3)
    assert engine.digest() == run.digest


@pytest.mark.parametrize(
    "readout",
    [
        {"model": "mezzo/roberta-mini", "readout": "head", "samples": 16},
        {"objective": "vocabulary_cross_entropy"},
        {"model": "mezzo/llama-mini", "task": "sst-2", "readout": "candidates"},
    ],
)
def test_every_readout_is_solved_for(options, tmp_path, readout):
    run = mezzo.finetune(**{**options, **readout, "seed": 1}, out=str(tmp_path / "run"))
    records = read(tmp_path / "run").records
    assert run.moves and all(record.notes["change"] > 0 for record in records)
    assert mezzo.verify(run.out).ok


def test_the_number_of_workers_changes_no_bit(options, tmp_path):
    single = mezzo.finetune(**options, out=str(tmp_path / "one"))
    shared = mezzo.finetune(**options, workers=2, micro_batch=8, out=str(tmp_path / "two"))
    alone = mezzo.finetune(**options, micro_batch=8, out=str(tmp_path / "alone"))
    assert shared.digest == alone.digest
    assert (single.steps, single.moves) == (shared.steps, shared.moves)


def test_a_resumed_run_ends_where_an_undisturbed_one_does(options, tmp_path):
    whole = mezzo.finetune(**{**options, "steps": 5}, out=str(tmp_path / "whole"))
    part = mezzo.finetune(**{**options, "steps": 2}, out=str(tmp_path / "part"))
    resumed = mezzo.finetune(resume=part.out, steps=5)
    assert resumed.digest == whole.digest and resumed.example_forwards == whole.example_forwards
    assert read(Path(whole.out)).records == read(Path(resumed.out)).records


def test_a_step_fits_the_training_set_and_is_judged_by_dev(options, tmp_path):
    free = {name: value for name, value in options.items() if name not in ("samples", "batch_size")}
    mezzo.finetune(**{**free, "steps": 1}, out=str(tmp_path / "run"))
    (record,) = read(tmp_path / "run").records
    assert (record.notes["directions"], record.notes["fitted"], record.notes["judged"]) == (64, 16, 16)


def test_a_run_ends_with_its_budget(options, tmp_path):
    free = {name: value for name, value in options.items() if name != "steps"}
    run = mezzo.finetune(**free, budget="500", out=str(tmp_path / "run"))
    assert run.stopped == "finished" and run.example_forwards >= 500
    assert sum(read(tmp_path / "run").records[step].notes["forwards"] for step in range(run.steps - 1)) < 500
    assert mezzo.finetune(resume=run.out, budget="1k").example_forwards >= 1000


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (None, Budget()),
        ("250000", Budget(forwards=250_000)),
        ("250k", Budget(forwards=250_000)),
        ("2.5M", Budget(forwards=2_500_000)),
        ("90s", Budget(seconds=90)),
        ("10 min", Budget(seconds=600)),
        ("1h", Budget(seconds=3600)),
    ],
)
def test_a_budget_is_example_forwards_or_time(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["0", "-5", "ten", "5 parsecs", "k", "1e400", "nan", ""])
def test_other_budgets_are_refused(text):
    with pytest.raises(ConfigError, match="such as 250k, or time"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({}, "solve"),
        ({"objective": "vocabulary_cross_entropy"}, "solve"),
        ({"lr": 1e-3}, "spsa"),
        ({"weight_decay": 0.1}, "spsa"),
        ({"objective": "accuracy"}, "spsa"),
        ({"method": "spsa"}, "spsa"),
    ],
)
def test_the_method_follows_from_the_other_options(options, changes, method):
    assert resolve_setup(from_mapping({**options, **changes})).config.method == method


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 1e-3}, "--method solve has no --lr"),
        ({"clip": 1.0}, "--method solve has no --clip"),
        ({"objective": "accuracy"}, "'accuracy' is trained with --method spsa"),
        ({"budget": "much"}, "budget must be"),
    ],
)
def test_what_solve_cannot_use_is_refused_before_anything_is_written(options, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        mezzo.finetune(**{**options, "method": "solve", **changes}, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_it_learns_more_than_chance_on_the_bundled_questions(tmp_path):
    """A tenth of the default budget of the main job."""
    run = mezzo.finetune(task="questions", budget="60k", eval_limit=300, seed=1, threads=1, out=str(tmp_path / "run"))
    assert run.value is not None and run.zero_shot_calibrated is not None
    assert run.interval[0] > max(run.zero_shot, run.zero_shot_calibrated)


def test_probes_that_are_adapters_of_one_direction_are_trained_by_spsa(options):
    sglang = {"model": "mezzo/llama-mini", "task": "sst-2", "engine": "sglang", "train": options["train"]}
    assert resolve_setup(from_mapping({**sglang, "space": "matrices"})).config.method == "spsa"
    assert resolve_setup(from_mapping({**sglang, "space": "lora"})).config.method == "solve"
    with pytest.raises(ConfigError, match="a probe is an adapter of one direction"):
        resolve_setup(from_mapping({**sglang, "space": "matrices", "method": "solve"}))
