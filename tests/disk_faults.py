"""A disk that fails: a short run, and each command that reads it, is killed at, or gets an error from, each of its file
operations in turn.

The suite tries a part of them. All of them: `python -m tests.disk_faults`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The calls by which Python reaches files, by module. What a file object does (io.open) is counted as calls of its own.
CALLS = {
    os: ("open", "close", "pread", "read", "write", "lseek", "fsync", "ftruncate", "stat", "lstat", "fstat")
    + ("rename", "replace", "unlink", "mkdir", "rmdir", "chmod", "listdir", "scandir"),
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
                self.count(name, lambda: real(target) if name == "close" and self.error else None, target)
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
            self.count("io.open", target=target)
            file = FaultyFile(target)
            file.disk = self
            self._files.add(file.fileno())
            return io.BufferedReader(file)

        return call

    def count(self, name: str, before: Callable[[], Any] = lambda: None, target: Any = None) -> None:
        """A call of the run; the one that fails does something before. Its error names the target, as Python's do of a path."""
        self.log.append(name)
        if len(self.log) - 1 == self.at:
            before()
            if self.error is None:
                os._exit(KILLED)
            named = [] if target is None or isinstance(target, int) else [os.fspath(target)]
            raise OSError(self.error, os.strerror(self.error), *named)

    def forget(self, file: int) -> None:
        self._files.discard(file)

    def _is_inside(self, target: Any) -> bool:
        if isinstance(target, int):
            return target in self._files
        return isinstance(target, (str, os.PathLike)) and Path(target).is_relative_to(self.folder)


