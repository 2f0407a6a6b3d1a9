"""A journal small enough for an e-mail: its header and the coefficients. Seeds follow from the header, losses are left out."""

from __future__ import annotations

import json
import math
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mezzo.errors import JournalError
from mezzo.journal.atomic_files import explain_os_errors, write_atomically
from mezzo.journal.content import Content, Records
from mezzo.journal.header import Header, parse_header
from mezzo.method.noise import step_seed
from mezzo.types import StepRecord, Update
from mezzo.untrusted import parse_json

MAGIC = b"mezzo-journal-2\n"
MAX_HEADER = 64 * 2**20  # bytes after decompression; the file may come from anybody
MAX_TERMS = 4_000_000  # of all steps
MAX_DIRECTIONS = 4096  # of a step
MAX_BACK = 2**32 // MAX_DIRECTIONS - 1  # steps to one whose directions are used again
MAX_START = 2**29  # bytes of a prefix
ADDED_BYTES = 2**16  # by compression, at most; it adds less than one in a thousand
MAX_ARRAY = 4 * MAX_TERMS + ADDED_BYTES  # bytes, four for each number
MAX_FILE = MAX_START + MAX_HEADER + 4 * MAX_ARRAY + 2**10
READ_BYTES = 2**20
# Where a part of the file begins, and its length.
Place = tuple[int, int]


def export_compact(content: Content, path: Path, best: int | None = None, start: bytes = b"") -> int:
    """Write the journal without losses: header, and of every step which of its directions it moved along, and how far. Returns
    the file's size.

    `best` is the default position of a reader, `start` the initial values of a prefix.
    """
    if not content.header.rebuilds:
        raise JournalError(
            "a compact journal rebuilds weights, and a gradient run's cannot: export the adapter or the model"
        )
    counts, directions, coefs, keeps = array("I"), array("I"), array("f"), array("f")
    skipped: list[int] = []
    known_directions = _Directions(content)
    for record in content.records:
        own = known_directions.numbers(record)
        if len(directions) + len(own) > MAX_TERMS:
            raise JournalError(f"{content.path}: a compact journal holds at most {MAX_TERMS:,} directions")
        counts.append(len(own))
        directions.extend(own)
        coefs.extend(coef for _, coef in record.update.terms)
        keeps.append(record.update.keep)
        skipped += [record.step] if record.skipped else []
    known = {} if best is None else {"best": best}
    header = {
        **content.header.to_dict(),
        **known,
        "steps": content.steps,
        "skipped": skipped,
        "marks": {str(k): v for k, v in content.marks.items()},
    }
    kinds = zip((counts, directions, coefs, keeps), ("<u4", "<u4", "<f4", "<f4"), strict=True)
    arrays = [np.array(values, dtype=kind) for values, kind in kinds]
    if len(start) > MAX_START:
        raise JournalError(f"{content.path}: a compact journal holds a prefix of at most {MAX_START:,} bytes")
    planes = [*map(_byte_planes, arrays), *([start] if start else [])]
    parts = [zlib.compress(part, 9) for part in (json.dumps(header).encode(), *planes)]
    body = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    data = MAGIC + zlib.crc32(body).to_bytes(4, "little") + body
    write_atomically(path, data)
    return len(data)


class _Directions:
    """What seeds stand for: a direction of the step itself, or of an earlier one whose move it takes up."""

    def __init__(self, content: Content) -> None:
        self.seed, self.path = content.header.seed, content.path
        self._places: dict[int, tuple[int, int]] = {}
        """Of seeds that were used, the step and the number."""

    def numbers(self, record: StepRecord) -> list[int]:
        """The number of each direction that a step uses, and MAX_DIRECTIONS more for each step that it goes back."""
        wanted = [seed for seed, _ in record.update.terms]
        missing = set(wanted) - self._places.keys()
        for number in range(MAX_DIRECTIONS):
            if not missing:
                break
            if (seed := step_seed(self.seed, record.step, number)) in missing:
                missing.discard(seed)
                self._places[seed] = record.step, number
        if missing or any(record.step - self._places[seed][0] > MAX_BACK for seed in wanted):
            raise JournalError(
                f"{self.path}: step {record.step} does not use the seeds of its header; it has no compact form"
            )
        while len(self._places) > MAX_TERMS // 16:  # the oldest
            del self._places[next(iter(self._places))]
        places = (self._places[seed] for seed in wanted)
        return [(record.step - step) * MAX_DIRECTIONS + number for step, number in places]


