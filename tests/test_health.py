"""Warnings and verdicts on a run's health, from synthetic losses and from real runs on a tiny model; trackers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import mezzo
from mezzo.cli import main
from mezzo.errors import ConfigError
from mezzo.runs.health import Health
from mezzo.runs.trackers import Trackers, event_figures
from tests.conftest import SENTENCES


def warning_kinds(losses, slopes=lambda step: [1.0], evaluations=(), objective="cross_entropy"):
    """The kinds of warnings in a run with these losses, in order; `evaluations` are (step, dev loss, dev value)."""
    health, kinds = Health(objective), []
    for step in range(len(losses) + 1):
        for at, loss, value in evaluations:
            if at == step:
                kinds += [f.kind for f in health.watch("evaluation", {"step": step, "loss": loss, "value": value})]
        if step < len(losses):
            values = {"step": step, "loss": losses[step], "slopes": slopes(step)}
            kinds += [f.kind for f in health.watch("step", values)]
    return kinds


WAVE = [0.5 + 0.2 * ((7 * step) % 10 - 4.5) / 4.5 for step in range(400)]
"""Losses that vary with the batch and have no trend."""
FALLING = [loss * (1 - step / 500) for step, loss in enumerate(WAVE)]


def test_healthy_run_has_no_warnings():
    assert warning_kinds(WAVE, evaluations=[(0, 0.5, 0.7), (200, 0.49, 0.71), (400, 0.5, 0.69)]) == []
    assert warning_kinds(FALLING, evaluations=[(0, 0.5, 0.7), (200, 0.4, 0.8), (400, 0.41, 0.8)]) == []
    assert warning_kinds(WAVE, slopes=lambda step: [float(step % 15 == 0)], objective="accuracy") == []


def test_sudden_and_slow_divergence_are_reported():
    sudden = WAVE[:50] + [0.5 + step**2 for step in range(50)]
    assert warning_kinds(sudden) == ["diverging"]
    assert warning_kinds([0.5, *([800.0] * 20)]) == ["diverging"], "also from the first step on"
    slow = [loss + step / 1000 for step, loss in enumerate(WAVE)]
    assert warning_kinds(slow, evaluations=[(0, 0.5, 0.7), (200, 0.75, 0.6)]) == ["diverging"]
    assert warning_kinds([*WAVE[:50], 9.0, *WAVE[50:]]) == [], "one bad batch is not divergence"


def test_advice_fits_the_method():
    for method, advice in (("spsa", "--lr three to ten times smaller"), ("solve", "a smaller --eps")):
        health, texts = Health(method=method), []
        for step in range(20):
            values = {"step": step, "loss": 0.5 + step**2, "slopes": [1.0]}
            texts += [finding.text for finding in health.watch("step", values)]
        assert len(texts) == 1
        assert advice in texts[0]
        assert ("--lr" in texts[0]) == (method == "spsa")
    health = Health(method="solve")
    assert not [f for step in range(30) for f in health.watch("step", {"step": step, "loss": 0.5, "slopes": []})]


def test_overfitting_is_noticed_in_the_few_steps_of_solve():
    health, texts = Health(method="solve"), []
    for step, dev in enumerate([0.6, 0.5, 0.45, 0.44, 0.46, 0.5, 0.56, 0.6, 0.7, 0.8]):
        evaluation = {"step": step, "loss": dev, "value": 0.8 - dev / 4}
        texts += [finding.text for finding in health.watch("evaluation", evaluation)]
        texts += [f.text for f in health.watch("step", {"step": step, "loss": 0.6 - step / 20, "slopes": [1.0]})]
    assert len(texts) == 1
    assert texts[0].startswith("overfitting") and "a smaller --budget or --patience" in texts[0]


def test_zero_slopes_are_reported_once_with_advice_for_the_objective():
    assert warning_kinds(WAVE, slopes=lambda step: [0.0]) == ["no signal"]
    assert warning_kinds(WAVE, slopes=lambda step: [0.0, 1e-9]) == []
    for objective, suggests_cross_entropy in (("accuracy", True), ("cross_entropy", False)):
        health = Health(objective)
        texts = [f.text for s in range(30) for f in health.watch("step", {"step": s, "loss": 0.5, "slopes": [0.0]})]
        assert len(texts) == 1
        assert "--eps" in texts[0]
        assert ("--objective cross_entropy" in texts[0]) == suggests_cross_entropy


def forgetting_warnings(losses, metric="reward", method="es"):
    """What is said of evaluations with these losses, 25 steps without any slope after each."""
    health, found = Health(method=method), []
    for number, loss in enumerate(losses):
        evaluation = {"step": 25 * number, "loss": loss, "value": 0.1, "metric": metric}
        found += health.watch("evaluation", evaluation)
        for step in range(25 * number, 25 * number + 25):
            found += health.watch("step", {"step": step, "loss": -0.1, "slopes": [0.0]})
    return [(finding.kind, finding.text) for finding in found]


def test_forgetting_is_reported_once_the_held_out_perplexity_has_risen_by_half():
    first = math.log(200)
    for method in ("es", "spsa"):
        kinds = [kind for kind, _ in forgetting_warnings([first, math.log(299), math.log(301), 9.0], method=method)]
        assert kinds == ["no signal", "forgetting"]
    (_, text), *_ = forgetting_warnings([first, math.log(301), 9.0])[1:]
    assert "the perplexity of the held-out text was 200 and is 301 now. A smaller --lr or --eps" in text
    assert [kind for kind, _ in forgetting_warnings([first, math.nan])] == ["no signal", "forgetting"]
    assert "forgetting" not in [k for k, _ in forgetting_warnings([0.5, 3.0], "accuracy", "spsa")], "a loss of labels"


def test_no_signal_of_a_model_that_forgets_is_not_answered_with_a_larger_eps():
    health = Health(method="es")
    for step, loss in ((0, 5.0), (1, 9.0)):
        list(health.watch("evaluation", {"step": step, "loss": loss, "value": 0.1, "metric": "reward"}))
    texts = [f.text for s in range(30) for f in health.watch("step", {"step": s, "loss": 0.0, "slopes": [0.0]})]
    assert len(texts) == 1 and "start again with a smaller --lr or --eps" in texts[0] and "larger" not in texts[0]
    (_, text), *_ = forgetting_warnings([5.0])
    assert "Try a larger --eps or --batch-size" in text


def test_overfitting_is_reported_only_when_the_training_loss_falls():
    evaluations = [(0, 0.6, 0.6), (100, 0.5, 0.75), (200, 0.52, 0.74), (400, 0.7, 0.65)]
    assert warning_kinds(FALLING, evaluations=evaluations) == ["overfitting"]
    assert warning_kinds(WAVE, evaluations=evaluations) == []
    assert warning_kinds(FALLING, evaluations=[(0, 0.6, 0.6), (200, 0.5, 0.7), (400, 0.7, 0.8)]) == [], (
        "dev accuracy still rises"
    )


# ---- real runs


@pytest.fixture
def options(tiny_folder, tiny_data, tmp_path):
    return {
        "model": tiny_folder,
        "task": "sst-2",
        "train": tiny_data,
        "dev": tiny_data,
        "space": "full",
        "batch_size": 8,
        "threads": 1,
        "device": "cpu",
        "eval_every": 20,
        "out": str(tmp_path / "run"),
    }


def recorded_warnings(run: mezzo.Run) -> list[dict]:
    """The warnings in metrics.jsonl."""
    lines = (Path(run.out) / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["event"] == "warning"]


def test_too_large_lr_is_reported_as_divergence(options):
    run = mezzo.finetune(**options, steps=60, lr=3e-2, eps=1e-3)
    assert "the run is diverging" in " ".join(run.warnings)
    assert "--lr three to ten times smaller" in " ".join(run.warnings)
    assert run.verdict.startswith("diverged")
    assert [entry["kind"] for entry in recorded_warnings(run)] == ["diverging"]


def test_accuracy_objective_with_tiny_eps_is_reported_as_no_signal(options):
    run = mezzo.finetune(**options, objective="accuracy", steps=40, lr=1e-6, eps=1e-6)
    assert run.zero_slope_share == 1
    assert run.verdict.startswith("no signal")
    assert [entry["kind"] for entry in recorded_warnings(run)] == ["no signal"]


def test_swapped_dev_labels_are_reported_as_overfitting(options, tmp_path):
    swapped = tmp_path / "swapped.jsonl"
    opposite = {"negative": "positive", "positive": "negative"}
    rows = [{"text": text, "label": opposite[label]} for label, texts in SENTENCES.items() for text in texts]
    swapped.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = mezzo.finetune(**{**options, "dev": str(swapped), "batch_size": 16}, steps=200, lr=1e-3, eps=1e-3)
    assert [entry["kind"] for entry in recorded_warnings(run)] == ["overfitting"]
    assert run.verdict.startswith("overfits")
    resumed = mezzo.finetune(resume=run.out, steps=220)
    assert resumed.warnings == (), "warnings are not repeated"
    assert resumed.verdict.startswith("overfits")


# ---- trackers


def test_tensorboard_receives_losses_and_evaluations(options):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = mezzo.finetune(**options, method="spsa", steps=20, track="tensorboard")
    assert run.warnings == ()
    events = EventAccumulator(str(Path(run.out) / "tensorboard"))
    events.Reload()
    metrics = [json.loads(line) for line in (Path(run.out) / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in metrics if entry["event"] == "step"]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(losses)
    assert [e.step for e in events.Scalars("dev/accuracy")] == [0, 20]
    assert events.Scalars("test/accuracy")[0].value == pytest.approx(run.accuracy)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_record_a_run_offline(name, options, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read on import
    pytest.importorskip(name)
    run = mezzo.finetune(**options, steps=4, track=name)
    assert run.warnings == ()
    assert list(tmp_path.rglob("*.wandb" if name == "wandb" else "*.db"))


def test_tracked_figures_of_a_step_fit_its_method(options):
    step = {"step": 3, "loss": 0.5, "lr": 0.1, "spent": 64}
    shared = {"train/loss": 0.5, "train/example_forwards": 64}
    spsa = event_figures("step", {**step, "slopes": [1.0, -2.0]})
    assert spsa == (4, {**shared, "train/lr": 0.1, "train/mean_abs_slope": 1.5})
    skipped = {"directions": 32, "fitted": 16, "judged": 16, "eps": 0.1, "forwards": 1}
    sizes = {"train/directions": 32, "train/examples": 16, "train/eps": 0.1}
    assert event_figures("step", {**step, **skipped, "slopes": [], "lr": 0.0}) == (4, {**shared, **sizes})
    events: list[tuple[str, dict]] = []
    mezzo.finetune(**{**options, "batch_size": None}, budget="3k", observe=lambda *event: events.append(event))
    _, figures = next(event_figures(*event) for event in events if event[0] == "step")
    assert {"train/judged_loss", "train/gain", "train/gain_error", "train/mean_abs_slope"} <= set(figures)
    choice = {"step": 0, "value": 0.5, "calibrated": None}
    assert event_figures("zero-shot", choice) == (0, {"test/zero_shot": 0.5}), "candidates have no calibrated figure"


def test_failing_tracker_does_not_stop_the_run(options):
    run = mezzo.finetune(**options, steps=4)
    Path(run.out, "tensorboard").write_text("a file where the tracker needs a folder")
    resumed = mezzo.finetune(resume=run.out, steps=8, track="tensorboard")
    assert resumed.steps == 8
    assert "the tracker tensorboard failed and is left out" in resumed.warnings[0]
    assert mezzo.verify(run.out).ok


def test_tracker_failure_during_a_run_is_reported_once(tmp_path):
    trackers = Trackers()
    trackers.start(["tensorboard"], tmp_path, {})
    step = {"step": 0, "loss": 0.5, "slopes": [1.0], "lr": 1e-3}
    assert list(trackers.log("step", step)) == []
    (message,) = trackers.log("step", {**step, "loss": "not a number"})
    assert "tensorboard failed" in message
    assert list(trackers.log("step", step)) == []
    assert event_figures("start", {"step": 0}) == (0, {})


def test_missing_tracker_package_is_refused_before_the_run(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"--track trackio needs a package that is not installed: pip install 'trackio'"
    ):
        mezzo.finetune(**options, track="trackio")
    assert not Path(options["out"]).exists()
    assert main(["train", "--track", "tensorbord"]) == 2
    assert "did you mean 'tensorboard'?" in capsys.readouterr().err
