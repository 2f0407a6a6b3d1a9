"""The record of a run: a header and one checksummed line per step, from which the weights are rebuilt bit for bit.

Each line is JSON with a CRC over its text, salted with the header so that a line of another run does not fit. A crash can
only tear the last line; it is reported, and cut by the next writer. Damage further up is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shlex
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo.errors import JournalError, RunFailed
from mezzo.journal.atomic_files import explain_os_errors, write_all
from mezzo.journal.header import Header, parse_header
from mezzo.types import StepRecord, Update

FORMAT = 1
NAME = "journal.jsonl"
MAX_LINE = 16 * 2**20  # bytes; room for a header with thousands of tensor names
SYNC_SECONDS = 1.0
ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Content:
    """A journal as read; `torn` bytes at its end were damaged by a crash and are ignored."""

    path: Path
    header: Header
    records: list[StepRecord]
    marks: dict[int, str]
    size: int
    torn: int = 0
    best: int | None = None
    """The step of the best checkpoint, where the file itself knows it: a compact journal does."""

    @property
    def steps(self) -> int:
        return len(self.records)


@dataclass
class Journal:
    """The only writer of a run's journal; holds a lock until closed."""

    path: Path
    content: Content
    _file: int
    _salt: int
    _size: int
    _synced: float = field(default_factory=time.monotonic)
    _background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "journal"))
    _syncing: Future[None] | None = None

    @classmethod
    def create(cls, folder: Path, header: Header) -> Journal:
        """Start a journal in a folder that has none."""
        path = folder / NAME
        line = _line({"format": FORMAT, **header.to_dict()}, 0)
        with explain_os_errors(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(file, path)
                if os.fstat(file).st_size:
                    again = f"continue it with --resume {shlex.quote(str(folder))}"
                    raise JournalError(f"{folder} holds a run already: {again}, or choose another --out")
                write_all(file, line)
                os.fsync(file)
                _sync_folder(folder)
            except BaseException:
                os.close(file)
                raise
        content = read(path)
        return cls(path, content, file, _salt(line), content.size)

    @classmethod
    def resume(cls, folder: Path) -> Journal:
        """Open a journal to append to it; a torn tail is cut."""
        path = _existing(folder)
        with explain_os_errors(path):
            file = os.open(path, os.O_RDWR)
            try:
                _lock(file, path)
                content = read(path)
                if content.torn:
                    os.ftruncate(file, content.size)
                    os.fsync(file)
                os.lseek(file, content.size, os.SEEK_SET)
                with path.open("rb") as lines:
                    header_line = lines.readline()
            except BaseException:
                os.close(file)
                raise
        return cls(path, content, file, _salt(header_line), content.size)

    def append(self, record: StepRecord) -> None:
        """Write one step, before anything can see the weights that it moved."""
        self._append(_encode(record))
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync_in_background()

    def mark(self, step: int, digest: str) -> None:
        """Record the digest of the trained tensors after `step` steps."""
        self._append({"mark": step, "digest": digest})
        self.sync()

    def sync(self) -> None:
        """Wait until everything appended is on disk."""
        self._wait_for_background()
        with explain_os_errors(self.path, RunFailed):
            os.fsync(self._file)
        self._synced = time.monotonic()

    def _sync_in_background(self) -> None:
        """Sync without waiting, because a disk may take as long as a step; an error is raised at the next sync."""
        if self._syncing is not None and not self._syncing.done():
            return
        self._wait_for_background()
        self._syncing = self._background.submit(os.fsync, self._file)
        self._synced = time.monotonic()

    def _wait_for_background(self) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            with explain_os_errors(self.path, RunFailed):
                syncing.result()

    def close(self) -> None:
        if self._file >= 0:
            self._background.shutdown()
            with contextlib.suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def _append(self, payload: Mapping[str, Any]) -> None:
        line = _line(payload, self._salt)
        try:
            with explain_os_errors(self.path, RunFailed):
                write_all(self._file, line)
        except RunFailed:
            with contextlib.suppress(OSError):  # leave no half-written line, if possible
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(line)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> Content:
    """Read a journal (a file or its run folder) without writing to it."""
    path = _existing(path) if path.is_dir() else path
    if not path.exists():
        raise JournalError(f"{path} does not exist")
    lines = _lines(path)
    first = next(lines, None)
    values = _payload(first[1], 0) if first else None
    if first is None or values is None:
        raise JournalError(f"{path}: the header is missing or damaged; a journal without its header cannot be used")
    if values.get("format") != FORMAT:
        raise JournalError(f"{path} has format {values.get('format')!r}; this mezzo reads format {FORMAT}")
    header = parse_header(values, path)
    salt, size = _salt(first[1]), len(first[1])
    records: list[StepRecord] = []
    marks: dict[int, str] = {}
    damaged: int | None = None
    for number, line in lines:
        payload = _payload(line, salt)
        try:
            entry = None if payload is None else _parse(payload)
        except (KeyError, TypeError, ValueError, OverflowError, AssertionError):
            entry = None
        if entry is None:
            damaged = damaged or number
            continue
        if damaged is not None:
            raise JournalError(
                f"{path}: line {damaged} is damaged but later lines are not; restore the file from a copy"
            )
        if isinstance(entry, StepRecord):
            if entry.step != len(records):
                raise JournalError(
                    f"{path}: line {number} is step {entry.step}, expected {len(records)}; lines are missing"
                )
            records.append(entry)
        else:
            marks[entry[0]] = entry[1]
        size += len(line)
    return Content(path, header, records, marks, size, torn=path.stat().st_size - size)


def _existing(folder: Path) -> Path:
    path = folder if folder.name == NAME else folder / NAME
    if not path.is_file():
        raise JournalError(f"{folder} is not a run folder: it has no {NAME}")
    return path


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with explain_os_errors(path), path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                raise JournalError(f"{path}: line {number} is longer than {MAX_LINE} bytes; this is not a journal")
            yield number, line


def _line(payload: Mapping[str, Any], salt: int) -> bytes:
    text = ENCODER.encode(payload).encode()
    return b'%s,"crc":"%08x"}\n' % (text[:-1], zlib.crc32(text, salt))


def _payload(line: bytes, salt: int) -> dict[str, Any] | None:
    """The line's content, or None when it is torn or damaged."""
    body, separator, crc = line.rpartition(b',"crc":"')
    if not separator or len(crc) != 11 or not crc.endswith(b'"}\n'):
        return None
    text = body + b"}"
    if b"%08x" % zlib.crc32(text, salt) != crc[:8]:
        return None
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return payload if isinstance(payload, dict) else None


def _salt(header_line: bytes) -> int:
    return zlib.crc32(header_line)


def _encode(record: StepRecord) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "step": record.step,
        "losses": [_number(loss) for loss in record.losses],
        "slopes": [_number(slope) for slope in record.slopes],
        "terms": [[seed, coef] for seed, coef in record.update.terms],
        "keep": record.update.keep,
        "lr": record.lr,
    }
    notes = {"notes": {name: _number(value) for name, value in record.notes.items()}} if record.notes else {}
    return payload | ({"skipped": record.skipped} if record.skipped else {}) | notes


