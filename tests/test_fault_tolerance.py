"""Kill it, fill the disk, take the folder away, damage its files: nothing is lost and the weights come out the same."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from mezzo import api
from mezzo.engines.torch.catalog import digest_of
from mezzo.errors import ConfigError, JournalError, RunFailed
from mezzo.journal.journal import read
from tests.processes import kill_after, start_run, wait_for_lines

STEPS = 400


@pytest.fixture
def options(tiny_folder: str, tiny_data: str) -> dict[str, Any]:
    return {
        "model": tiny_folder,
        "task": "sst-2",
        "train": tiny_data,
        "dev": tiny_data,
        "space": "lora",
        "steps": STEPS,
        "batch_size": 4,
        "eval_every": 50,
        "threads": 1,
        "device": "cpu",
        "snapshot_minutes": 0.01,
        "lr": 1e-3,
        "eps": 1e-2,
    }


def resumed(run: Path) -> dict[str, Any]:
    return {"resume": str(run), "threads": 1}


def test_twenty_kills_end_at_the_digest_of_an_undisturbed_run(options, tmp_path):
    whole = api.finetune(**options, out=str(tmp_path / "whole"))
    run = tmp_path / "killed"
    chance = random.Random(0)
    kills, positions = 0, set()
    while kills < 20:
        fresh = not (run / "journal.jsonl").exists()
        process = start_run({**options, "out": str(run)} if fresh else resumed(run))
        before = read(run).steps if not fresh else 0
        if before < STEPS - 40 and chance.random() < 0.8:
            # Wait for a few steps more, so that kills fall at many places of the run and not all in its start.
            wait_for_lines(run / "journal.jsonl", before + chance.randrange(2, 18))
        if kill_after(process, chance.random() * 0.05):
            kills += 1
        if (run / "journal.jsonl").exists() and (run / "journal.jsonl").stat().st_size:
            positions.add(read(run).steps)
        if positions and max(positions) == STEPS:
            break
    final = api.finetune(**resumed(run))
    assert kills == 20
    assert len(positions) >= 8, "the kills should have hit different places"
    assert final.digest == whole.digest
    assert final.accuracy == whole.accuracy
    assert api.verify(run).ok


@pytest.mark.parametrize("space", ["lora", "full", "matrices", "head", "*attention*"])
@pytest.mark.parametrize("noise", ["rademacher", "gaussian", "lowrank"])
def test_rebuild_gives_the_live_digest(options, tmp_path, space, noise):
    changes = {"space": space, "noise": noise, "steps": 12, "eval_every": 6, "weight_decay": 0.1, "samples": 2}
    run = api.finetune(**{**options, **changes}, out=str(tmp_path / "r"))
    shutil.rmtree(tmp_path / "r" / "snapshots")  # a cache: deleting it loses nothing
    found = api.verify(tmp_path / "r")
    assert found.ok
    assert found.digest == run.digest
    engine, _ = api.open_run(tmp_path / "r", at=5)
    api.export(tmp_path / "r", "journal", tmp_path / "c.mezzo")
    again, _ = api.open_run(tmp_path / "c.mezzo", at=5)
    assert engine.digest() == again.digest() != run.digest


def test_a_disk_that_fills_ends_the_run_and_loses_nothing(options, tmp_path):
    whole = api.finetune(**options, out=str(tmp_path / "whole"))
    run = tmp_path / "full"
    process = start_run({**options, "out": str(run)}, largest_file=40_000, said=str(tmp_path / "said"))
    process.join(120)
    assert process.exitcode == 1
    assert f"continue with --resume {run}" in (tmp_path / "said").read_text()
    content = read(run)
    assert 0 < content.steps < STEPS
    assert api.finetune(**resumed(run)).digest == whole.digest


def test_a_real_full_disk(options, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        process = start_run({**options, "out": str(disk / "run"), "snapshot_minutes": 10}, said=str(tmp_path / "said"))
        process.join(120)
        assert process.exitcode == 1
        assert "the disk is full" in (tmp_path / "said").read_text()
        shutil.copytree(disk / "run", tmp_path / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert read(tmp_path / "run").steps > 0
    assert api.finetune(**resumed(tmp_path / "run")).steps == STEPS


def test_an_unwritable_folder_is_explained(options, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"Not a directory|File exists"):
        api.finetune(**options, out=str(tmp_path / "file" / "run"))


def test_ctrl_c_ends_cleanly_and_resumes(options, tmp_path):
    whole = api.finetune(**options, out=str(tmp_path / "whole"))
    run = tmp_path / "stopped"
    process = start_run({**options, "out": str(run)})
    wait_for_lines(run / "journal.jsonl", 20)
    assert process.pid
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 0
    content = read(run)
    assert 20 <= content.steps < STEPS
    assert content.marks[content.steps], "an interrupted run still records its digest"
    assert api.finetune(**resumed(run)).digest == whole.digest


def test_a_changed_base_model_is_refused(options, tmp_path, tiny_folder):
    moved = tmp_path / "model"
    shutil.copytree(tiny_folder, moved)
    api.finetune(**{**options, "model": str(moved), "steps": 5}, out=str(tmp_path / "r"))
    tensors = load_file(moved / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
    for call in (lambda: api.verify(tmp_path / "r"), lambda: api.finetune(resume=str(tmp_path / "r"))):
        with pytest.raises(JournalError, match="the base model has changed"):
            call()


def test_changed_data_and_settings_are_refused_on_resume(options, tmp_path, tiny_data):
    data = tmp_path / "data.jsonl"
    shutil.copy(tiny_data, data)
    api.finetune(**{**options, "train": str(data), "steps": 5}, out=str(tmp_path / "r"))
    with pytest.raises(ConfigError, match="lr cannot change"):
        api.finetune(resume=str(tmp_path / "r"), lr=1.0)
    data.write_text(data.read_text().replace("dull", "dim"))
    with pytest.raises(JournalError, match="training data has changed"):
        api.finetune(resume=str(tmp_path / "r"))


def test_a_broken_snapshot_is_passed_over(options, tmp_path):
    short = {**options, "steps": 60}
    whole = api.finetune(**short, out=str(tmp_path / "whole"))
    run = tmp_path / "r"
    api.finetune(**{**short, "steps": 30}, out=str(run))
    for path in (run / "snapshots").iterdir():
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(bytes(data))
    assert api.finetune(resume=str(run), steps=60, eval_every=50).digest == whole.digest


def test_losses_that_are_no_numbers_never_reach_the_weights(options, tmp_path):
    def sometimes(scores, batch):
        return np.array([np.nan, 0.0]) if batch.prompts[0].label else np.array([1.0, 0.5])

    def never(scores, batch):
        return np.full(2, np.nan)

    run = api.finetune(**{**options, "steps": 30}, objective=sometimes, out=str(tmp_path / "some"))
    assert 0 < run.skipped_steps < 30
    assert all(r.update.empty for r in read(tmp_path / "some").records if r.skipped)
    with pytest.raises(RunFailed, match="not a number for 20 steps"):
        api.finetune(**options, objective=never, out=str(tmp_path / "none"))
    assert read(tmp_path / "none").steps == 20


def test_lr_zero_changes_nothing(options, tmp_path):
    zero = {**options, "steps": 1000, "lr": 0.0, "eval_every": 1000, "weight_decay": 0.1}
    for space in ("lora", "full"):
        session = api.open_session(**{**zero, "space": space}, out=str(tmp_path / space))
        before = session.engine.digest(), digest_of(session.engine.model.named_parameters())
        updates = [record.update for record in session.records()]
        assert len(updates) == 1000
        assert (session.engine.digest(), digest_of(session.engine.model.named_parameters())) == before
        session.close()


def test_early_stopping_time_limit_and_best_checkpoint(options, tmp_path):
    """The best: highest, then lowest loss, then first; patience counts evaluations since; a time limit can be resumed."""
    values = iter([(0.5, 1.0), (0.7, 0.9), (0.7, 0.8), (0.7, 0.8), (0.6, 0.1), (0.6, 0.1), (0.6, 0.1)])
    session = api.open_session(**{**options, "eval_every": 10, "patience": 2}, out=str(tmp_path / "patience"))
    real = session.trainer.evaluate
    session.trainer.evaluate = lambda: dataclasses.replace(
        real(), **dict(zip(("value", "loss"), next(values), strict=True))
    )
    steps = [record.step for record in session.records()]
    assert session.trainer.stopped == "no improvement"
    assert (session.trainer.best.step, len(steps)) == (20, 40)
    run = session.result()
    assert run.best_step == api.best_step(run.out, read(run.journal)) == 20
    limited = api.finetune(**options, time_limit=3e-3, out=str(tmp_path / "time"))
    assert limited.stopped == "time limit"
    assert 0 < limited.steps < STEPS
    again = api.finetune(resume=str(tmp_path / "time"), steps=limited.steps + 5, time_limit=10)
    assert (again.steps, again.stopped) == (limited.steps + 5, "finished")
    assert api.config_of(tmp_path / "time")["steps"] == limited.steps + 5, "changed limits are remembered"


def test_nothing_is_written_over(options, tmp_path, tiny_folder):
    """Neither a run, nor a model, nor any folder that holds something."""
    run = api.finetune(**{**options, "steps": 4, "eval_every": 2}, out=str(tmp_path / "run"))
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    for call in (
        lambda: api.export(run.out, "model", run.out),
        lambda: api.export(run.out, "model", model),
        lambda: api.export(run.out, "adapter", model),
        lambda: api.finetune(**{**options, "model": str(model)}, out=str(model)),
    ):
        with pytest.raises(ConfigError, match=r"exists already|not empty"):
            call()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    assert api.verify(run.out).ok
    assert api.evaluate(model=str(model), task="sst-2", data=options["train"], threads=1).n == 16


def test_snapshots_of_another_run_are_not_believed(options, tmp_path):
    short = {**options, "steps": 30, "eval_every": 10}
    a, b = tmp_path / "a", tmp_path / "b"
    api.finetune(**short, out=str(a))
    other = api.finetune(**{**short, "seed": 9, "steps": 20}, out=str(b))
    shutil.rmtree(b / "snapshots")
    shutil.copytree(a / "snapshots", b / "snapshots")
    whole = api.finetune(**{**short, "seed": 9}, out=str(tmp_path / "c"))
    resumed_run = api.finetune(resume=str(b), steps=30)
    assert resumed_run.digest == whole.digest != other.digest
    assert api.verify(b).ok


def test_an_objective_given_in_python_must_be_given_again(options, tmp_path):
    def mine(scores, batch):
        return scores.sum((1, 2))

    api.finetune(**{**options, "steps": 4}, objective=mine, out=str(tmp_path / "r"))
    with pytest.raises(ConfigError, match="was the Python function mine"):
        api.finetune(resume=str(tmp_path / "r"), steps=6)
    assert api.finetune(resume=str(tmp_path / "r"), steps=6, objective=mine).steps == 6


def test_an_unwritable_journal_ends_the_run_and_resumes(options, tmp_path):
    """The folder goes away under a running process, as a network disk does; what was written before can be continued."""
    session = api.open_session(**{**options, "steps": 60, "eval_every": 60}, out=str(tmp_path / "r"))
    records = session.records()
    while next(records).step < 20:
        pass
    os.close(session.journal._file)
    session.journal._file = os.open(tmp_path / "r" / "journal.jsonl", os.O_RDONLY)
    with pytest.raises(RunFailed, match="continue with --resume"):
        list(records)
    whole = api.finetune(**{**options, "steps": 60, "eval_every": 60}, out=str(tmp_path / "whole"))
    assert api.finetune(**resumed(tmp_path / "r")).digest == whole.digest
