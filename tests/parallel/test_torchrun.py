"""torchrun: ranks share the units, the result is that of one process, and a run survives a failed rank by a restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mezzo import api
from mezzo.errors import ConfigError, JournalError
from mezzo.journal.content import read
from tests.parallel.process_tree import LOOPBACK, descendants, listening_addresses, torchrun_rank
from tests.processes import patience, wait_for_lines, wait_until


def torchrun_command(ranks: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *more]


def to_arguments(values: dict[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_ranks_ends_with_the_digest_of_one_process(options, single_process_digests, tmp_path, count):
    plan = tmp_path / "plan.json"
    spaces = ("lora", "full")
    plan.write_text(json.dumps([{**options, "space": space, "out": str(tmp_path / space)} for space in spaces]))
    command = [*torchrun_command(count), "-m", "tests.parallel.torchrun_runs", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(plan.read_text())
    assert [run["digest"] for run in runs] == [single_process_digests[space] for space in spaces]
    assert all(run["workers"]["count"] == count for run in runs)
    assert all(0 < run["workers"]["bytes_per_step"] < 10_000 for run in runs)


@pytest.mark.slow
def test_rank_with_drifted_weights_or_nan_scores_is_rebuilt(options, single_process_digests, tmp_path):
    plan, runs = tmp_path / "plan.json", []
    for kind in ("nan", "drift"):
        shutil.copytree(options["model"], tmp_path / kind)
        fault = {"fault": {"kind": kind, "after": 20}, "model": str(tmp_path / kind), "check_workers": 5}
        runs.append({**options, **fault, "out": str(tmp_path / f"run-{kind}")})
    plan.write_text(json.dumps(runs))
    command = [*torchrun_command(2), "-m", "tests.parallel.torchrun_runs", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 0, done.stderr[-3000:]
    nan, drift = json.loads(plan.read_text())
    assert nan["digest"] == single_process_digests["lora"]
    assert (nan["workers"]["rebuilt"], drift["workers"]["rebuilt"]) == (1, 2), "without a majority both are rebuilt"
    assert nan["workers"]["recomputed_units"] > 0
    assert api.verify(tmp_path / "run-drift").ok


@pytest.mark.slow
def test_torchrun_restarts_recover_from_stopped_rank_and_killed_driver(options, tmp_path):
    long = {**options, "steps": 600, "eval_every": 200}
    expected = api.finetune(**long, out=str(tmp_path / "expected"))
    run, log, seconds = tmp_path / "r", tmp_path / "log.txt", round(patience(5))
    train = [
        "-m",
        "mezzo",
        "train",
        *to_arguments({**long, "out": run, "worker_timeout": seconds, "check_workers": 50}),
        "--json",
    ]
    with log.open("w") as stderr, (tmp_path / "stdout").open("w") as stdout:
        process = subprocess.Popen([*torchrun_command(2, "--max-restarts", "3"), *train], stdout=stdout, stderr=stderr)
        try:
            wait_for_lines(run / "journal.jsonl", 20)
            pids = {torchrun_rank(pid): pid for pid in descendants(process.pid)}
            assert set(listening_addresses([pids[0], pids[1]])) <= set(LOOPBACK), "ranks of one machine use loopback"
            os.kill(pids[1], signal.SIGSTOP)
            wait_for_text(log, f"a rank did not answer within {seconds} s")
            os.kill(pids[1], signal.SIGCONT)
            wait_for_lines(run / "journal.jsonl", read(run).steps + 20)
            pids = {torchrun_rank(pid): pid for pid in descendants(process.pid)}
            os.kill(pids[0], signal.SIGKILL)
            assert process.wait(patience(200)) == 0, log.read_text()[-3000:]
        finally:
            process.kill()
    lines = (tmp_path / "stdout").read_text().splitlines()
    assert len(lines) == 1, "one rank prints"
    assert json.loads(lines[0])["digest"] == expected.digest
    assert api.verify(run).ok


def wait_for_text(path: Path, text: str) -> None:
    wait_until(lambda: text in path.read_text(), f"{path} says {text!r}")


def test_restart_resumes_its_own_run_and_no_other(options, tmp_path, monkeypatch):
    short = {**options, "steps": 6, "eval_every": 3}
    api.finetune(**{**short, "steps": 4}, out=str(tmp_path / "r"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match="add --out DIR"):
        api.open_session(**short)
    with pytest.raises(JournalError, match="holds a run already"):
        api.open_session(**short, out=str(tmp_path / "r"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(JournalError, match=r"holds another run \(lr differs\)"):
        api.open_session(**{**short, "lr": 0.5}, out=str(tmp_path / "r"))
    assert api.finetune(**short, out=str(tmp_path / "r")).steps == 6
