"""Training runs in child processes that tests kill. A fork server with everything imported makes starting one cheap."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "transformers", "mezzo.api", "tests.processes"])


def finetune(options: dict[str, Any], max_file_bytes: int | None = None, error_file: str | None = None) -> None:
    """Body of the child: train, and exit with the exit code of the command line.

    `max_file_bytes` simulates a full disk; the error message is written to `error_file`.
    """
    from mezzo import api
    from mezzo.errors import MezzoError

    if max_file_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    try:
        api.finetune(**options)
    except MezzoError as error:
        if error_file:
            Path(error_file).write_text(str(error))
        os._exit(error.exit_code)


def start_run(options: dict[str, Any], max_file_bytes: int | None = None, error_file: str | None = None) -> Any:
    process = context.Process(target=finetune, args=(options, max_file_bytes, error_file))
    process.start()
    return process


def kill_after(process: Any, seconds: float) -> bool:
    """Send SIGKILL after a while; return whether the process was still running then."""
    process.join(seconds)
    alive = process.is_alive()
    if alive:
        process.kill()
    process.join()
    return alive


def wait_for_lines(path: Any, lines: int) -> None:
    """Wait until a file has at least that many lines."""
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= lines, f"{path} has {lines} lines")


def wait_until(condition: Callable[[], bool], name: str = "the condition holds", seconds: float = 120) -> None:
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"{patience(seconds):.0f} seconds passed before {name}"
        time.sleep(0.01)


def patience(seconds: float) -> float:
    """How long to wait on this machine for what an idle laptop does well within `seconds`."""
    return seconds * max(_slowness(), os.getloadavg()[0] / (os.cpu_count() or 1))


@cache
def _slowness() -> float:
    """By a loop that takes such a laptop 0.05 seconds."""
    start = time.perf_counter()
    sum(number * number for number in range(1_000_000))
    return max(1.0, (time.perf_counter() - start) / 0.05)


def reset_signals() -> None:
    """In a child before it starts, as in a terminal: what a shell runs in the background, tests included, ignores Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
