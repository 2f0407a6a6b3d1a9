"""A reward function in processes: limits, failures, and processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mezzo.config import OPTIONS
from mezzo.evaluation.reward_calls import Failure
from mezzo.evaluation.reward_workers import RewardWorkers
from mezzo.types import LARGEST_REWARD
from tests.processes import patience, reset_signals, wait_until


def reward(completion):
    if completion == "sleep":
        time.sleep(60)
    if completion == "spin":
        while True:
            pass
    if completion == "big":
        return len(bytearray(2**30))
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "once" and not os.path.exists(os.environ["MARK"]):
        open(os.environ["MARK"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1 / len(completion)


@pytest.fixture
def workers():
    found = RewardWorkers(reward, count=2, seconds=0.4, memory_mb=256)
    yield found
    found.close()


def calls(*texts):
    return [{"completion": text} for text in texts]


def test_failures_are_outcomes_of_their_own(workers):
    found = workers(calls("ab", "sleep", "", "spin", "big", "kill", "abcd"))
    assert found[0] == [0.5] and found[6] == [0.25]
    kinds = [each.kind for each in found if isinstance(each, Failure)]
    assert kinds == ["time-out", "error", "time-out", "memory", "killed"]
    assert found[2].text.startswith("ZeroDivisionError: division by zero (test_reward_workers.py, line ")
    assert workers(calls("a")) == [[1.0]], "the workers go on"


def test_killed_processes_lose_nothing(workers, tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    assert workers(calls("once", "ab")) == [[0.25], [0.5]], "a worker that is killed is replaced and asked again"
    os.kill(workers.start()[0], signal.SIGKILL)
    assert workers(calls("ab")) == [[0.5]], "and so is the supervisor"


def test_closed_workers_leave_no_process(workers):
    workers(calls("ab"))
    pid, _ = workers.start()
    workers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_functions_may_be_closures_and_return_several_rewards_or_none():
    base = 3
    workers = RewardWorkers(lambda completions: [base + len(each) for each in completions])
    assert workers([{"completions": ["a", "bc"]}]) == [[4.0, 5.0]]
    (found,) = RewardWorkers(lambda completion: float("nan"))(calls("a"))
    assert found == Failure("error", "it returned a reward that is not a finite number")


@pytest.mark.parametrize("value", [0.5, np.array(0.5), np.float32(0.5), torch.tensor(0.5), [0.5], np.array([0.5])])
def test_numbers_of_all_libraries_are_rewards(value):
    assert RewardWorkers(lambda completion: value)(calls("a")) == [[0.5]]


def test_lists_arrays_tensors_and_generators_are_rewards_of_a_batch():
    batch = [{"completions": ["a", "bc"]}]
    for made in (np.array, torch.tensor, tuple, lambda values: (value for value in values)):
        assert RewardWorkers(lambda completions, made=made: made([1, 2]))(batch) == [[1.0, 2.0]]


@pytest.mark.parametrize("value", ["5", "0.5", b"1", {"reward": 1}, None, ["5"], [[1, 2]], 1j])
def test_what_is_no_number_is_refused_by_its_type(value):
    (found,) = RewardWorkers(lambda completion: value)(calls("a"))
    kind = type(value[0] if isinstance(value, list) else value).__name__
    assert found == Failure("error", f"it returned a value of type {kind}, and a reward is a number")


@pytest.mark.parametrize("value", [1e200, -1e200, 1_000_001, 10**400], ids=["1e200", "-1e200", "1e6+1", "1e400"])
def test_rewards_that_are_too_large_to_compute_with_fail(value):
    (found,) = RewardWorkers(lambda completion: value)(calls("a"))
    assert found.kind == "too large" and "beyond ±1,000,000: scale it down" in found.text
    assert RewardWorkers(lambda completion: -1e6)(calls("a")) == [[-1e6]]
    assert OPTIONS["failed_reward"].at_most == LARGEST_REWARD


class Silent(Exception):
    def __str__(self):
        raise RuntimeError


def fail(completion):
    if completion == "exit":
        sys.exit(3)
    raise {"silent": Silent(), "lines": ValueError("one\n  two\nthree"), "empty": ValueError()}[completion]


def test_failures_are_told_as_what_they_are_on_one_line():
    texts = [
        found.text.partition(" (test")[0] for found in RewardWorkers(fail)(calls("exit", "silent", "lines", "empty"))
    ]
    assert texts == ["SystemExit: 3", "Silent: its message cannot be shown", "ValueError: one two three", "ValueError"]


def test_function_prints_to_standard_error_and_reads_nothing(capfd):
    def chatty(completion):
        print("python", end="", flush=True)
        subprocess.run(["echo", "shell"], check=True)
        return len(sys.stdin.read()) + len(subprocess.run(["cat"], capture_output=True, check=True).stdout)

    assert RewardWorkers(chatty)(calls("a")) == [[0.0]]
    shown = capfd.readouterr()
    assert "shell" in shown.err and not shown.out


def start_and_wait(completion):
    """Note the numbers of this process and of one that it starts, then wait."""
    started = subprocess.Popen(["sleep", "600"])
    Path(os.environ["MARK"]).write_text(f"{os.getpid()} {started.pid}")
    started.wait()


def is_alive(pid):
    """A zombie, which nobody has waited for, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def noted_processes(path):
    wait_until(lambda: path.exists() and len(path.read_text().split()) == 2)
    return [int(pid) for pid in path.read_text().split()]


def test_time_out_ends_what_the_function_has_started(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(mark := tmp_path / "mark"))
    workers = RewardWorkers(start_and_wait, seconds=1.0)
    assert workers(calls("a"))[0].kind == "time-out"
    wait_until(lambda: not any(map(is_alive, noted_processes(mark))))
    workers.close()


@pytest.mark.parametrize("killed", ["run", "its group", "supervisor", "ctrl-c"])
def test_nothing_outlives_the_run(killed, tmp_path):
    """Also in the middle of a call: the run alone is killed, or together with the supervisor, or the supervisor alone."""
    code = (
        "from tests.test_reward_workers import *\n"
        "workers = RewardWorkers(start_and_wait, seconds=600)\n"
        f"open({str(tmp_path / 'supervisor')!r}, 'w').write(f'0 {{workers.start()[0]}}')\n"
        "workers(calls('a'))"
    )
    environment = {**os.environ, "MARK": str(tmp_path / "mark")}
    run = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, start_new_session=True, preexec_fn=reset_signals
    )
    pids = noted_processes(tmp_path / "mark")
    (_, supervisor) = noted_processes(tmp_path / "supervisor")
    if killed == "supervisor":
        (tmp_path / "mark").unlink()  # the call is made again
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)))
        pids += noted_processes(tmp_path / "mark")
    end = os.kill if killed == "run" else os.killpg
    end(run.pid, signal.SIGINT if killed == "ctrl-c" else signal.SIGKILL)
    assert run.wait(patience(20)) != 0, "it was ended in the middle of a call"
    wait_until(lambda: not any(map(is_alive, (*pids, supervisor))))
