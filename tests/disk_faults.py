"""A disk that fails: a short run is killed at, or gets an error from, each of its file operations in turn.

The suite tries a part of them. All of them, about twenty minutes: `python -m tests.disk_faults`.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The calls by which Python reaches files, by module. What a file object does (io.open) is counted as calls of its own.
CALLS = {
    os: ("open", "close", "pread", "read", "write", "lseek", "fsync", "ftruncate", "stat", "lstat", "fstat")
    + ("rename", "replace", "unlink", "mkdir", "listdir"),
    io: ("open",),
    fcntl: ("flock",),
}
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EMFILE)
KILLED, REFUSED, TRACEBACK = 9, 2, 3


class FaultyFile(io.FileIO):
    """A file that is read by a buffer."""

    disk: FaultyDisk

    def readinto(self, buffer: Any) -> int:
        self.disk.count("io.read")
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self.disk.count("io.read")
        return super().readall()

    def seek(self, place: int, start: int = 0) -> int:
        self.disk.count("io.seek")
        return super().seek(place, start)

    def close(self) -> None:
        if not self.closed:
            self.disk.forget(self.fileno())
            super().close()  # also where the call fails
            self.disk.count("io.close")


@dataclass
class FaultyDisk:
    """Wraps the calls by which Python reaches a folder. The call with number `at` fails with `error`, or ends the process."""

    folder: Path
    at: int = -1
    error: int | None = None
    log: list[str] = field(default_factory=list)
    _files: set[int] = field(default_factory=set)

    def install(self) -> None:
        for module, names in CALLS.items():
            for name in names:
                wrap = self._wrap_open if module is io else self._wrap
                setattr(module, name, wrap(name, getattr(module, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any = ".", *rest: Any, **named: Any) -> Any:
            if not self._is_inside(target):
                return real(target, *rest, **named)
            if name == "close":
                self._files.discard(target)
            if name == "write":  # a part of it arrives
                self.count(name, lambda: real(target, bytes(rest[0])[: len(rest[0]) // 2]))
            else:
                self.count(name, lambda: real(target) if name == "close" and self.error else None)
            result = real(target, *rest, **named)
            if name == "open":
                self._files.add(result)
            return result

        return call

    def _wrap_open(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if not self._is_inside(target):
                return real(target, mode, *rest, **named)
            assert mode == "rb", "files of a run are written by descriptors"
            self.count("io.open")
            file = FaultyFile(target)
            file.disk = self
            self._files.add(file.fileno())
            return io.BufferedReader(file)

        return call

    def count(self, name: str, before: Callable[[], Any] = lambda: None) -> None:
        """A call of the run; the one that fails does something before."""
        self.log.append(name)
        if len(self.log) - 1 == self.at:
            before()
            if self.error is None:
                os._exit(KILLED)
            raise OSError(self.error, os.strerror(self.error))

    def forget(self, file: int) -> None:
        self._files.discard(file)

    def _is_inside(self, target: Any) -> bool:
        if isinstance(target, int):
            return target in self._files
        return isinstance(target, (str, os.PathLike)) and Path(target).is_relative_to(self.folder)


def train_on(disk: FaultyDisk, options: dict[str, Any], report: Path) -> int:
    """Train in a forked process whose disk fails; its exit code. What it said, or its calls, are in the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; the child does not use them
        child = os.fork()
    if child == 0:
        code, text = TRACEBACK, ""
        os.dup2(os.open(report.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            code, text = _train(disk, options)
        except BaseException:
            text = traceback.format_exc()
        finally:
            file = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(file, text.encode())
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _train(disk: FaultyDisk, options: dict[str, Any]) -> tuple[int, str]:
    from mezzo import api
    from mezzo.errors import MezzoError

    disk.install()
    try:
        api.finetune(**options)
    except MezzoError as error:
        return REFUSED, str(error)
    return 0, "\n".join(disk.log)


def start_again(options: dict[str, Any]) -> str:
    """What a requeued job does: continue the run, or start it where there is none. The digest."""
    from mezzo import api

    holds_run = (Path(options["out"]) / "journal.jsonl").exists()
    limits = {"resume": options["out"], "steps": options["steps"]}
    return api.finetune(**(limits if holds_run else options)).digest


def leftovers(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith(".tmp"))


@dataclass
class Trial:
    """A run whose disk fails at one call, and the start after it."""

    call: str
    at: int
    error: int | None
    code: int
    said: str
    digest: str
    leftovers: list[str]
    errors: str = ""
    """What was written to standard error, where Python shows what it ignores."""

    def problems(self, digest: str) -> Iterator[str]:
        if self.code not in ((KILLED,) if self.error is None else (0, REFUSED)):
            yield f"ended with code {self.code}: {self.said}"
        if self.code == REFUSED and len(self.said.splitlines()) != 1:
            yield f"did not say what happened in one line: {self.said}"
        if "Traceback" in self.errors:
            yield f"showed a traceback: {self.errors}"
        if self.digest != digest:
            yield "the next start ended at another digest"
        if self.leftovers:
            yield f"leftovers: {self.leftovers}"

    def __str__(self) -> str:
        what = "killed" if self.error is None else errno.errorcode[self.error]
        return f"{what} at call {self.at}, {self.call}"


class Trials:
    """All that is known of the undisturbed run: its digest and its calls. Where it has `begun`, it is a resume of that run."""

    def __init__(self, options: dict[str, Any], folder: Path, begun: Path | None = None) -> None:
        self.options, self.folder, self.begun, self._count = options, folder, begun, 0
        folder.mkdir(exist_ok=True)
        whole = folder / "whole"
        assert train_on(FaultyDisk(whole), self._prepare(whole), folder / "said") == 0
        self.calls = (folder / "said").read_text().split()
        self.digest = start_again({**options, "out": str(whole)})

    def _prepare(self, out: Path) -> dict[str, Any]:
        """The options of a run in a new folder."""
        if self.begun is None:
            return {**self.options, "out": str(out)}
        shutil.copytree(self.begun, out)
        return {"resume": str(out), "steps": self.options["steps"]}

    def run(self, at: int, error: int | None) -> Trial:
        self._count += 1
        out = self.folder / str(self._count)
        code = train_on(FaultyDisk(out, at, error), self._prepare(out), self.folder / "said")
        said = (self.folder / "said").read_text() if code != KILLED else ""
        errors = (self.folder / "said.err").read_text(errors="replace")
        try:
            digest = start_again({**self.options, "out": str(out)})
        except Exception as failure:
            digest = f"{type(failure).__name__}: {failure}"
        return Trial(self.calls[at], at, error, code, said, digest, leftovers(out), errors)


def main() -> None:
    from tests.conftest import write_tiny_data, write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = short_run(write_tiny_model(folder), write_tiny_data(folder / "data.jsonl"))
        bad = 0
        for name, begun in (("train", None), ("resume", begin_run(options, folder / "begun"))):
            trials = Trials(options, folder / name, begun)
            for error in (None, *ERRORS):
                for at in range(len(trials.calls)):
                    trial = trials.run(at, error)
                    for problem in trial.problems(trials.digest):
                        bad += 1
                        print(f"{name}: {trial}: {problem}", flush=True)
            tried = len(trials.calls) * (len(ERRORS) + 1)
            print(
                f"{name}: {tried} runs, {len(trials.calls)} calls, each killed and with {len(ERRORS)} errors",
                flush=True,
            )
        print(f"{bad} problems")
        sys.exit(bool(bad))


def begin_run(options: dict[str, Any], out: Path) -> Path:
    """A run of half the steps with a torn journal and what a killed writer left."""
    from mezzo import api

    api.finetune(**{**options, "steps": options["steps"] // 2}, out=str(out))
    with (out / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"step":2,"losses":[0.4')
    (out / "snapshots" / ".step-000000002.safetensors.7.tmp").touch()
    return out


def short_run(model: str, data: str) -> dict[str, Any]:
    """Four steps with evaluations, snapshots that replace each other, and a test."""
    files = {"model": model, "task": "sst-2", "train": data, "dev": data}
    sizes = {"steps": 4, "eval_every": 2, "batch_size": 4, "snapshot_minutes": 1e-9, "threads": 1, "device": "cpu"}
    return {**files, **sizes, "space": "lora", "lr": 1e-3}


if __name__ == "__main__":
    main()
