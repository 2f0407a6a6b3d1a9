"""`benchmarks/methods.py`: the published rules it compares with, what it records, and how it chooses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from mezzo.types import Slope, StepRecord, Update
from tests.test_scripts import run_script, write_sst2

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """The scripts' own modules, found as their folder finds them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import baselines
        import curves

        yield baselines, curves
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_fzoo_divides_differences_by_standard_deviation(modules):
    fzoo = modules[0].Fzoo(seed=3, eps=1e-3)
    probes = fzoo.ask(5)
    assert [len(probe.terms) for probe in probes] == [0] + [1] * 8
    losses = np.random.default_rng(0).normal(1.0, 0.1, 9)
    slopes = fzoo.tell(probes, losses)
    assert [slope.seed for slope in slopes] == [probe.terms[0][0] for probe in probes[1:]]
    np.testing.assert_allclose([slope.value for slope in slopes], (losses[1:] - losses[0]) / np.std(losses[1:], ddof=1))
    assert [slope.value for slope in fzoo.tell(probes, np.ones(9))] == [0.0] * 8


def test_meazo_divides_slope_by_root_of_its_mean_square(modules):
    meazo = modules[0].Meazo(lambda step: 0.1, decay=0.9)
    mean_square = 0.0
    for step, slope in enumerate([2.0, -1.0, 4.0], 1):
        mean_square = 0.9 * mean_square + 0.1 * slope**2
        ((_, coefficient),) = meazo.update([Slope(7, slope)], step).terms
        assert coefficient == pytest.approx(0.1 * slope / math.sqrt(mean_square / (1 - 0.9**step)), rel=1e-6)
        meazo.observe(StepRecord(step, (1.0, 1.0), (slope,), Update(), 0.1))


def result(method: str, lr: float, seed: int, test: list[float], dev: float) -> dict:
    cell = {"model": "m", "task": "t", "space": "full", "k": 16, "budget": 400, "batch": 64}
    points = [
        {"at": at, "test_loss": loss, "test_accuracy": 0.5, "dev_loss": dev}
        for at, loss in zip((0, 100, 400), test, strict=True)
    ]
    return {**cell, "method": method, "lr": lr, "seed": seed, "curve": points}


def test_learning_rate_is_chosen_by_dev_loss_and_solve_is_timed_against_it(modules):
    curves = modules[1]
    rows = [
        result("solve", 0.0, 1, [3.0, 1.0, 0.5], 0.7),
        result("solve", 0.0, 2, [3.0, 3.0, 0.5], 0.7),
        *(result("spsa", 1e-5, seed, [3.0, 2.5, 2.0], 0.8) for seed in (1, 2)),
        *(result("spsa", 3e-5, seed, [3.0, 2.0, 1.0], 0.9) for seed in (1, 2)),
        result("spsa", 1e-4, 1, [3.0, 2.0, 1.0], 0.1),  # not all seeds
        *(result("spsa", 3e-4, seed, [3.0, 2.0, 1.0], math.nan) for seed in (1, 2)),
    ]
    solve, spsa = curves.cells_of(rows)["m", "t", "full", 16, 400]
    assert (spsa.lr, spsa.seeds, spsa.edge) == (1e-5, 2, True)
    assert solve.loss[1] == (2.0, 1.0)  # mean and standard error
    assert curves.forwards_to_reach(solve, 2.0) == 100
    assert curves.forwards_to_reach(solve, 1.25) == 250
    assert curves.forwards_to_reach(solve, 0.4) is None
    assert "| spsa | 1e-05 (edge of the grid), 64 | 2 |" in curves.table(rows)
    assert curves.table(rows).endswith("| 0.25 (100) |")


@pytest.mark.slow
def test_methods_script_records_runs_and_tabulates_them(tmp_path):
    write_sst2(tmp_path)
    out, picture = tmp_path / "out.jsonl", tmp_path / "out.svg"
    command = ["--data", str(tmp_path), "--tasks", "sst-2", "--k", "4", "--seeds", "13", "--spaces", "head"]
    command += ["--methods", "solve,spsa-linear@1.5e-3", "--batch-sizes", "8", "--budget", "2.2k", "--device", "cpu"]
    command += ["--processes", "1", "--out", str(out), "--picture", str(picture)]
    done = run_script("../benchmarks/methods.py", *command)
    assert done.returncode == 0, done.stderr
    recorded = out.read_text()
    solve, spsa = sorted(map(json.loads, recorded.splitlines()), key=lambda row: row["method"])
    assert solve["curve"][0] == spsa["curve"][0]  # before the first step
    for row in (solve, spsa):
        assert [point["at"] for point in row["curve"]][::2] == [0, 97, 194, 389, 778, 1556][: len(row["curve"])]
        assert all(point["spent"] <= point["at"] for point in row["curve"])
    assert solve["curve"][-1]["steps"] >= 1
    assert spsa["curve"][-1]["steps"] == 137
    assert spsa["curve"][-1]["test_loss"] != spsa["curve"][0]["test_loss"]
    assert "mezzo/roberta-mini, sst-2, head, k = 4, 2200 example-forwards" in done.stdout
    assert "| spsa-linear | 0.0015, 8 | 1 |" in done.stdout
    assert picture.read_text().count("<polyline") == 4
    first, second = recorded.splitlines(keepends=True)
    out.write_text(first + second[:50])  # killed while writing
    again = run_script("../benchmarks/methods.py", *command)
    assert again.returncode == 0, again.stderr
    assert out.read_text().startswith(first + second[:50] + "\n" + second[:50])
    assert "| solve | none | 1 |" in again.stdout
    assert "| spsa-linear | 0.0015, 8 | 1 |" in again.stdout
    wrong = run_script("../benchmarks/methods.py", *command, "--methods", "spsa,muon")
    assert wrong.returncode == 2
    assert "--methods has no 'muon'" in wrong.stderr
    assert "Traceback" not in wrong.stderr
