"""Local workers: the result of a single process, whatever happens to them."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mezzo import api
from mezzo.engines import ENGINES
from mezzo.errors import ConfigError, JournalError, RunFailed
from mezzo.journal.journal import read
from mezzo.runs.folder import Folder
from tests.parallel.below import family, gone, listening, workers_of
from tests.parallel.faulty import FACTORY, plant
from tests.processes import start, wait_for


@pytest.mark.parametrize("space", ["lora", "full"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_workers_ends_with_the_digest_of_one_process(base, alone, tmp_path, space, count):
    run = api.finetune(**{**base, "space": space}, workers=count, out=str(tmp_path / "r"))
    assert run.digest == alone[space]
    assert run.workers["count"] == count
    assert run.workers["lost"] == run.workers["rebuilt"] == run.workers["recomputed_units"] == 0
    assert 0 < run.workers["bytes_per_step"] < 10_000
    assert 0 < run.workers["waiting"] < 1
    steps = [line for line in Folder(tmp_path / "r").metrics() if line["event"] == "step"]
    assert all(0 < line["bytes"] < 10_000 and 0 <= line["waiting"] <= 1 for line in steps)
    assert api.verify(tmp_path / "r").ok


def test_several_directions_a_step_and_generated_text(base, tmp_path):
    """Pairs of probes are shared out too; rewards over text go the same way as scores."""
    more = {**base, "samples": 3, "steps": 10, "eval_every": 5}
    one = api.finetune(**more, out=str(tmp_path / "one"))
    assert api.finetune(**more, workers=2, out=str(tmp_path / "two")).digest == one.digest
    text = {"model": "mezzo/llama-mini", "objective": "tests.parallel.rewards:short", "steps": 2, "batch_size": 4}
    text |= {"micro_batch": 2, "max_new_tokens": 3, "threads": 1, "device": "cpu", "eval_limit": 4, "space": "lora"}
    one = api.finetune(**text, out=str(tmp_path / "text-one"))
    assert api.finetune(**text, workers=2, out=str(tmp_path / "text-two")).digest == one.digest


# ---- what happens to workers


@pytest.fixture
def drill(base, tmp_path, monkeypatch):
    """A run whose first worker has a fault, in a model folder of its own."""
    model = tmp_path / "model"
    shutil.copytree(base["model"], model)
    monkeypatch.setitem(ENGINES, "torch", dataclasses.replace(ENGINES["torch"], factory=FACTORY))

    def run(workers: int = 2, **changes: Any) -> Any:
        fault = {name: changes.pop(name) for name in ("kind", "after", "times") if name in changes}
        plant(model, **fault)
        return api.finetune(**{**base, "model": str(model), "workers": workers, **changes}, out=str(tmp_path / "r"))

    return run


@pytest.mark.parametrize("kind", ["end", "shape", "words", "raise"])
def test_a_worker_that_ends_or_talks_nonsense_is_replaced(drill, alone, tmp_path, kind):
    run = drill(kind=kind, times=2, after=20)
    assert run.digest == alone["lora"]
    assert run.workers["lost"] == 2
    told = [line["text"] for line in Folder(tmp_path / "r").metrics() if line["event"] == "worker"]
    assert len(told) == 2
    assert all("a new one starts from the base model and the journal" in text for text in told)


def test_a_single_worker_that_ends_is_replaced_too(drill, alone):
    run = drill(workers=1, kind="end", after=50)
    assert (run.digest, run.workers["lost"]) == (alone["lora"], 1)


def test_no_numbers_are_asked_for_again_and_their_worker_rebuilt(drill, alone):
    run = drill(kind="nan", after=20)
    assert run.digest == alone["lora"]
    assert run.skipped_steps == 0
    assert run.workers["recomputed_units"] > 0
    assert run.workers["lost"] == 1


def test_no_numbers_that_two_workers_find_are_genuine(drill):
    """The loss itself is not a number: the step is skipped, nobody is blamed."""
    with pytest.raises(RunFailed, match="not a number for 20 steps in a row"):
        drill(kind="nan", after=0, times=2, lr=0.0, eval_every=100)


def test_weights_that_drift_are_found_and_rebuilt(drill, tmp_path):
    run = drill(workers=3, kind="drift", after=10, check_workers=5)
    # Beside other work a second one may be found late and replaced with it; on an idle machine it is one.
    assert run.workers["rebuilt"] == run.workers["lost"] >= 1
    assert api.verify(tmp_path / "r").ok, "the journal and its marks are those of the healthy majority"


def test_scores_that_differ_are_found_and_their_worker_rebuilt(drill, tmp_path):
    """Numbers that look right and are wrong: noise on one worker's scores."""
    run = drill(workers=3, kind="noise", after=10, check_workers=5)
    assert run.workers["rebuilt"] == 1
    assert api.verify(tmp_path / "r").ok


def test_where_no_majority_is_all_are_rebuilt(drill, alone, tmp_path):
    run = drill(workers=2, kind="drift", after=10, check_workers=5)
    assert run.workers["rebuilt"] == 2
    assert api.verify(tmp_path / "r").ok


