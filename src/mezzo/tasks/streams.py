"""Rows from lines as they come, such as those of standard input: texts, JSON objects, or a table with a header."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mezzo.errors import DataError
from mezzo.tasks.columns import is_header_line
from mezzo.tasks.readers import DELIMITERS, unquote
from mezzo.tasks.task import Task

LONGEST_HEADER = 10_000


def read_stream(
    lines: Iterable[str], name: str, task: Task, column_map: Mapping[str, str]
) -> Iterator[str | dict[str, Any]]:
    """Rows, read one by one; the first line that is not blank decides what they are. A blank line is an empty text, so that
    there is an answer for every line."""
    lines, blank = iter(lines), 0
    for line in lines:
        if line.strip():
            break
        blank += 1
    else:
        yield from [""] * blank
        return
    rest, delimiter = itertools.chain([line], lines), _find_delimiter(line, task, column_map)
    if line.lstrip().startswith("{"):
        yield from _json_rows(rest, name, blank)
    elif delimiter:
        yield from _table_rows(rest, name, delimiter)
    else:
        yield from itertools.chain([""] * blank, (line.strip() for line in rest))


def _find_delimiter(line: str, task: Task, column_map: Mapping[str, str]) -> str:
    """What separates the columns of a header; empty if the line is none."""
    if len(line) > LONGEST_HEADER:
        return ""
    first = {delimiter: next(_split_rows([line], delimiter)) for delimiter in DELIMITERS}
    return next((each for each, cells in first.items() if is_header_line(task, cells, column_map)), "")


def _json_rows(lines: Iterable[str], name: str, skipped: int) -> Iterator[Any]:
    for number, line in enumerate(lines, skipped + 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{name}, line {number}: not valid JSON ({error})") from None


def _split_rows(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Cells; between tabs, quotes are ordinary characters, as in files of that kind."""
    if delimiter == "\t":
        return ([unquote(cell) for cell in line.rstrip("\r\n").split("\t")] for line in lines if line.strip())
    return (cells for cells in csv.reader(lines, delimiter=delimiter) if cells)


def _table_rows(lines: Iterable[str], name: str, delimiter: str) -> Iterator[dict[str, str]]:
    rows = _split_rows(lines, delimiter)
    header = next(rows)
    try:
        for number, cells in enumerate(rows, 1):
            if len(cells) != len(header):
                raise DataError(
                    f"{name}, row {number}: {len(cells)} columns where {len(header)} are expected; "
                    "quote cells that contain the separator"
                )
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{name}: bad csv ({error}); close or double its quotes") from None
