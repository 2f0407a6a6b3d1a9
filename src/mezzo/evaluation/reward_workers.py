"""A user's reward function in processes of its own: with a time limit and a memory limit, and nothing it does ends a run.

A supervisor is forked first and forks the workers, so that a worker is replaced without forking a process that has threads
and a GPU. Functions travel by the fork itself: they need be neither importable nor picklable. A worker leads a session of its
own and is ended together with the processes that the function has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import resource
import signal
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from mezzo.errors import ConfigError, RunFailed
from mezzo.evaluation.reward_calls import Call, Failure, Outcome, call_function

MIB = 2**20
# Times that a supervisor, or a call whose worker was killed, is started again.
RETRIES = 2
# Descriptors that a forked process may have inherited: locks, files and devices of the run are not its business.
MAX_DESCRIPTOR = 65536
PR_SET_PDEATHSIG = 1
# Seconds between looks at whether the parent still lives, and those that a supervisor has to end its workers.
LOOK, PATIENCE = 1.0, 5.0


@dataclass
class RewardWorkers:
    """Calls a function in `count` processes; `seconds` and `memory_mb` limit each call."""

    function: Callable[..., Any]
    count: int = 1
    seconds: float = 10.0
    memory_mb: float = 1024.0
    _supervisor: tuple[int, Connection] | None = field(default=None, repr=False)
    _end: Callable[[], Any] = field(default=lambda: None, repr=False, compare=False)
    """Ends the supervisor, once; also when nobody closes this."""

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
            except BaseException:  # Ctrl-C: its answer must not be taken for that to the next request
                self.close()
                raise
        raise RunFailed(
            "the processes of the reward function are killed whenever they start: is the machine out of memory?"
        )

    def start(self) -> tuple[int, Connection]:
        """Fork the supervisor unless it runs: best before the process has threads and a GPU."""
        if self._supervisor is None:
            self._supervisor = _fork(lambda connection: _supervise(connection, self))
            # Unlike __del__, it comes before the connection's own end, which would close the descriptor first.
            self._end = weakref.finalize(self, _end_supervisor, *self._supervisor, os.getpid())
        return self._supervisor

    def close(self) -> None:
        """End all processes; another call starts new ones."""
        self._supervisor = None
        self._end()


def _end_supervisor(pid: int, connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the run, which has copies of everything
        return
    with contextlib.suppress(OSError):
        connection.send(None)
    connection.close()
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(run: Callable[[Connection], None]) -> tuple[int, Connection]:
    """A process that runs `run` with its end of a pipe, and the other end."""
    ours, theirs = Pipe()
    for file in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            file.flush()  # or the fork would print it a second time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads
        pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        gc.freeze()  # what the run has left to collect would close descriptors by their numbers
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
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with contextlib.suppress(OSError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(self.pid, 0)


def _supervise(connection: Connection, limits: RewardWorkers) -> None:
    """Answer requests until the run ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run handles them and then ends this process
        signal.signal(number, signal.SIG_IGN)
    _redirect_standard_files()
    workers: list[_Worker] = []
    run = os.getppid()
    try:
        while True:
            while not connection.poll(LOOK):
                if os.getppid() != run:  # somebody may have inherited its end of the pipe
                    return
            if (calls := connection.recv()) is None:
                return
            connection.send(_run_calls(calls, workers, limits, connection))
    except (EOFError, OSError):
        pass
    finally:
        for worker in workers:
            worker.end()


def _redirect_standard_files() -> None:
    """What a function prints goes to standard error: standard output is the run's result. And it reads nothing."""
    with contextlib.suppress(OSError):  # the run may have been started without them
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        os.dup2(2, 1)
        # New files, since those of a test or a notebook may write to descriptors that are closed here.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run_calls(calls: Sequence[Call], workers: list[_Worker], limits: RewardWorkers, run: Connection) -> list[Outcome]:
    """The outcomes of calls; EOFError when the run ends meanwhile."""
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
        ready = wait([run, *(worker.connection for worker in busy)], max(0.0, left))
        if run in ready:
            raise EOFError
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
    """Answer calls until the supervisor ends, then end with all that the function has started."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        _notice_death(os.getppid())
        _limit_memory(int(limits.memory_mb * MIB))
        while True:
            call = connection.recv()
            _limit_cpu(limits.seconds)
            connection.send(call_function(limits.function, call))
    finally:
        _kill_group()


def _kill_group(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


def _notice_death(supervisor: int) -> None:
    """End also in the middle of a call when the supervisor is killed: Linux then sends a signal, here one that nobody uses."""
    if sys.platform == "linux":
        signal.signal(signal.SIGRTMAX, _kill_group)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGRTMAX)
        if os.getppid() != supervisor:
            _kill_group()


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
