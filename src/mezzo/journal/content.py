"""A journal as it is read: checked from end to end once, its steps then read again whenever they are needed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, overload

from mezzo.errors import JournalError
from mezzo.journal.atomic_files import explain_os_errors
from mezzo.journal.header import Header, parse_header
from mezzo.journal.lines import MAX_LINE, Event, decode_line, parse_entry, parse_record, read_crc
from mezzo.types import StepRecord

FORMAT = 2
NAME = "journal.jsonl"
# Marks and evaluations that are kept in memory, and the bytes of their lines. Steps are not.
MAX_NOTES, MAX_NOTE_BYTES = 200_000, 48 * 2**20
# Bytes behind damage that are searched for sound lines.
MAX_TAIL = 64 * 2**20
# Steps between those whose places in the file are remembered.
INDEX_STEPS = 1000


@dataclass(frozen=True, eq=False)
class Records(Sequence[StepRecord]):
    """The steps of a journal. None is kept: `read(start, stop)` reads them where they are."""

    length: int
    read: Callable[[int, int], Iterator[StepRecord]]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[StepRecord]:
        return self.read(0, self.length)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    @overload
    def __getitem__(self, place: int) -> StepRecord: ...
    @overload
    def __getitem__(self, place: slice) -> list[StepRecord]: ...
    def __getitem__(self, place: int | slice) -> StepRecord | list[StepRecord]:
        places = range(self.length)[place]
        if isinstance(places, int):
            return next(self.read(places, places + 1))
        return list(islice(self.read(places.start, places.stop), None, None, places.step)) if places else []


@dataclass(frozen=True)
class Content:
    """A journal as read; `torn` bytes at its end are damaged, and ignored."""

    path: Path
    header: Header
    records: Records
    marks: dict[int, str]
    events: list[Event] = field(default_factory=list)
    """The evaluations, in order."""
    note_bytes: int = 0
    """Of the lines of marks and evaluations."""
    size: int = 0
    torn: int = 0
    crc: int = 0
    """Of the last line that fits."""
    best: int | None = None
    """The step of the best checkpoint, where the file itself knows it: a compact journal does."""
    start: bytes | None = None
    """The initial values of a prefix, compressed, where the file itself holds them: a compact journal does."""

    @property
    def steps(self) -> int:
        return len(self.records)


def read(path: Path, accept_damage: bool = False) -> Content:
    """Read a journal (a file or its run folder) without writing to it. Damage that only a crash leaves, at its end, is
    ignored; other damage is refused, or with `accept_damage` everything from there on ignored."""
    with explain_os_errors(path):
        path = find_journal(path) if path.is_dir() else path
        if not path.exists():
            raise JournalError(f"{path} does not exist")
    with explain_os_errors(path), path.open("rb") as file:
        header, size, crc = read_header(file.readline(MAX_LINE), path)
        marks: dict[int, str] = {}
        events: list[Event] = []
        number, steps, places, note_bytes = 2, 0, [], 0
        line = file.readline(MAX_LINE)
        while (decoded := decode_line(line, crc)) and (entry := parse_entry(decoded[0], steps)) is not None:
            if isinstance(entry, StepRecord):
                if steps % INDEX_STEPS == 0:
                    places.append(size)
                steps += 1
            elif isinstance(entry, dict):
                events.append(entry)
            else:
                marks[entry[0]] = entry[1]
            note_bytes += 0 if isinstance(entry, StepRecord) else len(line)
            if len(marks) + len(events) > MAX_NOTES or note_bytes > MAX_NOTE_BYTES:
                raise JournalError(
                    f"{path} has more than {MAX_NOTES:,} marks and evaluations, or {MAX_NOTE_BYTES:,} bytes of them; this is "
                    "not a journal"
                )
            number, size, crc = number + 1, size + len(line), decoded[1]
            line = file.readline(MAX_LINE)
        if not accept_damage and _is_followed(line, file):
            repair = f"mezzo verify {shlex.quote(str(path.parent))} --repair"
            raise JournalError(
                f"{path}: line {number} is damaged, or lines before it are missing, but more follows it than a crash leaves: "
                f"restore it from a copy, or '{repair}' cuts it there, and --resume computes the rest again"
            )
        torn = path.stat().st_size - size
    records = Records(steps, lambda start, stop: _read_records(path, places, start, stop))
    return Content(path, header, records, marks, events, note_bytes, size, torn, crc)


def read_header(line: bytes, path: Path) -> tuple[Header, int, int]:
    """The header, the bytes of its line, and its CRC."""
    if len(line) >= MAX_LINE and not line.endswith(b"\n"):
        raise JournalError(f"{path}: line 1 is longer than {MAX_LINE} bytes; this is not a journal")
    decoded = decode_line(line, 0)
    if decoded is None:
        raise JournalError(f"{path}: the header is missing or damaged; a journal without its header cannot be used")
    values, crc = decoded
    if values.get("format") != FORMAT:
        raise JournalError(f"{path} has format {values.get('format')!r}; this mezzo reads format {FORMAT}")
    return parse_header(values, path), len(line), crc


def find_journal(folder: Path) -> Path:
    path = folder if folder.name == NAME else folder / NAME
    with explain_os_errors(path):
        if not path.is_file():
            raise JournalError(f"{folder} is not a run folder: it has no {NAME}")
    return path


def _is_followed(damaged: bytes, file: BinaryIO) -> bool:
    """Whether a line behind a damaged one fits the line before it, or very much is there: no crash leaves that."""
    if len(damaged) < MAX_LINE and not damaged.endswith(b"\n"):
        return False  # the end of the file when it was read: a writer may have gone on since
    before, start = damaged, file.tell()
    while line := file.readline(MAX_LINE):
        if file.tell() - start > MAX_TAIL:
            return True  # more than a crash leaves, too
        crc = read_crc(before)
        if crc is not None and decode_line(line, crc):
            return True
        before = line
    return False


def _read_records(path: Path, places: list[int], start: int, stop: int) -> Iterator[StepRecord]:
    """Steps of a journal that has been checked."""
    if start >= stop:
        return
    with explain_os_errors(path), path.open("rb") as file:
        file.seek(places[start // INDEX_STEPS])
        step = start - start % INDEX_STEPS
        while step < stop:
            record = _parse_again(file.readline(MAX_LINE), path)
            if record is None:
                continue
            if record["step"] != step:
                raise JournalError(f"{path} was changed while it was read")
            if step >= start:
                yield parse_record(record)
            step += 1


def _parse_again(line: bytes, path: Path) -> dict[str, Any] | None:
    try:
        payload: dict[str, Any] = json.loads(line)
        return payload if "step" in payload and "event" not in payload else None
    except (ValueError, TypeError):
        raise JournalError(f"{path} was changed while it was read") from None
