"""torchrun: ranks share the units, the result is that of one process, and a failed rank costs a restart, not the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mezzo import api
from mezzo.errors import ConfigError, JournalError
from mezzo.journal.journal import read
from tests.parallel.below import LOOPBACK, family, listening, rank_of
from tests.processes import wait_for


def torchrun(ranks: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *more]


def options_of(values: dict[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_ranks_ends_with_the_digest_of_one_process(base, alone, tmp_path, count):
    plan = tmp_path / "plan.json"
    spaces = ("lora", "full")
    plan.write_text(json.dumps([{**base, "space": space, "out": str(tmp_path / space)} for space in spaces]))
    command = [*torchrun(count), "-m", "tests.parallel.several_runs", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(plan.read_text())
    assert [run["digest"] for run in found] == [alone[space] for space in spaces]
    assert all(run["workers"]["count"] == count for run in found)
    assert all(0 < run["workers"]["bytes_per_step"] < 10_000 for run in found)


@pytest.mark.slow
def test_a_rank_that_drifts_or_returns_no_numbers_is_rebuilt(base, alone, tmp_path):
    plan, runs = tmp_path / "plan.json", []
    for kind in ("nan", "drift"):
        shutil.copytree(base["model"], tmp_path / kind)
        fault = {"fault": {"kind": kind, "after": 20}, "model": str(tmp_path / kind), "check_workers": 5}
        runs.append({**base, **fault, "out": str(tmp_path / f"run-{kind}")})
    plan.write_text(json.dumps(runs))
    command = [*torchrun(2), "-m", "tests.parallel.several_runs", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    nan, drift = json.loads(plan.read_text())
    assert nan["digest"] == alone["lora"]
    assert (nan["workers"]["rebuilt"], drift["workers"]["rebuilt"]) == (1, 2), "without a majority both are rebuilt"
    assert nan["workers"]["recomputed_units"] > 0
    assert api.verify(tmp_path / "run-drift").ok


@pytest.mark.slow
def test_a_silent_rank_and_a_killed_driver_are_healed_by_torchruns_restarts(base, tmp_path):
    long = {**base, "steps": 600, "eval_every": 200}
    whole = api.finetune(**long, out=str(tmp_path / "whole"))
    run, said = tmp_path / "r", tmp_path / "said.txt"
    train = [
        "-m",
        "mezzo",
        "train",
        *options_of({**long, "out": run, "worker_timeout": 5, "check_workers": 50}),
        "--json",
    ]
    with said.open("w") as stderr, (tmp_path / "printed").open("w") as stdout:
        process = subprocess.Popen([*torchrun(2, "--max-restarts", "3"), *train], stdout=stdout, stderr=stderr)
        try:
            wait_for(run / "journal.jsonl", 20, 120)
            ranks = {rank_of(pid): pid for pid in family(process.pid)}
            assert set(listening([ranks[0], ranks[1]])) <= set(LOOPBACK), "ranks of one machine talk inside it"
            os.kill(ranks[1], signal.SIGSTOP)
            silent(said, "a rank did not answer within 5 s")
            os.kill(ranks[1], signal.SIGCONT)
            wait_for(run / "journal.jsonl", read(run).steps + 20, 120)
            os.kill({rank_of(pid): pid for pid in family(process.pid)}[0], signal.SIGKILL)
            assert process.wait(200) == 0, said.read_text()[-3000:]
        finally:
            process.kill()
    lines = (tmp_path / "printed").read_text().splitlines()
    assert len(lines) == 1, "one rank prints"
    assert json.loads(lines[0])["digest"] == whole.digest
    assert api.verify(run).ok


def silent(said: Path, text: str) -> None:
    ends = time.monotonic() + 60
    while text not in said.read_text():
        assert time.monotonic() < ends, said.read_text()[-2000:]
        time.sleep(0.05)


def test_a_restart_goes_on_with_its_own_run_and_no_other(base, tmp_path, monkeypatch):
    short = {**base, "steps": 6, "eval_every": 3}
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