def test_a_sleeping_worker_loses_its_units_and_then_its_place(drill, alone):
    began = time.monotonic()
    run = drill(kind="sleep", after=20, worker_timeout=3.0)
    assert run.digest == alone["lora"]
    assert run.workers["late_units"] > 0
    assert time.monotonic() - began < 50, "nobody waited for the sleeper"


def test_workers_that_never_do_anything_end_the_run(drill):
    with pytest.raises(RunFailed, match="times in a row and did no work in between"):
        drill(workers=1, kind="end", after=0, times=100)


def test_bad_input_is_explained_as_in_a_single_process(base, tmp_path):
    with pytest.raises(ConfigError, match="was asked for, but torch"):
        api.finetune(**{**base, "device": "cuda:7"}, workers=2, out=str(tmp_path / "r"))
    with pytest.raises(ConfigError, match="add --workers N"):
        api.finetune(**base, ray_address="auto", out=str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_a_changed_base_model_is_refused(base, tmp_path):
    """By the driver on resume, and by a run for a worker that starts later."""
    model = tmp_path / "model"
    shutil.copytree(base["model"], model)
    options = {**base, "model": str(model), "workers": 1, "steps": 40, "eval_every": 40}
    session = api.open_session(**options, out=str(tmp_path / "r"))
    records = session.records()
    while next(records).step < 10:
        pass
    spoil(model)
    Folder(tmp_path / "r").want_workers(2)
    refused = "the base model has changed, and it was not used"
    for _ in records:
        if refused not in (tmp_path / "r" / "metrics.jsonl").read_text():
            time.sleep(0.3)
    run = session.result()
    assert refused in (tmp_path / "r" / "metrics.jsonl").read_text()
    assert run.digest == api.finetune(**{**base, "steps": 40, "eval_every": 40}, out=str(tmp_path / "one")).digest
    with pytest.raises(JournalError, match="the base model has changed"):
        api.finetune(resume=str(tmp_path / "r"), steps=45)


def spoil(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_workers_can_be_added_and_sent_home_during_a_run(base, alone, tmp_path):
    session = api.open_session(**base, workers=1, out=str(tmp_path / "r"))
    seen = set()
    for record in session.records():
        if record.step in (20, 70):
            subprocess.run(
                [sys.executable, "-m", "mezzo", "workers", str(tmp_path / "r"), "3" if record.step == 20 else "2"],
                check=True,
                capture_output=True,
            )
        if 20 < record.step < 60:
            time.sleep(0.02)
        seen.add(len(session.engine.crew.up()))
    assert session.result().digest == alone["lora"]
    assert seen >= {1, 3, 2}
    assert Folder(tmp_path / "r").wanted_workers() == 2
    again = api.open_session(resume=str(tmp_path / "r"), workers=4, steps=base["steps"] + 1)
    again.close()
    assert Folder(tmp_path / "r").wanted_workers() is None, "asked of the driver that was there then"


# ---- kill -9


@pytest.mark.slow
def test_workers_killed_again_and_again_and_the_driver_twice(base, tmp_path):
    long = {**base, "steps": 400, "eval_every": 100}
    whole = api.finetune(**long, out=str(tmp_path / "whole"))
    run, killed = tmp_path / "r", 0
    for part in range(3):
        begun = (run / "journal.jsonl").exists()
        driver = start({"resume": str(run)} if begun else {**long, "workers": 2, "out": str(run)})
        before = read(run).steps if begun else 0
        wait_for(run / "journal.jsonl", before + 10)
        below = family(driver.pid)
        while driver.is_alive() and read(run).steps < 120 * (part + 1):
            if pids := workers_of(driver.pid):
                os.kill(pids[killed % len(pids)], signal.SIGKILL)
                killed += 1
            time.sleep(0.7)
        if part < 2:
            driver.kill()
            driver.join()
            assert gone(below), "workers end with their driver"
        else:
            driver.join(120)
            assert driver.exitcode == 0
    assert killed >= 3
    assert read(run).steps == 400
    assert read(run).marks[400] == whole.digest
    assert api.verify(run).ok


@pytest.mark.slow
def test_a_stopped_worker_and_then_all_processes_killed(base, alone, tmp_path):
    run = tmp_path / "r"
    driver = start({**base, "workers": 2, "worker_timeout": 4.0, "out": str(run)})
    wait_for(run / "journal.jsonl", 10)
    pids = workers_of(driver.pid)
    os.kill(pids[0], signal.SIGSTOP)
    wait_for(run / "journal.jsonl", read(run).steps + 10)
    for pid in (driver.pid, *family(driver.pid)):
        os.kill(pid, signal.SIGKILL)
    driver.join()
    assert 0 < read(run).steps < base["steps"]
    resumed = api.finetune(resume=str(run), workers=3)
    assert resumed.digest == alone["lora"]


def test_nothing_listens(base, tmp_path):
    session = api.open_session(**base, workers=2, out=str(tmp_path / "r"))
    try:
        assert not listening([os.getpid(), *family(os.getpid())])
    finally:
        session.close()
