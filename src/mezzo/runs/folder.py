"""A run folder: the files of a run, and everything that writes them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from mezzo.errors import ConfigError, JournalError, RunFailed
from mezzo.journal.atomic_files import explain_os_errors, json_safe, refuse_links, write_all, write_atomically
from mezzo.journal.journal import NAME as JOURNAL
from mezzo.replay.snapshots import Snapshots
from mezzo.untrusted import read_bytes, without_credentials

METRICS = "metrics.jsonl"
WORKERS = "workers"
CONFIG = "config.json"
MISTAKES = "mistakes.jsonl"
FILES = (JOURNAL, METRICS, CONFIG, MISTAKES, "snapshots")
MAX_NAME = 60
# What is read of a file that may come from anybody: bytes of a line and of all lines, and their number. A step has 150 bytes.
MAX_LINE, MAX_BYTES, MAX_ENTRIES = 2**20, 2**28, 2**21
MAX_MISTAKES = 50


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
            if not (path / JOURNAL).is_file() and any(path.iterdir()):
                raise ConfigError(f"--out {path} is not empty; choose a new folder")
        return cls(path)  # a folder with an empty journal is left over from a run that died while it was created

    @classmethod
    def open(cls, path: str | Path) -> Folder:
        path = Path(path).parent if Path(path).name == JOURNAL else Path(path)
        if not (path / JOURNAL).is_file():
            raise JournalError(f"{path} is not a run folder: it has no {JOURNAL}")
        refuse_links(path, FILES)
        return cls(path)

    def write_config(self, config: dict[str, Any]) -> None:
        write_atomically(self.path / CONFIG, (json.dumps(config, indent=2) + "\n").encode())

    def read_config(self) -> dict[str, Any]:
        """The content of config.json; empty when it is missing or broken, because the journal's header holds the same."""
        try:
            found = json.loads(read_bytes(self.path / CONFIG, MAX_LINE))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_mistakes(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Store the mistakes of the tested checkpoint, one line per example."""
        lines = [json.dumps(json_safe({"step": step, **row}), ensure_ascii=False) + "\n" for row in rows]
        write_atomically(self.path / MISTAKES, "".join(lines).encode())

    def note(self, event: str, values: dict[str, Any]) -> None:
        """Append one line of metrics."""
        line = without_credentials(json.dumps({"event": event, **json_safe(values)})).encode() + b"\n"
        path = self.path / METRICS
        with explain_os_errors(path, RunFailed):
            if self._metrics < 0:
                self._metrics = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            write_all(self._metrics, line)

    def metrics(self) -> list[dict[str, Any]]:
        """All readable lines; a line torn by a crash is ignored."""
        return self._lines(METRICS)

    def mistakes(self) -> list[dict[str, Any]]:
        return self._lines(MISTAKES)[:MAX_MISTAKES]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        if not path.is_file():
            return []
        if path.stat().st_size > MAX_BYTES:
            raise JournalError(f"{path} has more than {MAX_BYTES:,} bytes; move it away: the journal holds the run")
        found: list[dict[str, Any]] = []
        with explain_os_errors(path), path.open("rb") as file:
            for line in iter(lambda: file.readline(MAX_LINE), b""):
                with contextlib.suppress(ValueError, RecursionError):
                    found += [entry] if isinstance(entry := json.loads(line), dict) else []
                if len(found) > MAX_ENTRIES:
                    raise JournalError(
                        f"{path} has more than {MAX_ENTRIES:,} lines; move it away: the journal holds the run"
                    )
        return found

    def rewind_metrics(self, steps: int) -> list[dict[str, Any]]:
        """Drop the metrics of steps that the journal does not have; return the rest."""
        kept = [entry for entry in self.metrics() if _position(entry) <= steps]
        data = b"".join(json.dumps(entry).encode() + b"\n" for entry in kept)
        write_atomically(self.path / METRICS, data)
        return kept

    def want_workers(self, count: int | None) -> None:
        """Request another number of workers from a running driver; None withdraws the request."""
        if count is None:
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
        if self._metrics >= 0:
            os.close(self._metrics)
            self._metrics = -1


def holds_run(path: Path) -> bool:
    """Whether a run has begun in this folder. One with an empty journal died while it was created."""
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
