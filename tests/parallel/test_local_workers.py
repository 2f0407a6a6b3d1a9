"""Local workers give the result of a single process, whatever happens to them."""

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
from mezzo.journal.content import read
from mezzo.runs.folder import Folder
from tests.parallel.faulty_engine import FACTORY, set_fault
from tests.parallel.process_tree import descendants, end_within, listening_addresses, worker_pids
from tests.processes import patience, start_run, wait_for_lines


@pytest.mark.parametrize("space", ["lora", "full"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_workers_ends_with_the_digest_of_one_process(
    options, single_process_digests, tmp_path, space, count
):
    run = api.finetune(**{**options, "space": space}, workers=count, out=str(tmp_path / "r"))
    assert run.digest == single_process_digests[space]
    assert run.workers["count"] == count
    assert run.workers["lost"] == run.workers["rebuilt"] == run.workers["recomputed_units"] == 0
    assert 0 < run.workers["bytes_per_step"] < 10_000
    assert 0 < run.workers["waiting"] < 1
    steps = [line for line in Folder(tmp_path / "r").metrics() if line["event"] == "step"]
    assert all(0 < line["bytes"] < 10_000 and 0 <= line["waiting"] <= 1 for line in steps)
    assert api.verify(tmp_path / "r").ok


def test_several_directions_per_step_end_with_the_digest_of_one_process(options, tmp_path):
    samples = {**options, "samples": 3, "steps": 10, "eval_every": 5}
    single = api.finetune(**samples, out=str(tmp_path / "single"))
    assert api.finetune(**samples, workers=2, out=str(tmp_path / "two")).digest == single.digest


def test_rewards_over_generated_text_end_with_the_digest_of_one_process(tmp_path):
    text = {"model": "mezzo/llama-mini", "objective": "tests.parallel.rewards:short", "steps": 2, "batch_size": 4}
    text |= {"micro_batch": 2, "max_new_tokens": 3, "threads": 1, "device": "cpu", "eval_limit": 4, "space": "lora"}
    single = api.finetune(**text, out=str(tmp_path / "single"))
    assert api.finetune(**text, workers=2, out=str(tmp_path / "two")).digest == single.digest


# ---- faulty workers


@pytest.fixture
def run_with_fault(options, tmp_path, monkeypatch):
    """A run whose first workers have a fault, in a model folder of its own."""
    model = tmp_path / "model"
    shutil.copytree(options["model"], model)
    monkeypatch.setitem(ENGINES, "torch", dataclasses.replace(ENGINES["torch"], factory=FACTORY))

    def run(workers: int = 2, **changes: Any) -> Any:
        fault = {name: changes.pop(name) for name in ("kind", "after", "times") if name in changes}
        set_fault(model, **fault)
        return api.finetune(**{**options, "model": str(model), "workers": workers, **changes}, out=str(tmp_path / "r"))

    return run


@pytest.mark.parametrize("kind", ["exit", "shape", "text", "raise"])
def test_worker_that_exits_or_sends_invalid_replies_is_replaced(run_with_fault, single_process_digests, tmp_path, kind):
    times = 1 if kind == "raise" else 2  # two could raise on the same unit, which ends the run
    run = run_with_fault(kind=kind, times=times, after=20)
    assert run.digest == single_process_digests["lora"]
    assert run.workers["lost"] == times
    reports = [line["text"] for line in Folder(tmp_path / "r").metrics() if line["event"] == "worker"]
    assert len(reports) == times
    assert all("a new one starts from the base model and the journal" in text for text in reports)


def test_only_worker_that_exits_is_replaced(run_with_fault, single_process_digests):
    run = run_with_fault(workers=1, kind="exit", after=50)
    assert (run.digest, run.workers["lost"]) == (single_process_digests["lora"], 1)


def test_nan_scores_are_recomputed_and_their_worker_replaced(run_with_fault, single_process_digests):
    run = run_with_fault(kind="nan", after=20)
    assert run.digest == single_process_digests["lora"]
    assert run.skipped_steps == 0
    assert run.workers["recomputed_units"] > 0
    assert run.workers["lost"] == 1


def test_nan_scores_of_two_workers_are_genuine(run_with_fault):
    """The loss itself is not a number: the step is skipped, and no worker is replaced."""
    with pytest.raises(RunFailed, match="not a number for 20 steps in a row"):
        run_with_fault(kind="nan", after=0, times=2, lr=0.0, eval_every=100)


def test_worker_with_drifted_weights_is_rebuilt(run_with_fault, tmp_path):
    run = run_with_fault(workers=3, kind="drift", after=10, check_workers=5)
    # On a busy machine a second worker may be late and replaced too; on an idle one it is one.
    assert run.workers["rebuilt"] == run.workers["lost"] >= 1
    assert api.verify(tmp_path / "r").ok, "the journal and its marks are those of the healthy majority"


def test_worker_with_wrong_scores_is_rebuilt(run_with_fault, tmp_path):
    """Wrong scores that look right: noise on one worker's scores."""
    run = run_with_fault(workers=3, kind="noise", after=10, check_workers=5)
    assert run.workers["rebuilt"] == 1
    assert api.verify(tmp_path / "r").ok


def test_all_workers_are_rebuilt_without_a_majority(run_with_fault, tmp_path):
    run = run_with_fault(workers=2, kind="drift", after=10, check_workers=5)
    assert run.workers["rebuilt"] == 2
    assert api.verify(tmp_path / "r").ok


def test_units_of_sleeping_worker_go_to_others(run_with_fault, single_process_digests):
    start_time = time.monotonic()
    run = run_with_fault(kind="sleep", after=20, worker_timeout=3.0)
    assert run.digest == single_process_digests["lora"]
    assert run.workers["late_units"] > 0
    assert time.monotonic() - start_time < 500, "the run did not wait for the sleeping worker"


def test_workers_that_never_reply_end_the_run(run_with_fault):
    with pytest.raises(RunFailed, match="times in a row and did no work in between"):
        run_with_fault(workers=1, kind="exit", after=0, times=100)


def test_invalid_options_are_explained_as_in_a_single_process(options, tmp_path):
    with pytest.raises(ConfigError, match="was asked for, but torch"):
        api.finetune(**{**options, "device": "cuda:7"}, workers=2, out=str(tmp_path / "r"))
    with pytest.raises(ConfigError, match="add --workers N"):
        api.finetune(**options, ray_address="auto", out=str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_changed_base_model_is_refused(options, tmp_path):
    """On resume, and in a worker that starts later."""
    model = tmp_path / "model"
    shutil.copytree(options["model"], model)
    short = {**options, "steps": 40, "eval_every": 40}
    session = api.open_session(**{**short, "model": str(model), "workers": 1}, out=str(tmp_path / "r"))
    records = session.records()
    while next(records).step < 10:
        pass
    change_weight(model)
    Folder(tmp_path / "r").want_workers(2)
    refused = "the base model has changed, and it was not used"
    for _ in records:
        if refused not in (tmp_path / "r" / "metrics.jsonl").read_text():
            time.sleep(0.3)
    run = session.result()
    assert refused in (tmp_path / "r" / "metrics.jsonl").read_text()
    assert run.digest == api.finetune(**short, out=str(tmp_path / "single")).digest
    with pytest.raises(JournalError, match="the base model has changed"):
        api.finetune(resume=str(tmp_path / "r"), steps=45)


def change_weight(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_workers_can_be_added_and_removed_during_a_run(options, single_process_digests, tmp_path):
    session = api.open_session(**options, workers=1, out=str(tmp_path / "r"))
    counts = set()
    for record in session.records():
        if record.step in (20, 70):
            subprocess.run(
                [sys.executable, "-m", "mezzo", "workers", str(tmp_path / "r"), "3" if record.step == 20 else "2"],
                check=True,
                capture_output=True,
            )
        if 20 < record.step < 60:
            time.sleep(0.02)
        counts.add(session.engine.ready_count)
    assert session.result().digest == single_process_digests["lora"]
    assert counts >= {1, 3, 2}
    assert Folder(tmp_path / "r").wanted_workers() == 2
    api.open_session(resume=str(tmp_path / "r"), workers=4, steps=options["steps"] + 1).close()
    assert Folder(tmp_path / "r").wanted_workers() is None, "that request was for the earlier driver"


# ---- kill -9


@pytest.mark.slow
def test_killing_workers_repeatedly_and_the_driver_twice_gives_same_digest(options, tmp_path):
    long = {**options, "steps": 400, "eval_every": 100}
    expected = api.finetune(**long, out=str(tmp_path / "expected"))
    run, killed = tmp_path / "r", 0
    for part in range(3):
        is_resumed = (run / "journal.jsonl").exists()
        driver = start_run({"resume": str(run)} if is_resumed else {**long, "workers": 2, "out": str(run)})
        steps_before = read(run).steps if is_resumed else 0
        wait_for_lines(run / "journal.jsonl", steps_before + 10)
        children = descendants(driver.pid)
        while driver.is_alive() and read(run).steps < 120 * (part + 1):
            if pids := worker_pids(driver.pid):
                os.kill(pids[killed % len(pids)], signal.SIGKILL)
                killed += 1
            time.sleep(0.7)
        if part < 2:
            driver.kill()
            driver.join()
            assert end_within(children), "workers end with their driver"
        else:
            driver.join(patience(120))
            assert driver.exitcode == 0
    assert killed >= 3
    assert read(run).steps == 400
    assert read(run).marks[400] == expected.digest
    assert api.verify(run).ok


@pytest.mark.slow
def test_resume_after_stopped_worker_and_killing_all_processes_gives_same_digest(
    options, single_process_digests, tmp_path
):
    run = tmp_path / "r"
    driver = start_run({**options, "workers": 2, "worker_timeout": 4.0, "out": str(run)})
    wait_for_lines(run / "journal.jsonl", 10)
    pids = worker_pids(driver.pid)
    os.kill(pids[0], signal.SIGSTOP)
    wait_for_lines(run / "journal.jsonl", read(run).steps + 10)
    for pid in (driver.pid, *descendants(driver.pid)):
        os.kill(pid, signal.SIGKILL)
    driver.join()
    assert 0 < read(run).steps < options["steps"]
    resumed = api.finetune(resume=str(run), workers=3)
    assert resumed.digest == single_process_digests["lora"]


def test_no_process_listens_on_a_network_address(options, tmp_path):
    session = api.open_session(**options, workers=2, out=str(tmp_path / "r"))
    try:
        assert not listening_addresses([os.getpid(), *descendants(os.getpid())])
    finally:
        session.close()
