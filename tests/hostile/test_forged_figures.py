"""Figures that no run has: in a journal, in metrics and in config.json. Reports leave them out, and resuming refuses them."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from mezzo.cli import main
from mezzo.drawing import Chart, Series, drawable
from mezzo.reports import read_run
from mezzo.reports.metrics import finite_number, whole_count
from mezzo.runs.recorded_evaluations import read_evaluations
from tests.hostile.files import copy_run, read_json_lines, write_journal

HUGE = [-10, 2**53, 10**30, 10**90, 1e300]


def change_events(run, kind, **values):
    """Change the events of a kind in a run's journal; a list has a value for each of them."""
    lines = read_json_lines(run / "journal.jsonl")
    found = [line for line in lines if line.get("event") == kind]
    assert found
    for number, line in enumerate(found):
        line.update(
            {name: value[number % len(value)] if type(value) is tuple else value for name, value in values.items()}
        )
    write_journal(run / "journal.jsonl", lines)


def change_metrics(run, kind, **values):
    lines = read_json_lines(run / "metrics.jsonl")
    changed = [{**line, **values} if line["event"] == kind else line for line in lines]
    assert changed != lines
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))


@pytest.fixture
def run(valid_run, workspace):
    return copy_run(valid_run, workspace)


@pytest.fixture
def two_runs(valid_run, workspace):
    for name in ("a", "b"):
        shutil.copytree(valid_run, workspace / "run" / name)
    return workspace / "run"


@pytest.mark.parametrize("n", HUGE)
@pytest.mark.parametrize("kind", ["zero-shot", "evaluation"])
def test_an_evaluation_on_an_impossible_number_of_examples_is_not_reported(kind, n, run, capsys):
    change_events(run, kind, n=n)
    assert main(["report", str(run)]) == 0, capsys.readouterr().err
    metrics = read_run(run).metrics
    assert not {"zero-shot": metrics.zero_shot, "evaluation": metrics.evaluations}[kind]


@pytest.mark.parametrize("n", HUGE)
def test_a_result_on_an_impossible_number_of_examples_is_not_reported(n, run, capsys):
    change_metrics(run, "result", n_test=n)
    assert main(["report", str(run)]) == 0, capsys.readouterr().err
    assert read_run(run).metrics.final is None


@pytest.mark.parametrize("value", [(1e308, -1e308), (1e308, 0.5), (10**90, 0.5)])
@pytest.mark.parametrize("field", ["value", "loss", "calibrated", "accuracy"])
def test_extreme_figures_do_not_break_a_report(field, value, run, capsys):
    change_events(run, "evaluation", **{field: value})
    assert main(["report", str(run)]) == 0, capsys.readouterr().err
    page = (run / "report.html").read_text()
    assert "nan" not in page and "inf%" not in page and "e+308" not in page


@pytest.mark.parametrize("command", ["report", "runs"])
@pytest.mark.parametrize("interval", [[-1e308, 1e308], [0.1, 1e308]])
def test_extreme_intervals_do_not_break_a_command(command, interval, run, capsys):
    change_events(run, "evaluation", interval=interval)
    change_events(run, "zero-shot", interval=interval)
    assert main([command, str(run)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("spent", [-10, (-10, 5), (8, 4, 0), 1e300, 2**62])
def test_impossible_counts_of_forwards_do_not_break_a_comparison(spent, two_runs, capsys):
    for run in two_runs.iterdir():
        change_events(run, "evaluation", spent=spent)
        change_metrics(run, "step", spent=-10)
    assert main(["report", str(two_runs)]) == 0, capsys.readouterr().err


def test_runs_that_were_evaluated_at_different_places_have_no_mean(two_runs, capsys):
    for number, name in enumerate(("a", "b")):
        change_events(two_runs / name, "evaluation", spent=(1000 * number, 1000 * number + 1, 1000 * number + 2))
    assert main(["report", str(two_runs)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("seed", [[1], {"a": [1]}, 1e308, None])
def test_a_seed_of_any_kind_can_be_compared(seed, two_runs, capsys):
    config = json.loads((two_runs / "a" / "config.json").read_text())
    (two_runs / "a" / "config.json").write_text(json.dumps({**config, "seed": seed}))
    assert main(["report", str(two_runs)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("loss", [1e308, -1e308, 1e31])
def test_steps_with_extreme_losses_are_left_out(loss, run, capsys):
    lines = read_json_lines(run / "journal.jsonl")
    steps = [line for line in lines if "losses" in line]
    assert steps
    for line in steps:
        line["losses"] = [loss for _ in line["losses"]]
    write_journal(run / "journal.jsonl", lines)
    assert main(["report", str(run)]) == 0, capsys.readouterr().err
    assert not read_run(run).records


@pytest.mark.parametrize("n", HUGE)
def test_an_impossible_evaluation_is_refused_when_a_run_is_resumed(n, run, expect_refusal):
    change_events(run, "evaluation", n=n)
    assert "it was not written by mezzo" in expect_refusal("train", "--resume", str(run))


@pytest.mark.parametrize("field", ["value", "calibrated"])
def test_an_impossible_figure_is_refused_when_a_run_is_resumed(field, run, expect_refusal):
    change_events(run, "evaluation", **{field: -1e300})
    assert "it was not written by mezzo" in expect_refusal("train", "--resume", str(run))


def test_the_evaluations_of_a_run_that_diverged_are_read(run):
    """Their loss is no number, or larger than any other."""
    from mezzo.journal.content import read

    change_events(run, "evaluation", loss="nan")
    assert all(math.isnan(each.evaluation.loss) for each in read_evaluations(read(run)))
    change_events(run, "evaluation", loss=1e35)
    assert read_evaluations(read(run))


def test_counts_and_figures_have_bounds():
    assert [finite_number(value) for value in (1e30, -1e30, 1.01e30, 10**90, math.inf, math.nan, True, "1")] == [
        *(1e30, -1e30),
        *[None] * 6,
    ]
    assert [whole_count(value) for value in (0, 2**53 - 1, 2**53, -1, math.nan)] == [0, 2**53 - 1, None, None, None]


def test_charts_that_cannot_be_drawn_are_left_out():
    good, empty = Series("good", [0, 1], [0.0, 1.0]), Series("empty", [], [])
    charts = [
        Chart("empty", "empty", (empty,)),
        Chart("far", "far", (Series("far", [0, 1], [1e308, -1e308]),)),
        Chart("nan", "nan", (Series("nan", [0, 1], [math.nan, 1.0]),)),
        Chart("good", "good", (good, empty)),
    ]
    (left,) = drawable(charts)
    assert left.key == "good" and left.series == (good,)
