"""Predicted rows on standard output, one at a time: JSON lines, or a table with a header."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from mezzo.drawing.text import shows_unicode
from mezzo.errors import DataError
from mezzo.journal.atomic_files import json_safe
from mezzo.untrusted import printable

DELIMITERS = {"csv": ",", "tsv": "\t"}


def write_rows(rows: Iterable[Mapping[str, Any]], format: str, file: TextIO) -> int:
    """Write rows as they come and return how many there were."""
    header: list[str] | None = None
    count, table = 0, csv.writer(file, delimiter=DELIMITERS.get(format, ","), lineterminator="\n")
    for count, row in enumerate(map(dict, rows), 1):
        if format == "jsonl":
            text = json.dumps(json_safe(row), ensure_ascii=not shows_unicode(getattr(file, "encoding", None)))
            print(printable(text), file=file, flush=True)
            continue
        if "probabilities" in row:  # a table has one column, however many labels there are
            row["probability"] = max(row.pop("probabilities").values())
        if header is None:
            header = list(row)
            table.writerow(_cell(name, file) for name in header)
        elif list(row) != header:
            raise DataError(
                f"row {count} has other columns than the first, which a table cannot show; use --format jsonl"
            )
        table.writerow(_cell(value, file) for value in row.values())
        file.flush()
    return count


def _cell(value: Any, file: TextIO) -> str:
    text = (
        value if isinstance(value, str) else "" if value is None else json.dumps(json_safe(value), ensure_ascii=False)
    )
    return printable(text).encode(file.encoding or "utf-8", "backslashreplace").decode(file.encoding or "utf-8")
