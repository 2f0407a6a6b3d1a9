"""A run folder: the files of a run, and everything that writes them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mezzo.errors import ConfigError, JournalError, RunFailed
from mezzo.journal.atomic_files import explain_os_errors, json_safe, refuse_links, write_all, write_atomically
from mezzo.journal.content import NAME as JOURNAL
from mezzo.journal.journal import NEW, START
from mezzo.journal.lines import EVENTS
from mezzo.replay.snapshots import Snapshots
from mezzo.untrusted import parse_json, read_bytes, values_without_credentials

METRICS = "metrics.jsonl"
WORKERS = "workers"
CONFIG = "config.json"
MISTAKES = "mistakes.jsonl"
FILES = (JOURNAL, START, METRICS, CONFIG, MISTAKES, "snapshots")
# What a run that died before it began may have left: its journal had no name yet.
UNBORN = re.compile(rf"{re.escape(NEW)}|{re.escape(JOURNAL)}|\.?{re.escape(START)}(\.\d+\.tmp)?")
MAX_NAME = 60
# Bytes of a line, of config.json and of metrics that are read: they may come from anybody. A step has 200 bytes.
MAX_LINE, MAX_BYTES = 2**20, 2**32
MAX_MISTAKES = 50
Lines = Generator[dict[str, Any], None, None]


class Folder:
    """The files of a run. Only this class, the journal and the snapshots write there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshots = Snapshots(path / "snapshots")
        self._metrics = -1

    @classmethod
    def create(cls, out: str | None, stem: str) -> Folder:
        """A new folder; an existing one must not hold a run."""
        path = Path(out) if out else free_path(Path("runs"), stem)
        with explain_os_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            refuse_links(path, FILES)
            if holds_run(path):
                raise JournalError(
                    f"{path} holds a run already: continue it with --resume {shlex.quote(str(path))}, or choose another --out"
                )
            if not all(UNBORN.fullmatch(each.name) for each in path.iterdir()):
                raise ConfigError(f"--out {path} is not empty; choose a new folder")
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> Folder:
        path = Path(path).parent if Path(path).name == JOURNAL else Path(path)
        with explain_os_errors(path):
            if not (path / JOURNAL).is_file():
                raise JournalError(
                    f"{path} is not a run folder: it has no {JOURNAL}; a run is started with --out {path}"
                )
            refuse_links(path, FILES)
        return cls(path)

    def write_config(self, config: dict[str, Any]) -> None:
        write_atomically(self.path / CONFIG, (json.dumps(config, indent=2) + "\n").encode())

    def read_config(self) -> dict[str, Any]:
        """The content of config.json; empty when it is missing or broken, because the journal's header holds the same."""
        try:
            found = values_without_credentials(parse_json(read_bytes(self.path / CONFIG, MAX_LINE)))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_mistakes(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Store the mistakes of the tested checkpoint, one line per example."""
        lines = [json.dumps(json_safe({"step": step, **row}), ensure_ascii=False) + "\n" for row in rows]
        write_atomically(self.path / MISTAKES, "".join(lines).encode())

    def note(self, event: str, values: dict[str, Any]) -> None:
        """Append one line of metrics."""
        values = values_without_credentials(json_safe(values))
        line = json.dumps({"event": event, **values}).encode() + b"\n"
        path = self.path / METRICS
        with explain_os_errors(path, RunFailed):
            if self._metrics < 0:
                self._metrics = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            write_all(self._metrics, line)

    def metrics(self) -> Lines:
        """All readable lines, one at a time; a line torn by a crash is ignored."""
        return self._lines(METRICS)

    def mistakes(self) -> list[dict[str, Any]]:
        return list(islice(self._lines(MISTAKES), MAX_MISTAKES))

    def _lines(self, name: str) -> Lines:
        path = self.path / name
        with explain_os_errors(path):
            if not path.is_file():
                return
            if path.stat().st_size > MAX_BYTES:
                raise JournalError(f"{path} has more than {MAX_BYTES:,} bytes; move it away: the journal holds the run")
            with path.open("rb") as file:
                for line in iter(lambda: file.readline(MAX_LINE), b""):
                    with contextlib.suppress(ValueError, RecursionError):
                        if isinstance(entry := parse_json(line), dict):
                            yield values_without_credentials(entry)

    def rewrite_metrics(self, steps: int, events: Sequence[dict[str, Any]]) -> None:
        """Bring the metrics in line with the journal: its `events`, and nothing about steps that it does not have."""
        lines = (json.dumps(entry).encode() + b"\n" for entry in self._merge(steps, deque(events)))
        write_atomically(self.path / METRICS, lines)

    def _merge(self, steps: int, events: deque[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for entry in self.metrics():
            if _position(entry) > steps or entry.get("event") in EVENTS:
                continue
            while events and events[0]["step"] < _position(entry):
                yield events.popleft()
            yield entry
        yield from events

    def want_workers(self, count: int | None) -> None:
        """Request another number of workers from a running driver; None withdraws the request."""
        if count is None:
            with explain_os_errors(self.path / WORKERS):
                (self.path / WORKERS).unlink(missing_ok=True)
        else:
            write_atomically(self.path / WORKERS, b"%d\n" % count)

    def wanted_workers(self) -> int | None:
        """The requested number of workers; None without a valid request."""
        try:
            count = int(read_bytes(self.path / WORKERS, 20))
        except (OSError, ValueError):
            return None
        return count if count > 0 else None

    def close(self) -> None:
        file, self._metrics = self._metrics, -1
        if file >= 0:
            with contextlib.suppress(OSError):  # metrics can be lost: the journal holds the run
                os.close(file)


def holds_run(path: Path) -> bool:
    """Whether a run has begun in this folder."""
    with explain_os_errors(path):
        return (path / JOURNAL).is_file() and (path / JOURNAL).stat().st_size > 0


def _position(entry: dict[str, Any]) -> int:
    """The journal position of an entry; that of a step is the position after it."""
    step = entry.get("step", 0)
    return (step + 1 if entry.get("event") == "step" else step) if isinstance(step, int) else 0


def free_path(parent: Path, stem: str) -> Path:
    """An unused path with that name and a number; the name is cleaned because a task's name may hold anything."""
    stem = re.sub(r"[^\w.-]+", "-", stem).strip(".-")[-MAX_NAME:] or "run"
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"
