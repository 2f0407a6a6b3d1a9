"""The record of a run: a header and one checksummed line per step, from which the weights are rebuilt bit for bit.

Evaluations are lines too, because they decide where a run stops. A crash can only tear the end of the file. It is cut by the
next writer when it writes, and kept in a file of its own. Damage further up is refused, and cut on request.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mezzo.errors import JournalError, RunFailed
from mezzo.journal.atomic_files import explain_os_errors, sync, write_all, write_atomically
from mezzo.journal.content import FORMAT, MAX_NOTE_BYTES, MAX_NOTES, NAME, Content, find_journal, read, read_header
from mezzo.journal.header import Header
from mezzo.journal.lines import MAX_LINE, encode_event, encode_line, encode_record
from mezzo.types import StepRecord

START = "start.bin"
NEW = f".{NAME}.tmp"
SYNC_SECONDS = 1.0
COPY_BYTES = 2**20
SEEK_DATA, SEEK_HOLE = getattr(os, "SEEK_DATA", None), getattr(os, "SEEK_HOLE", None)
# Errors that say that another process has a lock; the second is that of some network disks.
LOCKED = (errno.EWOULDBLOCK, errno.EACCES)


@dataclass
class Journal:
    """The only writer of a run's journal; holds a lock until closed."""

    path: Path
    content: Content
    _file: int
    _crc: int
    _size: int
    _torn: int = 0
    """Damaged bytes behind `_size`, until they are cut."""
    _notes: int = 0
    """Marks and evaluations so far: a file with more than MAX_NOTES is not read."""
    _note_bytes: int = 0
    """Of their lines, as far as MAX_NOTE_BYTES."""
    _synced: float = field(default_factory=time.monotonic)
    _background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "journal"))
    _syncing: Future[None] | None = None

    @classmethod
    def create(cls, folder: Path, header: Header, start: bytes = b"") -> Journal:
        """Start a journal in a folder that has none; `start` has the initial values of a prefix.

        The file is complete when it gets its name: before that there is no run, and from then on there is one.
        """
        path = folder / NAME
        header = replace(header, start=hashlib.sha256(start).hexdigest() if start else "")
        line, _ = encode_line({"format": FORMAT, **header.to_dict()}, 0)
        if len(line) > MAX_LINE:
            raise JournalError(
                f"the journal's first line would have {len(line):,} bytes, and {MAX_LINE:,} is the most that is read: "
                "train fewer tensors, or shorten the task"
            )
        read_header(line, path)  # a run that could not be read again does not begin
        with explain_os_errors(path), _locked(folder / NEW, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as file:
            if path.exists() and path.stat().st_size:
                (folder / NEW).unlink(missing_ok=True)
                again = f"continue it with --resume {shlex.quote(str(folder))}"
                raise JournalError(f"{folder} holds a run already: {again}, or choose another --out")
            if start:
                write_atomically(folder / START, start)
            os.ftruncate(file, 0)  # what a run that died at this place had written
            write_all(file, line)
            os.fsync(file)
            os.replace(folder / NEW, path)
            sync(folder)
            content = read(path)
        return cls(path, content, file, content.crc, content.size)

    @classmethod
    def resume(cls, folder: Path, accept_damage: bool = False) -> Journal:
        """Open a journal to append to it. A torn tail is cut by the first line that is written, or by `cut_tail`."""
        path = find_journal(folder)
        with explain_os_errors(path), _locked(path, os.O_RDWR) as file:
            content = read(path, accept_damage)
            os.lseek(file, content.size, os.SEEK_SET)
        notes = len(content.marks) + len(content.events)
        return cls(path, content, file, content.crc, content.size, content.torn, notes, content.note_bytes)

    def cut_tail(self) -> Path | None:
        """Cut the damaged end, having copied it to a file of its own; the copy, None where nothing is damaged."""
        if not self._torn:
            return None
        with explain_os_errors(self.path, RunFailed):
            copy = _free_name(self.path.with_name(f"journal.cut-at-{self._size}"))
            try:
                write_atomically(copy, _read_from(self._file, self._size))
            finally:
                os.lseek(self._file, self._size, os.SEEK_SET)  # looking for holes moves it
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
        self._torn = 0
        return copy

    def append(self, record: StepRecord) -> None:
        """Write one step, before anything can see the weights that it moved."""
        self._append(encode_record(record))
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync_in_background()

    def note(self, event: str, values: Mapping[str, Any]) -> None:
        """Write an evaluation."""
        self._append(encode_event(event, values), note=True)

    def mark(self, step: int, digest: str) -> None:
        """Record the digest of the trained tensors after `step` steps."""
        self._append({"mark": step, "digest": digest}, note=True)
        self.sync()

    @property
    def may_mark(self) -> bool:
        """Whether a mark that no evaluation asks for leaves room for those that one does."""
        return self._notes < MAX_NOTES // 2

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
        file, self._file = self._file, -1
        if file >= 0:
            self._background.shutdown()
            with contextlib.suppress(OSError):  # a finished run ends with a mark, which is on disk
                os.fsync(file)
            with contextlib.suppress(OSError):
                os.close(file)

    def _append(self, payload: Mapping[str, Any], note: bool = False) -> None:
        if self._torn:
            self.cut_tail()
        line, crc = encode_line(payload, self._crc)
        if len(line) > MAX_LINE:
            raise RunFailed(
                f"{self.path}: a line of {len(line):,} bytes could not be read again; {MAX_LINE:,} is the most"
            )
        if note and (self._notes >= MAX_NOTES or self._note_bytes + len(line) > MAX_NOTE_BYTES):
            raise RunFailed(
                f"{self.path} has no room for another evaluation or mark: {MAX_NOTES:,} of them, or {MAX_NOTE_BYTES:,} bytes, "
                "are the most that is read. The run can still be verified and exported"
            )
        try:
            with explain_os_errors(self.path, RunFailed):
                write_all(self._file, line)
        except RunFailed:
            with contextlib.suppress(OSError):  # leave no half-written line, if possible
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(line)
        self._crc = crc
        if note:
            self._notes += 1
            self._note_bytes += len(line)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def repair_journal(path: str | Path) -> Path | None:
    """Cut a damaged journal before the damage; where what was cut is now, None if nothing is damaged."""
    folder = Path(path).parent if Path(path).name == NAME else Path(path)
    with Journal.resume(folder, accept_damage=True) as journal:
        return journal.cut_tail()


@contextlib.contextmanager
def _locked(path: Path, flags: int) -> Iterator[int]:
    """An open and locked file, which is closed if what follows fails."""
    file = os.open(path, flags, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in LOCKED:
                raise
            raise JournalError(
                f"{path.parent} is in use by another process, or by a session that was not closed; wait for it or stop it"
            ) from None
        yield file
    except BaseException:
        os.close(file)
        raise


def is_in_use(folder: Path) -> bool:
    """Whether a process writes the journal of this folder: a dead one holds no lock. Where the disk cannot say, none does."""
    with contextlib.suppress(OSError):
        file = os.open(folder / NAME, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in LOCKED
        finally:
            os.close(file)  # releases the lock
    return False


def _read_from(file: int, place: int) -> Iterator[bytes | int]:
    """What follows a place in a file. Of a hole, which a sparse file has and no disk has room for, only the length is read."""
    end = os.fstat(file).st_size
    while place < end:
        data = _seek(file, place, SEEK_DATA, place, end)
        if data > place:
            yield data - place
        else:
            hole = _seek(file, place, SEEK_HOLE, end, end)
            part = os.pread(file, min(COPY_BYTES, hole - place), place)
            if not part:
                return
            yield part
            data += len(part)
        place = data


def _seek(file: int, place: int, what: int | None, unknown: int, end: int) -> int:
    """The next data or hole of a file; `unknown` where the system or the disk cannot say."""
    try:
        return unknown if what is None else min(end, os.lseek(file, place, what))
    except OSError as error:
        if error.errno == errno.ENXIO:  # there is nothing but a hole
            return end
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return unknown
        raise


def _free_name(path: Path) -> Path:
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
