"""The lines of a journal: JSON, each with a CRC over its text that goes on from the CRC of the line before.

A line that was changed, lost, moved, or taken from another run therefore does not fit.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

from mezzo.journal.atomic_files import json_safe
from mezzo.types import StepRecord, Update
from mezzo.untrusted import parse_json

MAX_LINE = 16 * 2**20  # bytes; room for a header with thousands of tensor names
NOT_FINITE = ("nan", "inf", "-inf")  # numbers that JSON does not have
EVENTS = ("evaluation", "zero-shot")  # what decides where a run stops, and what it says of itself
Event = dict[str, Any]
Mark = tuple[int, str]
ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode_line(payload: Mapping[str, Any], crc: int) -> tuple[bytes, int]:
    """The line, and its CRC; `crc` is that of the line before."""
    text = ENCODER.encode(payload).encode()
    crc = zlib.crc32(text, crc)
    return b'%s,"crc":"%08x"}\n' % (text[:-1], crc), crc


def decode_line(line: bytes, crc: int) -> tuple[dict[str, Any], int] | None:
    """The line's content and CRC; None where it is torn, damaged, or does not follow the line with `crc`."""
    text, separator, _ = line.rpartition(b',"crc":"')
    own = read_crc(line)
    if not separator or own is None or zlib.crc32(text + b"}", crc) != own:
        return None
    try:
        payload = parse_json(text + b"}")
    except (ValueError, RecursionError):
        return None
    return (payload, own) if isinstance(payload, dict) else None


def read_crc(line: bytes) -> int | None:
    """The CRC that a line claims to have."""
    end = line[-11:]
    if len(end) < 11 or not end.endswith(b'"}\n'):
        return None
    try:
        return int(end[:8], 16)
    except ValueError:
        return None


def encode_record(record: StepRecord) -> dict[str, Any]:
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


def encode_event(event: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"event": event, **json_safe(dict(values))}


def parse_entry(payload: dict[str, Any], steps: int) -> StepRecord | Mark | Event | None:
    """What a line says after `steps` steps; None where that cannot be: it may come from anybody."""
    try:
        if "event" in payload:
            fits = payload["event"] in EVENTS and payload["step"] == steps and is_flat(payload)
            return payload if fits else None
        if "mark" in payload:
            return (steps, str(payload["digest"])) if payload["mark"] == steps else None
        record = parse_record(payload)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None
    return record if record.step == steps else None


def is_flat(event: Event) -> bool:
    """Whether its values are numbers, texts and lists of numbers, as those of an evaluation are: others take far more memory than
    they have bytes."""
    lists = [value for value in event.values() if isinstance(value, list)]
    return not any(isinstance(value, dict) for value in event.values()) and all(map(_are_numbers, lists))


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, (int, float)) or value in NOT_FINITE for value in values)


def parse_record(payload: dict[str, Any]) -> StepRecord:
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
