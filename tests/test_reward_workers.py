"""A reward function in processes: limits, failures, and processes that are killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from mezzo.evaluation.reward_workers import Failure, RewardWorkers


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
