"""Calls into SGLang's workers and their answers: `collective_rpc` carries a path, the message lies in a private folder.

SGLang's call into its workers returns nothing and logs its parameters, so it should carry little. Each rank writes its own
answer; otherwise an error on any rank but the first would be lost.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mezzo.engines.sglang.inprocess import wire
from mezzo.errors import MezzoError, RunFailed
from mezzo.types import Update

METHOD = "mezzo_call"
MEMORY = Path("/dev/shm")


class Channel:
    """The driver's end: a folder that only this user can read, in memory where the system offers that."""

    def __init__(self, rpc: Callable[..., None], ranks: int) -> None:
        self.rpc, self.ranks, self.count = rpc, ranks, 0
        self.pending_updates: list[Update] = []
        """Updates that the workers apply before they do anything else. They travel with the next message, because a message
        of their own would cost a step half a millisecond or more."""
        self.folder = Path(tempfile.mkdtemp(prefix="mezzo-", dir=MEMORY if MEMORY.is_dir() else None))

    def call(self, method: str, **values: Any) -> Any:
        """The first rank's answer to a call of a method of its worker."""
        return self.call_all(method, **values)[0]

    def call_all(self, method: str, **values: Any) -> list[Any]:
        """The answers of all ranks; an error on any of them is raised."""
        self.count += 1
        request = self.folder / f"{self.count}.request"
        request.write_bytes(wire.encode((method, values, tuple(self.pending_updates))))
        self.pending_updates.clear()
        try:
            self.rpc(METHOD, request=str(request))
        except AssertionError as error:
            raise RunFailed(f"SGLang's workers refused a call: {error}. Is mezzo installed beside SGLang?") from None
        answers = [self._read_answer(request, rank) for rank in range(self.ranks)]
        request.unlink()
        return answers

    def _read_answer(self, request: Path, rank: int) -> Any:
        path = answer_path(request, rank)
        if not path.is_file():
            raise RunFailed(f"SGLang's worker {rank} did not answer; its log says why. The run can be resumed")
        error, value = wire.decode(path.read_bytes())
        path.unlink()
        if isinstance(error, MezzoError):
            raise error
        if error:
            raise RunFailed(f"SGLang's worker {rank} failed: {error}\n{value}")
        return value

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


Handler = Callable[[str, dict[str, Any], tuple[Update, ...]], Any]


def answer_request(request: Path, rank: int, handler: Handler) -> None:
    """A worker's end: do what the message says and leave the result, or the error, beside it."""
    try:
        reply: tuple[Any, Any] = ("", handler(*wire.decode(request.read_bytes())))
    except MezzoError as error:
        reply = (error, None)
    except Exception as error:  # any error must reach the driver, not only SGLang's log
        reply = (f"{type(error).__name__}: {error}", traceback.format_exc())
    with contextlib.suppress(FileNotFoundError):
        answer_path(request, rank).write_bytes(wire.encode(reply))


def answer_path(request: Path, rank: int) -> Path:
    return request.with_suffix(f".{rank}")
