"""A journal small enough for an e-mail: header and coefficients. Seeds follow from the header; losses are left out."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.errors import JournalError
from mezzo.journal.atomic_files import explain_os_errors, write_atomically
from mezzo.journal.header import parse_header
from mezzo.journal.journal import Content
from mezzo.method.noise import step_seed
from mezzo.types import StepRecord, Update

MAGIC = b"mezzo-journal-1\n"
MAX_HEADER = 64 * 2**20  # bytes after decompression; the file may come from anybody
MAX_TERMS = 4_000_000  # steps times samples


def export_compact(content: Content, path: Path, best: int | None = None) -> int:
    """Write the journal without losses: header, float32 coefficients, keeps. Returns the file's size.

    `best` is the default position of a reader.
    """
    seed, samples = content.header.seed, content.header.samples
    if samples < 1 or content.steps * samples > MAX_TERMS:
        raise JournalError(f"{content.path}: a compact journal holds at most {MAX_TERMS:,} directions")
    coefs = np.full((content.steps, samples), np.nan, dtype="<f4")
    keeps = np.ones(content.steps, dtype="<f4")
    for record in content.records:
        if record.skipped:
            continue
        expected = tuple(step_seed(seed, record.step, sample) for sample in range(samples))
        if tuple(s for s, _ in record.update.terms) != expected:
            raise JournalError(
                f"{content.path}: step {record.step} does not use the seeds of its header; it has no compact form"
            )
        coefs[record.step] = [coef for _, coef in record.update.terms]
        keeps[record.step] = record.update.keep
    known = {} if best is None else {"best": best}
    header = {
        **content.header.to_dict(),
        **known,
        "steps": content.steps,
        "marks": {str(k): v for k, v in content.marks.items()},
    }
    parts = [zlib.compress(part, 9) for part in (json.dumps(header).encode(), _byte_planes(coefs), _byte_planes(keeps))]
    body = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    data = MAGIC + zlib.crc32(body).to_bytes(4, "little") + body
    write_atomically(path, data)
    return len(data)


def import_compact(path: Path) -> Content:
    """Read a compact journal back into step records (without losses)."""
    with explain_os_errors(path):
        data = path.read_bytes()
    head = len(MAGIC) + 4
    if not data.startswith(MAGIC):
        raise JournalError(f"{path} is not a compact mezzo journal")
    body = data[head:]
    if zlib.crc32(body).to_bytes(4, "little") != data[len(MAGIC) : head]:
        raise JournalError(f"{path} is damaged: its checksum does not match")
    try:
        header_part, coef_part, keep_part = _split_parts(body)
        values = json.loads(_decompress(header_part, MAX_HEADER))
        header = parse_header(values, path)
        steps, samples, seed = _count(values["steps"]), header.samples, header.seed
        if samples < 1 or steps * samples > MAX_TERMS:
            raise ValueError(f"it claims {steps} steps of {samples} directions, and {MAX_TERMS:,} is the most")
        coefs = _from_byte_planes(_decompress(coef_part, 4 * steps * samples)).reshape(steps, samples)
        keeps = _from_byte_planes(_decompress(keep_part, 4 * steps)).reshape(steps)
        if np.isinf(coefs).any() or not np.isfinite(keeps).all():
            raise ValueError("a step of it is not finite")
        marks = {int(step): str(digest) for step, digest in values["marks"].items()}
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, zlib.error, RecursionError) as error:
        raise JournalError(f"{path} is not a valid compact journal: {error}") from None
    records = []
    for step in range(steps):
        if np.isnan(coefs[step]).any():
            update, skipped = Update(), "non-finite loss"
        else:
            terms = ((step_seed(seed, step, sample), float(coefs[step, sample])) for sample in range(samples))
            update, skipped = Update(tuple(terms), float(keeps[step])), ""
        records.append(StepRecord(step, (), (), update, math.nan, skipped))
    best = values.get("best")
    best = best if isinstance(best, int) and 0 <= best <= steps else None
    return Content(path, header, records, marks, len(data), best=best)


def _byte_planes(values: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    """Bytes of equal significance side by side: they compress well where the exponents are similar."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, 4).T.tobytes()


def _from_byte_planes(data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(4, -1).T).view("<f4").reshape(-1)


def _split_parts(body: bytes) -> Iterator[bytes]:
    for _ in range(3):
        length = int.from_bytes(body[:8], "little")
        yield body[8 : 8 + length]
        body = body[8 + length :]
    if body:
        raise ValueError("there is more in it than a journal")


def _decompress(part: bytes, size: int) -> bytes:
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