def import_compact(path: Path) -> Content:
    """Read a compact journal back into step records (without losses)."""
    try:
        with explain_os_errors(path):
            header_part, parts, start_place, size = _read_parts(path)
    except ValueError as error:
        raise JournalError(f"{path} is not a compact mezzo journal: {error}") from None
    try:
        values = parse_json(decompress(header_part, MAX_HEADER))
        header = parse_header(values, path)
        start = _read_start(path, start_place, header) if start_place else None
        steps = _count(values["steps"])
        if steps > MAX_TERMS:
            raise ValueError(f"it claims {steps} steps, and {MAX_TERMS:,} is the most")
        counts, directions, coefs, keeps = _read_arrays(parts, steps)
        if (directions // MAX_DIRECTIONS > np.repeat(np.arange(steps), counts)).any():
            raise ValueError("it uses directions of steps before the first")
        marks = {int(step): str(digest) for step, digest in values["marks"].items()}
        skipped = {_count(step) for step in values["skipped"]}
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, zlib.error, RecursionError) as error:
        raise JournalError(f"{path} is not a valid compact journal: {error}") from None
    ends = np.cumsum(counts, dtype=np.int64)

    def read(start: int, stop: int) -> Iterator[StepRecord]:
        for step in range(start, stop):
            own = slice(int(ends[step]) - int(counts[step]), int(ends[step]))
            places = (divmod(number, MAX_DIRECTIONS) for number in directions[own].tolist())
            seeds = (step_seed(header.seed, step - back, number) for back, number in places)
            update = Update(tuple(zip(seeds, coefs[own].tolist(), strict=True)), float(keeps[step]))
            yield StepRecord(step, (), (), update, math.nan, "non-finite loss" if step in skipped else "")

    best = values.get("best")
    best = best if isinstance(best, int) and 0 <= best <= steps else None
    return Content(path, header, Records(steps, read), marks, size=size, best=best, start=start)


def _read_arrays(parts: Sequence[bytes], steps: int) -> tuple[Any, Any, Any, Any]:
    """Terms of each step, the number of each term's direction, its coefficient, and the keep of each step."""
    counts_part, directions_part, coefs_part, keeps_part = parts
    counts = _from_byte_planes(decompress(counts_part, 4 * steps), "<u4", steps)
    terms = int(counts.sum(dtype=np.int64))
    if terms > MAX_TERMS:
        raise ValueError(f"it claims {terms} directions, and {MAX_TERMS:,} is the most")
    directions = _from_byte_planes(decompress(directions_part, 4 * terms), "<u4", terms)
    coefs = _from_byte_planes(decompress(coefs_part, 4 * terms), "<f4", terms)
    keeps = _from_byte_planes(decompress(keeps_part, 4 * steps), "<f4", steps)
    if not np.isfinite(coefs).all() or not np.isfinite(keeps).all():
        raise ValueError("a step of it is not finite")
    return counts, directions, coefs, keeps


def _byte_planes(values: np.ndarray[Any, Any]) -> bytes:
    """Bytes of equal significance side by side: they compress well where the exponents are similar."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, 4).T.tobytes()


def _from_byte_planes(data: bytes, kind: str, count: int) -> np.ndarray[Any, Any]:
    values = np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(4, -1).T).view(kind).reshape(-1)
    if len(values) != count:
        raise ValueError("its parts do not belong together")
    return values


def _read_parts(path: Path) -> tuple[bytes, list[bytes], Place | None, int]:
    """The header and the four arrays, compressed; where the start of a prefix is, if there is one; and the file's size. What
    they say of their sizes is compared before they are read."""
    if not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE:
            raise ValueError(f"it has more than {MAX_FILE:,} bytes")
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it begins otherwise")
        checksum, places = int.from_bytes(file.read(4), "little"), list(_find_parts(file, size))
        file.seek(len(MAGIC) + 4)
        crc = 0
        while data := file.read(READ_BYTES):
            crc = zlib.crc32(data, crc)
        if crc != checksum:
            raise JournalError(f"{path} is damaged: its checksum does not match")
        header, *parts = (_read_at(file, place) for place in places[:5])
    return header, parts, places[5] if len(places) > 5 else None, size


def _read_start(path: Path, place: Place, header: Header) -> bytes:
    """The start of a prefix, if it can be that of the header's: of two bytes for each value."""
    values = sum(math.prod(tensor.shape) for tensor in header.tensors if tensor.kind == "prefix")
    if place[1] > 2 * values + ADDED_BYTES + values // 100:
        raise ValueError("the start of its prefix is longer than its header says")
    with explain_os_errors(path), path.open("rb") as file:
        return _read_at(file, place)


def _find_parts(file: BinaryIO, size: int) -> Iterator[Place]:
    """Where each part begins, and its length."""
    limits = (MAX_HEADER, *(MAX_ARRAY,) * 4, MAX_START)
    place = file.tell()
    for limit in limits:
        length, place = int.from_bytes(file.read(8), "little"), place + 8
        if length > min(limit, size - place):
            raise ValueError(f"a part of it claims {length:,} bytes")
        yield place, length
        place += length
        if place == size:
            return
        file.seek(place)
    raise ValueError("there is more in it than a journal")


def _read_at(file: BinaryIO, place: Place) -> bytes:
    file.seek(place[0])
    return file.read(place[1])


def decompress(part: bytes, size: int) -> bytes:
    """At most `size` bytes: a small file must not expand to a large one."""
    inflate = zlib.decompressobj()
    data = inflate.decompress(part, size + 1)
    if len(data) > size:
        raise ValueError("it unpacks to more than it says")
    return data


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value
