"""Training runs in child processes that tests kill. A fork server with everything imported makes starting one cheap."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
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


def wait_for_lines(path: Any, lines: int, seconds: float = 60) -> None:
    """Wait until a file has at least that many lines."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < deadline, f"{path} did not grow to {lines} lines"
        time.sleep(0.01)
