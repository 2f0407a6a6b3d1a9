"""Calls into SGLang's workers and their answers: `collective_rpc` carries a number, the message lies in a private folder.

SGLang's call into its workers returns nothing and prints its parameters to the log, so that it should carry little. Each
rank writes its own answer: an error on a rank other than the first would else be lost.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mezzo.errors import MezzoError, RunFailed
from mezzo.types import Update

METHOD = "mezzo_call"
MEMORY = Path("/dev/shm")


class Channel:
    """The driver's end: one folder, readable by this user alone, in memory where the system offers that."""

    def __init__(self, rpc: Callable[..., None], ranks: int) -> None:
        self.rpc, self.ranks, self.count = rpc, ranks, 0
        self.ahead: list[Update] = []
        """Updates that the workers apply before they do anything else: they travel with the next message, because one of
        their own would cost a step half a millisecond or more."""
        self.folder = Path(tempfile.mkdtemp(prefix="mezzo-", dir=MEMORY if MEMORY.is_dir() else None))

    def call(self, function: str, **values: Any) -> Any:
        """The first rank's answer."""
        return self.call_all(function, **values)[0]

    def call_all(self, function: str, **values: Any) -> list[Any]:
        """The answers of all ranks; an error of any of them is raised."""
        self.count += 1
        request = self.folder / f"{self.count}.request"
        request.write_bytes(pickle.dumps((function, values, tuple(self.ahead)), protocol=5))
        self.ahead.clear()
        try:
            self.rpc(METHOD, request=str(request))
        except AssertionError as error:
            raise RunFailed(f"SGLang's workers refused a call: {error}. Is mezzo installed beside SGLang?") from None
        answers = [self._taken(request, rank) for rank in range(self.ranks)]
        request.unlink()
        return answers

    def _taken(self, request: Path, rank: int) -> Any:
        path = answer_path(request, rank)
        if not path.is_file():
            raise RunFailed(f"SGLang's worker {rank} did not answer; its log says why. The run can be resumed")
        failed, value = pickle.loads(path.read_bytes())
        path.unlink()
        if isinstance(failed, MezzoError):
            raise failed
        if failed:
            raise RunFailed(f"SGLang's worker {rank} failed: {failed}\n{value}")
        return value

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


Work = Callable[[str, dict[str, Any], tuple[Update, ...]], Any]


def answer(request: Path, rank: int, work: Work) -> None:
    """A worker's end: do what the message says and leave the result, or the error, beside it."""
    try:
        reply: tuple[Any, Any] = ("", work(*pickle.loads(request.read_bytes())))
    except MezzoError as error:
        reply = (error, None)
    except Exception as error:  # whatever a worker meets must reach the driver, not SGLang's log
        reply = (f"{type(error).__name__}: {error}", traceback.format_exc())
    path = answer_path(request, rank)
    with contextlib.suppress(FileNotFoundError):
        path.write_bytes(pickle.dumps(reply, protocol=5))


def answer_path(request: Path, rank: int) -> Path:
    return request.with_suffix(f".{rank}")
