"""Runs in processes of their own, to be killed. A fork server that has imported everything makes starting one cheap."""

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


def finetune(options: dict[str, Any], largest_file: int | None = None, said: str | None = None) -> None:
    """Body of a child: train, and exit as the command line would; `largest_file` makes the disk run full, `said` is a file
    for the error message."""
    from mezzo import api
    from mezzo.errors import MezzoError

    if largest_file:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    try:
        api.finetune(**options)
    except MezzoError as error:
        if said:
            Path(said).write_text(str(error))
        os._exit(error.exit_code)


def start(options: dict[str, Any], largest_file: int | None = None, said: str | None = None) -> Any:
    process = context.Process(target=finetune, args=(options, largest_file, said))
    process.start()
    return process


def kill_after(process: Any, seconds: float) -> bool:
    """SIGKILL after a while; True if it was still running then."""
    process.join(seconds)
    alive = process.is_alive()
    if alive:
        process.kill()
    process.join()
    return alive


def wait_for(path: Any, lines: int, seconds: float = 60) -> None:
    """Until a file has at least that many lines."""
    ends = time.monotonic() + seconds
    while not (path.exists() and path.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < ends, f"{path} did not grow to {lines} lines"
        time.sleep(0.01)
