"""A user's reward function in processes of its own: with a time limit and a memory limit, and nothing it does ends a run.

A supervisor is forked first and forks the workers, so that a worker is replaced without forking a process that has threads
and a GPU. Functions travel by the fork itself: they need be neither importable nor picklable.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from mezzo.errors import ConfigError, RunFailed
from mezzo.method.objectives import describe_failure

Call = Mapping[str, Any]
MIB = 2**20
# Times that a supervisor, or a call whose worker was killed, is started again.
RETRIES = 2
# Descriptors that a forked process may have inherited: locks, files and devices of the run are not its business.
MAX_DESCRIPTOR = 65536


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of a call that has no rewards: `kind` is error, time-out, memory or killed."""

    kind: str
    text: str


Outcome = list[float] | Failure


@dataclass
class RewardWorkers:
    """Calls a function in `count` processes; `seconds` and `memory_mb` limit each call."""

    function: Callable[..., Any]
    count: int = 1
    seconds: float = 10.0
    memory_mb: float = 1024.0
    _supervisor: tuple[int, Connection] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(os, "fork"):
            raise ConfigError("a reward function of your own needs an operating system that can fork: Linux or macOS")

    def __call__(self, calls: Sequence[Call]) -> list[Outcome]:
        """The rewards of every call, or why it has none."""
        for _ in range(1 + RETRIES):
            try:
                _, connection = self.start()
                connection.send(calls)
                return connection.recv()  # type: ignore[no-any-return]
            except (EOFError, OSError):  # it was killed; nothing is lost but time
                self.close()
        raise RunFailed(
            "the processes of the reward function are killed whenever they start: is the machine out of memory?"
        )

    def start(self) -> tuple[int, Connection]:
        """Fork the supervisor unless it runs: best before the process has threads and a GPU."""
        if self._supervisor is None:
            self._supervisor = _fork(lambda connection: _supervise(connection, self))
        return self._supervisor

    def close(self) -> None:
        if self._supervisor is not None:
            pid, connection = self._supervisor
            self._supervisor = None
            connection.close()
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def __del__(self) -> None:
        self.close()


def _fork(run: Callable[[Connection], None]) -> tuple[int, Connection]:
    """A process that runs `run` with its end of a pipe, and the other end."""
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads
        pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts the run, which ends after its step
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, MAX_DESCRIPTOR)
        run(theirs)
    finally:
        os._exit(0)


# ---- in the supervisor


@dataclass
class _Worker:
    pid: int
    connection: Connection
    place: int = -1
    """Of the call it works on; −1: idle."""
    deadline: float = math.inf

    def end(self) -> None:
        self.connection.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _supervise(connection: Connection, limits: RewardWorkers) -> None:
    """Answer requests until the run ends."""
    workers: list[_Worker] = []
    try:
        while True:
            calls = connection.recv()
            connection.send(_run_calls(calls, workers, limits))
    except (EOFError, OSError):
        for worker in workers:
            worker.end()


def _run_calls(calls: Sequence[Call], workers: list[_Worker], limits: RewardWorkers) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    waiting, kills = deque(range(len(calls))), [0] * len(calls)
    while len(found) < len(calls):
        while len(workers) < min(limits.count, len(calls)):
            workers.append(_Worker(*_fork(lambda pipe: _work(pipe, limits))))
        for worker in workers:
            if worker.place < 0 and waiting:
                worker.place, worker.deadline = waiting.popleft(), time.monotonic() + limits.seconds
                with contextlib.suppress(OSError):  # it was killed while it was idle: seen below
                    worker.connection.send(calls[worker.place])
        busy = [worker for worker in workers if worker.place >= 0]
        left = min(worker.deadline for worker in busy) - time.monotonic()
        ready = wait([worker.connection for worker in busy], max(0.0, left))
        for worker in busy:
            place, worker.place = worker.place, -1
            if worker.connection in ready:
                try:
                    found[place] = worker.connection.recv()
                    continue
                except (EOFError, OSError):
                    kills[place] += 1
                    if kills[place] <= RETRIES:
                        waiting.appendleft(place)
                    else:
                        found[place] = Failure("killed", "its process was killed")
            elif time.monotonic() >= worker.deadline:
                found[place] = Failure("time-out", f"it took more than {limits.seconds:g} s")
            else:
                worker.place = place
                continue
            worker.end()
            workers.remove(worker)
    return [found[place] for place in range(len(calls))]


# ---- in a worker


def _work(connection: Connection, limits: RewardWorkers) -> None:
    _limit_memory(int(limits.memory_mb * MIB))
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        _limit_cpu(limits.seconds)
        connection.send(call_function(limits.function, call))


def call_function(function: Callable[..., Any], call: Call) -> Outcome:
    """The finite rewards that a function returns, one or a sequence of them; a Failure where it does not."""
    try:
        result = function(**call)
        rewards = [float(reward) for reward in (result if hasattr(result, "__len__") else [result])]
    except MemoryError:
        return Failure("memory", "it needed more memory than it may have")
    except Exception as error:  # whatever a user's function raises
        return Failure("error", describe_failure(error))
    if not all(map(math.isfinite, rewards)):
        return Failure("error", "it returned a reward that is not a finite number")
    return rewards


def _limit_memory(size: int) -> None:
    """Beyond what the process has inherited."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            inherited = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (inherited + size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_cpu(seconds: float) -> None:
    """An endless loop must not outlive a supervisor that was killed."""
    with contextlib.suppress(OSError, ValueError):
        limit = math.ceil(time.process_time() + seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