def run_on(disk: FaultyDisk, work: Callable[[], tuple[int, str]], report: Path) -> int:
    """Work in a forked process whose disk fails; its exit code. What it said, or its calls, are in the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; the child does not use them
        child = os.fork()
    if child == 0:
        code, text = TRACEBACK, ""
        os.dup2(os.open(report.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            disk.install()
            code, text = work()
            text = "\n".join(disk.log) if code == 0 else text
        except BaseException:
            text = traceback.format_exc()
        finally:
            file = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(file, text.encode())
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(options: dict[str, Any]) -> tuple[int, str]:
    """The exit code, and what a refusal says."""
    from mezzo import api
    from mezzo.errors import MezzoError

    try:
        api.finetune(**options)
    except MezzoError as error:
        return REFUSED, str(error)
    return 0, ""


def run_command(arguments: list[str]) -> tuple[int, str]:
    """The exit code of a command, and what it wrote to standard error."""
    from mezzo.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    return code, errors.getvalue()


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
        return describe(self.call, self.at, self.error)


class Trials:
    """All that is known of the undisturbed run: its digest and its calls. Where it has `begun`, it is a resume of that run."""

    def __init__(self, options: dict[str, Any], folder: Path, begun: Path | None = None) -> None:
        self.options, self.folder, self.begun, self._count = options, folder, begun, 0
        folder.mkdir(exist_ok=True)
        whole = folder / "whole"
        options = self._prepare(whole)
        assert run_on(FaultyDisk(whole), lambda: train(options), folder / "said") == 0
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
        options = self._prepare(out)
        code = run_on(FaultyDisk(out, at, error), lambda: train(options), self.folder / "said")
        said = (self.folder / "said").read_text() if code != KILLED else ""
        errors = (self.folder / "said.err").read_text(errors="replace")
        try:
            digest = start_again({**self.options, "out": str(out)})
        except Exception as failure:
            digest = f"{type(failure).__name__}: {failure}"
        return Trial(self.calls[at], at, error, code, said, digest, leftovers(out), errors)

    def problems(self, at: int, error: int | None) -> list[str]:
        return list(self.run(at, error).problems(self.digest))


@dataclass
class CommandTrial:
    """A command whose disk fails at one call, and the same command after it."""

    call: str
    at: int
    error: int | None
    code: int
    said: str
    changed: list[str]
    """Files of the runs that are not as they were."""
    half_written: list[str]
    next_code: int
    next_said: str
    differing: list[str]
    """Files that the next call left over, or has not written as an undisturbed one does."""

    def problems(self) -> Iterator[str]:
        if self.code not in ((KILLED,) if self.error is None else (0, REFUSED)):
            yield f"ended with code {self.code}: {self.said}"
        if self.code == REFUSED and not (self.said.startswith("mezzo: ") and len(self.said.splitlines()) == 1):
            yield f"did not say what happened in one line: {self.said}"
        if "Traceback" in self.said:
            yield f"showed a traceback: {self.said}"
        if self.changed:
            yield f"changed the run: {self.changed}"
        if self.half_written:
            yield f"half-written: {self.half_written}"
        if self.next_code != 0:
            yield f"the next call ended with code {self.next_code}: {self.next_said}"
        if self.differing:
            yield f"leftovers, or other output of the next call: {self.differing}"

    def __str__(self) -> str:
        return describe(self.call, self.at, self.error)


class CommandTrials:
    """A command about finished runs, which are in a folder. It changes none of their files, so that one folder serves all
    trials; what it writes itself is absent or complete after each, and removed before the next."""

    def __init__(self, arguments: list[str], folder: Path, said: Path) -> None:
        self.arguments, self.folder, self.said = arguments, folder, said
        self.runs = read_files(folder)
        assert run_on(FaultyDisk(folder), lambda: run_command(arguments), said) == 0, said.with_suffix(
            ".err"
        ).read_text()
        self.calls = said.read_text().split()
        self.outputs = {name: data for name, data in read_files(folder).items() if name not in self.runs}
        self._remove(self.outputs)

    def run(self, at: int, error: int | None) -> CommandTrial:
        disk = FaultyDisk(self.folder, at, error)
        code = run_on(disk, lambda: run_command(self.arguments), self.said)
        said = self.said.read_text() if code not in (0, KILLED) else ""
        said += self.said.with_suffix(".err").read_text(errors="replace")
        found = read_files(self.folder)
        changed = [name for name, data in self.runs.items() if found.get(name) != data]
        half_written = self._half_written(found, code)
        if self.calls[at] == "flock" and error == errno.EACCES:
            half_written = []  # it means that a process trains the run, and a report says so
        self._remove(self.outputs)
        next_code, next_said = run_command(self.arguments)
        found, expected = read_files(self.folder), self.runs | self.outputs
        differing = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
        self._remove(found.keys() - self.runs.keys())
        results = (code, said, sorted(changed), sorted(half_written), next_code, next_said, sorted(differing))
        return CommandTrial(self.calls[at], at, error, *results)

    def problems(self, at: int, error: int | None) -> list[str]:
        return list(self.run(at, error).problems())

    def _half_written(self, found: Mapping[str, bytes], code: int) -> list[str]:
        """What is at final names and not complete, or missing after a success or in a folder that is there."""
        folders = tuple(name for name in self.outputs if name.endswith("/") and name in found)
        wanted = [name for name in self.outputs if code == 0 or name in found or name.startswith(folders)]
        others = [name for name in found.keys() - self.runs.keys() - self.outputs.keys() if "/." not in f"/{name}"]
        return [name for name in wanted if found.get(name) != self.outputs[name]] + others

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            if name.endswith("/"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            else:
                (self.folder / name).unlink(missing_ok=True)


def read_files(folder: Path) -> dict[str, bytes]:
    """All files below a folder; a folder, which may be empty, by its name and a slash."""
    names = {path: str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name + "/" * path.is_dir(): b"" if path.is_dir() else path.read_bytes() for path, name in names.items()}


def commands_on(folder: Path) -> dict[str, list[str]]:
    """Commands that read the runs `run` and `other` of a folder."""
    run, device = str(folder / "run"), ["--device", "cpu"]
    return {
        "report": ["report", run],
        "report of two": ["report", run, str(folder / "other"), "--out", str(folder / "report.html")],
        "runs": ["runs", str(folder)],
        "export adapter": ["export", run, "adapter", *device],
        "export model": ["export", run, "model", "--out", str(folder / "exported"), *device],
        "export journal": ["export", run, "journal"],
    }


def main() -> None:
    from tests.conftest import write_tiny_data, write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = short_run(write_tiny_model(folder), write_tiny_data(folder / "data.jsonl"))
        bad = 0
        for name, begun in (("train", None), ("resume", begin_run(options, folder / "begun"))):
            trials = Trials(options, folder / name, begun)
            bad += try_all(name, trials)
        runs = finish_runs(options, folder / "runs")
        for name, arguments in commands_on(runs).items():
            bad += try_all(name, CommandTrials(arguments, runs, folder / "said"))
        for run in runs.iterdir():
            bad += (again := start_again({**options, "out": str(run)})) != trials.digest
            print(f"{run.name} ends at {again[:16]}, the undisturbed run at {trials.digest[:16]}", flush=True)
        print(f"{bad} problems")
        sys.exit(bool(bad))


def try_all(name: str, trials: Trials | CommandTrials) -> int:
    """Kill at each call, and give each call each error; how many problems there were."""
    bad = 0
    for error in (None, *ERRORS):
        for at, call in enumerate(trials.calls):
            for problem in trials.problems(at, error):
                bad += 1
                print(f"{name}: {describe(call, at, error)}: {problem}", flush=True)
    count = len(trials.calls)
    print(
        f"{name}: {count * (len(ERRORS) + 1)} runs, {count} calls, each killed and with {len(ERRORS)} errors",
        flush=True,
    )
    return bad


def describe(call: str, at: int, error: int | None) -> str:
    return f"{'killed' if error is None else errno.errorcode[error]} at call {at}, {call}"


def finish_runs(options: dict[str, Any], folder: Path) -> Path:
    """A folder with two finished runs."""
    from mezzo import api

    api.finetune(**options, out=str(folder / "run"))
    shutil.copytree(folder / "run", folder / "other")
    return folder


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