def _parse(payload: dict[str, Any]) -> StepRecord | tuple[int, str]:
    if "mark" in payload:
        return int(payload["mark"]), str(payload["digest"])
    terms = tuple((int(seed), float(coef)) for seed, coef in payload["terms"])
    moves = (float(payload["keep"]), *(coef for _, coef in terms))
    if not all(0 <= seed < 2**64 for seed, _ in terms) or not all(math.isfinite(value) for value in moves):
        raise ValueError  # not a valid step: it would ruin the weights
    return StepRecord(
        step=int(payload["step"]),
        losses=tuple(float(loss) for loss in payload["losses"]),
        slopes=tuple(float(slope) for slope in payload["slopes"]),
        update=Update(terms, float(payload["keep"])),
        lr=float(payload["lr"]),
        skipped=str(payload.get("skipped", "")),
        notes={str(name): float(value) for name, value in payload.get("notes", {}).items()},
    )


def _number(value: float) -> float | str:
    """JSON has no NaN or infinity; Python's float() reads their names back."""
    return value if math.isfinite(value) else str(value)


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise JournalError(f"{path.parent} is in use by another process; wait for it or stop it") from None


def is_in_use(folder: Path) -> bool:
    """Whether a process writes the journal of this folder: a dead one holds no lock."""
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)  # releases the lock
    return False


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
