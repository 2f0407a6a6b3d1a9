"""Kills, full disks, unwritable folders and damaged files: no step is lost, and resumed runs give the same weights."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from mezzo import api
from mezzo.engines.torch.catalog import digest_of
from mezzo.engines.torch.engine import TorchEngine
from mezzo.errors import ConfigError, DataError, JournalError, RunFailed
from mezzo.journal.content import read
from mezzo.replay.snapshots import Snapshots
from mezzo.types import Update
from tests.processes import kill_after, patience, start_run, wait_for_lines

STEPS = 400


@pytest.fixture
def options(tiny_run: dict[str, Any]) -> dict[str, Any]:
    return {**tiny_run, "steps": STEPS, "eval_every": 50, "snapshot_minutes": 0.01, "eps": 1e-2}


def resume_options(run: Path) -> dict[str, Any]:
    return {"resume": str(run), "threads": 1}


def test_resume_after_twenty_kills_gives_same_digest(options, tmp_path):
    uninterrupted = api.finetune(**options, out=str(tmp_path / "uninterrupted"))
    run = tmp_path / "killed"
    rng = random.Random(0)
    kills, positions = 0, set()
    while kills < 20:
        fresh = not (run / "journal.jsonl").exists()
        process = start_run({**options, "out": str(run)} if fresh else resume_options(run))
        before = read(run).steps if not fresh else 0
        if before < STEPS - 40 and rng.random() < 0.8:
            # Wait for some more steps, so that the kills are spread over the run and not all near its start.
            wait_for_lines(run / "journal.jsonl", before + rng.randrange(2, 18))
        if kill_after(process, rng.random() * 0.05):
            kills += 1
        if (run / "journal.jsonl").exists() and (run / "journal.jsonl").stat().st_size:
            positions.add(read(run).steps)
        if positions and max(positions) == STEPS:
            break
    final = api.finetune(**resume_options(run))
    assert kills == 20
    assert len(positions) >= 8, "kills should hit different steps"
    assert final.digest == uninterrupted.digest
    assert final.accuracy == uninterrupted.accuracy
    assert api.verify(run).ok


@pytest.mark.parametrize("space", ["lora", "full", "matrices", "head", "*attention*"])
@pytest.mark.parametrize("noise", ["rademacher", "gaussian", "lowrank"])
def test_replay_gives_the_digest_of_the_run(options, tmp_path, space, noise):
    changes = {"space": space, "noise": noise, "steps": 12, "eval_every": 6, "weight_decay": 0.1, "samples": 2}
    run = api.finetune(**{**options, **changes}, out=str(tmp_path / "r"))
    shutil.rmtree(tmp_path / "r" / "snapshots")  # only a cache
    verified = api.verify(tmp_path / "r")
    assert verified.ok
    assert verified.digest == run.digest
    engine, _ = api.open_run(tmp_path / "r", at=5)
    api.export(tmp_path / "r", "journal", tmp_path / "c.mezzo")
    from_compact, _ = api.open_run(tmp_path / "c.mezzo", at=5)
    assert engine.digest() == from_compact.digest() != run.digest


def test_run_that_hits_a_file_size_limit_can_be_resumed(options, tmp_path):
    uninterrupted = api.finetune(**options, out=str(tmp_path / "uninterrupted"))
    run = tmp_path / "full"
    process = start_run({**options, "out": str(run)}, max_file_bytes=40_000, error_file=str(tmp_path / "error"))
    process.join(patience(120))
    assert process.exitcode == 1
    assert f"continue with --resume {run}" in (tmp_path / "error").read_text()
    content = read(run)
    assert 0 < content.steps < STEPS
    assert api.finetune(**resume_options(run)).digest == uninterrupted.digest


def test_run_that_fills_the_disk_can_be_resumed(options, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    try:
        process = start_run(
            {**options, "out": str(disk / "run"), "snapshot_minutes": 10}, error_file=str(tmp_path / "error")
        )
        process.join(patience(120))
        assert process.exitcode == 1
        assert "the disk is full" in (tmp_path / "error").read_text()
        shutil.copytree(disk / "run", tmp_path / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert read(tmp_path / "run").steps > 0
    assert api.finetune(**resume_options(tmp_path / "run")).steps == STEPS


def test_unwritable_run_folder_is_explained(options, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"Not a directory|File exists"):
        api.finetune(**options, out=str(tmp_path / "file" / "run"))


def test_resume_after_ctrl_c_and_sigterm_gives_same_digest(options, tmp_path):
    uninterrupted = api.finetune(**options, out=str(tmp_path / "uninterrupted"))
    for number in (signal.SIGINT, signal.SIGTERM):
        run = tmp_path / f"stopped by {number}"
        process = start_run({**options, "out": str(run)})
        wait_for_lines(run / "journal.jsonl", 24)  # the header, evaluations and 20 steps
        assert process.pid
        os.kill(process.pid, number)
        process.join(patience(60))
        assert process.exitcode == 0
        content = read(run)
        assert 20 <= content.steps < STEPS
        assert content.marks[content.steps], "an interrupted run still records its digest"
        assert api.finetune(**resume_options(run)).digest == uninterrupted.digest


def test_resume_takes_data_that_has_moved_and_says_so_of_the_schedule(options, tiny_data, tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    shutil.copy(tiny_data, here)
    data = {"train": str(here), "dev": str(here)}
    run = api.finetune(**{**options, **data, "steps": 4, "schedule": "linear"}, out=str(tmp_path / "a run"))
    here.rename(there)
    with pytest.raises(DataError, match=r"not at .*here.jsonl any more; .* --resume '.*a run' --train DATA$"):
        api.finetune(resume=run.out, steps=8)
    lines = there.read_text().splitlines(True)
    here.write_text("".join(lines[1:]))
    for changed, message in (
        ("train", "training data has changed"),
        ("dev", "--dev has .* examples, and the run began"),
    ):
        with pytest.raises(JournalError, match=message):
            api.finetune(resume=run.out, **{"train": there, "dev": there, changed: here})
    here.unlink()
    seen: list[str] = []
    observe = lambda event, values: seen.append(str(values.get("text")))  # noqa: E731
    resumed = api.finetune(resume=run.out, train=there, dev=there, steps=8, observe=observe)
    (jump,) = (text for text in seen if "schedule" in text)
    assert jump.startswith("--steps 8 instead of 4 stretches the linear schedule: from here on the learning rate is ")
    assert (resumed.steps, resumed.warnings) == (8, (jump,))
    seen.clear()
    assert api.finetune(resume=run.out, observe=observe).steps == 8, "it remembers where the data is"
    assert not any("schedule" in text for text in seen)


def test_session_that_is_dropped_keeps_no_files_open(options, tmp_path):
    """It can then be resumed in the same process; a loop of such sessions would run out of descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        session = api.open_session(**options, out=str(tmp_path / f"{number}"))
        del session
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert api.finetune(resume=str(tmp_path / "0"), steps=2).steps == 2


