"""NaN and infinite losses: the step is recorded as skipped, the weights do not change, and a run of nothing else ends."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from mezzo import api
from mezzo.cli import main
from mezzo.errors import RunFailed
from mezzo.journal.content import read
from mezzo.runs.trainer import MAX_SKIPS


@pytest.fixture
def options(tiny_run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return {**tiny_run, "steps": 24, "eval_every": 24, "out": str(tmp_path / "run")}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_skipped_steps_leave_the_weights_unchanged_and_can_be_replayed(loss, options, tmp_path):
    calls = iter(range(1000))

    def objective(scores: Any, batch: Any) -> Any:
        losses = scores.astype(np.float64).sum((1, 2))
        return losses * [loss, 1.0] if next(calls) % 3 == 1 else losses

    session = api.open_session(**options, objective=objective)
    before, skipped = session.engine.digest(), 0
    for record in session.records():
        after = session.engine.digest()
        assert (after == before) == bool(record.skipped)
        assert all(math.isfinite(coef) for _, coef in record.update.terms)
        before, skipped = after, skipped + bool(record.skipped)
    assert session.result().skipped_steps == skipped == 8
    assert api.verify(options["out"]).ok
    api.export(options["out"], "journal", tmp_path / "j.mezzo")
    assert api.open_run(tmp_path / "j.mezzo", at=24)[0].digest() == before


def test_only_consecutive_skipped_steps_end_a_run(options):
    calls = iter(range(1000))

    def objective(scores: Any, batch: Any) -> Any:
        call = next(calls)
        return (
            np.full(2, math.inf)
            if (call % MAX_SKIPS and call < 2 * MAX_SKIPS) or call >= 3 * MAX_SKIPS
            else np.array([0.0, 1.0])
        )

    with pytest.raises(RunFailed, match=f"not a number for {MAX_SKIPS} steps in a row") as caught:
        api.finetune(**{**options, "steps": 200}, objective=objective)
    assert "A smaller --eps, or a smaller --lr" in str(caught.value)
    assert read(Path(options["out"])).steps == 4 * MAX_SKIPS


def train_command(options: dict[str, Any]) -> list[str]:
    return ["train", *[part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]]


@pytest.mark.parametrize("space", ["lora", "full", "prefix"])
def test_diverging_run_ends_with_an_explanation(space, options, capsys):
    """With a huge learning rate, the scores of the model itself overflow."""
    code = main(train_command({**options, "space": space, "lr": 1e36, "steps": 200}))
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 1
    assert f"not a number for {MAX_SKIPS} steps in a row" in message
    content = read(Path(options["out"]))
    assert all(record.update.empty for record in content.records if record.skipped)
    assert all(math.isfinite(value) for record in content.records for _, value in record.update.terms)


@pytest.mark.parametrize(("rate", "samples"), [(1e6, 1), (1e4, 4)])
def test_steps_too_large_for_float16_are_skipped(rate, samples, options, capsys):
    """float32 would hold them: a weight of float16 is at most 65504."""
    size = {"space": "full", "dtype": "float16", "steps": 6, "eval_every": 3, "lr": rate, "samples": samples}
    run = api.finetune(**{**options, **size}, method="spsa")
    records = list(read(Path(options["out"])).records)
    moves = [sum(abs(coef) for _, coef in record.update.terms) for record in records]
    assert run.skipped_steps == sum(bool(record.skipped) for record in records) > 0
    assert max(moves) <= 65504
    engine, _ = api.open_run(options["out"], at=6)
    assert all(np.isfinite(tensor).all() for tensor in engine.state().values())
    assert "larger --lr" not in run.verdict
    assert any("steps were skipped" in warning and "A smaller --lr" in warning for warning in run.warnings)


def test_lora_of_a_float16_model_may_take_any_step_that_float32_holds(options):
    """Its factors are float32."""
    session = api.open_session(**{**options, "steps": 1, "lr": 1e7, "method": "spsa", "dtype": "float16"})
    (record,) = session.records()
    session.close()
    assert not record.skipped and abs(record.update.terms[0][1]) > 65504


def test_model_with_nan_weights_is_refused_before_training(options, tiny_folder, tmp_path, capsys):
    shutil.copytree(tiny_folder, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["roberta.encoder.layer.0.output.dense.bias"][0] = math.nan
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    assert main(train_command({**options, "model": str(tmp_path / "model")})) == 2
    assert "holds values that are not finite numbers" in capsys.readouterr().err
    assert not Path(options["out"]).exists()