def test_changed_base_model_is_refused(options, tmp_path, tiny_folder):
    base = tmp_path / "model"
    shutil.copytree(tiny_folder, base)
    api.finetune(**{**options, "model": str(base), "steps": 5}, out=str(tmp_path / "r"))
    tensors = load_file(base / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    for call in (lambda: api.verify(tmp_path / "r"), lambda: api.finetune(resume=str(tmp_path / "r"))):
        with pytest.raises(JournalError, match="the base model has changed"):
            call()


def test_resume_with_changed_data_or_lr_is_refused(options, tmp_path, tiny_data):
    data = tmp_path / "data.jsonl"
    shutil.copy(tiny_data, data)
    api.finetune(**{**options, "train": str(data), "steps": 5}, out=str(tmp_path / "r"))
    with pytest.raises(ConfigError, match="lr cannot change"):
        api.finetune(resume=str(tmp_path / "r"), lr=1.0)
    data.write_text(data.read_text().replace("dull", "dim"))
    with pytest.raises(JournalError, match="training data has changed"):
        api.finetune(resume=str(tmp_path / "r"))


def test_damaged_snapshots_are_ignored(options, tmp_path):
    short = {**options, "steps": 60}
    uninterrupted = api.finetune(**short, out=str(tmp_path / "uninterrupted"))
    run = tmp_path / "r"
    api.finetune(**{**short, "steps": 30}, out=str(run))
    for path in (run / "snapshots").iterdir():
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(bytes(data))
    assert api.finetune(resume=str(run), steps=60, eval_every=50).digest == uninterrupted.digest


def test_steps_with_nan_losses_are_skipped_and_end_the_run_when_constant(options, tmp_path):
    def sometimes_nan(scores, batch):
        return np.array([np.nan, 0.0]) if batch.prompts[0].label else np.array([1.0, 0.5])

    def always_nan(scores, batch):
        return np.full(2, np.nan)

    run = api.finetune(**{**options, "steps": 30}, objective=sometimes_nan, out=str(tmp_path / "sometimes"))
    assert 0 < run.skipped_steps < 30
    assert all(r.update.empty for r in read(tmp_path / "sometimes").records if r.skipped)
    with pytest.raises(RunFailed, match="not a number for 20 steps"):
        api.finetune(**options, objective=always_nan, out=str(tmp_path / "always"))
    assert read(tmp_path / "always").steps == 20


def test_zero_lr_leaves_the_weights_unchanged(options, tmp_path):
    zero = {**options, "steps": 1000, "lr": 0.0, "eval_every": 1000, "weight_decay": 0.1}
    for space in ("lora", "full"):
        session = api.open_session(**{**zero, "space": space}, out=str(tmp_path / space))
        before = session.engine.digest(), digest_of(session.engine.model.named_parameters())
        updates = [record.update for record in session.records()]
        assert len(updates) == 1000
        assert (session.engine.digest(), digest_of(session.engine.model.named_parameters())) == before
        session.close()


def test_early_stopping_time_limit_and_best_checkpoint(options, tmp_path):
    """The best checkpoint has the highest value, then the lowest loss, then the earliest step; patience counts evaluations
    since it; a run stopped by a time limit can be resumed."""
    values = iter([(0.5, 1.0), (0.7, 0.9), (0.7, 0.8), (0.7, 0.8), (0.6, 0.1), (0.6, 0.1), (0.6, 0.1)])
    session = api.open_session(**{**options, "eval_every": 10, "patience": 2}, out=str(tmp_path / "patience"))
    evaluate = session.trainer.evaluate
    session.trainer.evaluate = lambda: dataclasses.replace(
        evaluate(), **dict(zip(("value", "loss"), next(values), strict=True))
    )
    steps = [record.step for record in session.records()]
    assert session.trainer.stopped == "no improvement"
    assert (session.trainer.best.step, len(steps)) == (20, 40)
    run = session.result()
    assert run.best_step == api.best_step(read(run.journal)) == 20
    limited = api.finetune(**options, time_limit=3e-3, out=str(tmp_path / "time"))
    assert limited.stopped == "time limit"
    assert 0 < limited.steps < STEPS
    resumed = api.finetune(resume=str(tmp_path / "time"), steps=limited.steps + 5, time_limit=10)
    assert (resumed.steps, resumed.stopped) == (limited.steps + 5, "finished")
    assert api.config_of(tmp_path / "time")["steps"] == limited.steps + 5, "config.json has the new limit"


def test_existing_folders_are_never_overwritten(options, tmp_path, tiny_folder):
    """Neither by training nor by an export, be it a run folder or a model folder."""
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


def test_snapshots_of_another_run_are_ignored(options, tmp_path):
    short = {**options, "steps": 30, "eval_every": 10}
    a, b = tmp_path / "a", tmp_path / "b"
    api.finetune(**short, out=str(a))
    other = api.finetune(**{**short, "seed": 9, "steps": 20}, out=str(b))
    shutil.rmtree(b / "snapshots")
    shutil.copytree(a / "snapshots", b / "snapshots")
    uninterrupted = api.finetune(**{**short, "seed": 9}, out=str(tmp_path / "c"))
    resumed = api.finetune(resume=str(b), steps=30)
    assert resumed.digest == uninterrupted.digest != other.digest
    assert api.verify(b).ok


def test_rebuilding_starts_from_the_newest_snapshot(options, tmp_path, monkeypatch):
    """The updates before it are not applied again."""
    api.finetune(**{**options, "steps": 30, "eval_every": 10}, out=str(tmp_path / "r"))
    steps = sorted(Snapshots(tmp_path / "r" / "snapshots").steps())
    expected, counts, apply = read(tmp_path / "r").marks, [], TorchEngine.apply

    def count(engine: TorchEngine, updates: Sequence[Update]) -> None:
        counts.append(len(updates))
        apply(engine, updates)

    monkeypatch.setattr(TorchEngine, "apply", count)
    for at in (steps[0], steps[-1] - 3, 30):
        counts.clear()
        engine, _ = api.open_run(tmp_path / "r", at=at)
        assert sum(counts) == at - max([step for step in steps if step <= at], default=0)
        assert expected.get(at, engine.digest()) == engine.digest()
    shutil.rmtree(tmp_path / "r" / "snapshots")
    counts.clear()
    api.open_run(tmp_path / "r", at=30)
    assert sum(counts) == 30


def test_resume_needs_a_python_objective_again(options, tmp_path):
    def own_objective(scores, batch):
        return scores.sum((1, 2))

    api.finetune(**{**options, "steps": 4}, objective=own_objective, out=str(tmp_path / "r"))
    with pytest.raises(ConfigError, match="was the Python function own_objective"):
        api.finetune(resume=str(tmp_path / "r"), steps=6)
    assert api.finetune(resume=str(tmp_path / "r"), steps=6, objective=own_objective).steps == 6


def test_resume_after_the_journal_became_unwritable_gives_same_digest(options, tmp_path):
    """The file becomes unwritable during the run, as on a network disk that disconnects."""
    session = api.open_session(**{**options, "steps": 60, "eval_every": 60}, out=str(tmp_path / "r"))
    records = session.records()
    while next(records).step < 20:
        pass
    os.close(session.journal._file)
    session.journal._file = os.open(tmp_path / "r" / "journal.jsonl", os.O_RDONLY)
    with pytest.raises(RunFailed, match="continue with --resume"):
        list(records)
    uninterrupted = api.finetune(**{**options, "steps": 60, "eval_every": 60}, out=str(tmp_path / "uninterrupted"))
    assert api.finetune(**resume_options(tmp_path / "r")).digest == uninterrupted.digest
