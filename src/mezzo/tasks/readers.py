"""Reading data files, whatever is in them: every failure is one line that names the file, the line and the remedy."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo.errors import DataError

MAX_LINE = 10_000_000
"""Longest line in bytes. Longer ones are some other kind of file, and would fill the memory."""
MAX_TABLE = 2**30
"""Bytes that a file may have, or unpack to, when it can only be read as a whole."""

Record = Mapping[str, Any]
Cells = list[str]


@dataclass(frozen=True)
class Records:
    """Rows by column name, each with its number in the source; `names`: what ids in a column mean, if the data says."""

    source: str
    rows: Sequence[tuple[int, Record]]
    unit: str = "line"
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def where(self, number: int) -> str:
        return f"{self.source}, {self.unit} {number}"


@dataclass(frozen=True)
class Sheet:
    """Rows of cells, of which the first may be a header."""

    source: str
    rows: Sequence[tuple[int, Cells]]


def read(path: Path, encoding: str = "utf-8") -> Records | Sheet:
    """The content of a file, by its suffix."""
    readers: dict[str, Callable[[Path, str], Records | Sheet]] = {
        ".jsonl": _jsonl,
        ".ndjson": _jsonl,
        ".json": _json,
        ".csv": _csv,
        ".tsv": _tsv,
        ".txt": _txt,
        ".parquet": _parquet,
    }
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise DataError(f"{path}: unknown kind of file {suffix!r}; use one of {', '.join(readers)}")
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a file; give one that can be read twice, such as a copy on disk")
    try:
        content = readers[suffix](path, encoding)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    if not content.rows:
        raise DataError(f"{path}: the file has no rows; give one with data")
    return content


def lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends, decoded one by one so that a bad byte is found where it is."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE + 1):
            number += 1
            if len(raw) > MAX_LINE:
                raise DataError(f"{path}, line {number}: longer than {MAX_LINE:,} bytes; is this a data file?")
            if number == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DataError(f"{path}, line 1: encoded as UTF-16; save the file as UTF-8")
            if number == 1 and not raw.endswith(b"\n") and b"\r" in raw.rstrip(b"\r"):
                raise DataError(f"{path}: its lines end as on old Macs (CR); save it with Unix (LF) line ends")
            try:
                yield number, raw.decode(encoding).removeprefix("\ufeff" if number == 1 else "")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not {encoding.upper()} (byte 0x{raw[error.start]:02x} at"
                    f" {error.start + 1}); save the file as UTF-8, or pass --encoding latin-1"
                ) from None
            except (LookupError, UnicodeError):
                raise _no_encoding(path, encoding) from None


def _no_encoding(path: Path, encoding: str) -> DataError:
    return DataError(f"{path}: unknown encoding {encoding!r}; use utf-8 or latin-1")


def _jsonl(path: Path, encoding: str) -> Records:
    rows = []
    for number, line in lines(path, encoding):
        if line.strip():
            with _json_errors(path, number):
                rows.append((number, _object(json.loads(line), path, number)))
    return Records(str(path), rows)


def _json(path: Path, encoding: str) -> Records:
    """A list of objects, an object of columns, or `{"data": …}`; and JSON lines under the wrong suffix."""
    _refuse_size(path, path.stat().st_size)
    with path.open("rb") as file:
        raw = file.read()
    try:
        text = raw.decode(encoding, errors="replace")
    except (LookupError, UnicodeError):
        raise _no_encoding(path, encoding) from None
    try:
        value = json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or "\ufffd" in text:
            return _jsonl(path, encoding)  # also finds the line of a bad byte
        raise _bad_json(path, error.lineno, error) from None
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, 1, error) from None
    if "\ufffd" in text:
        list(lines(path, encoding))
    return from_json(value, str(path))


def from_json(value: Any, source: str) -> Records:
    """Rows of a parsed value: a list of objects, or an object of equally long columns, perhaps under `data`."""
    if isinstance(value, Mapping) and isinstance(value.get("data"), list | dict):
        value = value["data"]
    if isinstance(value, Mapping):
        columns = {key: column for key, column in value.items() if isinstance(column, list)}
        if len({len(column) for column in columns.values()}) != 1 or len(columns) != len(value):
            raise DataError(f"{source}: one object that is not a table; give a list of rows, or lists of equal length")
        value = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    if not isinstance(value, list):
        raise DataError(f"{source}: a {type(value).__name__} is not a table; give a list of objects, one per row")
    return Records(source, [(n, _object(row, source, n, "row")) for n, row in enumerate(value, 1)], "row")


def _csv(path: Path, encoding: str) -> Sheet:
    """Comma-separated, quoted cells may contain commas, quotes and newlines."""
    source = lines(path, encoding)
    rows: list[tuple[int, Cells]] = []
    with _long_cells():
        reader = csv.reader((line for _, line in source), strict=True)
        start = 1
        try:
            for cells in reader:
                if cells:
                    rows.append((start, cells))
                start = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{path}, line {start}: bad csv ({error}); close or double its quotes") from None
    return Sheet(str(path), rows)


def _tsv(path: Path, encoding: str) -> Sheet:
    """Tab-separated as GLUE has it: a quote is a character like others, except in a cell that some writer quoted."""
    filled = ((number, line.rstrip("\r\n")) for number, line in lines(path, encoding) if line.strip())
    return Sheet(str(path), [(number, [_unquoted(cell) for cell in line.split("\t")]) for number, line in filled])


def _unquoted(cell: str) -> str:
    """`"a ""b"" c"` is `a "b" c`; a writer quotes a cell only if there are quotes in it, and doubles all of them."""
    inner = cell[1:-1]
    quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '""' in inner and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if quoted else cell


def _txt(path: Path, encoding: str) -> Sheet:
    """Lines of text, one cell each."""
    return Sheet(str(path), [(number, [line.strip()]) for number, line in lines(path, encoding) if line.strip()])


def _parquet(path: Path, _: str) -> Records:
    try:
        import pyarrow as arrow  # type: ignore[import-untyped, unused-ignore]
        from pyarrow import parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow; pip install pyarrow, or convert it to jsonl") from None
    try:
        with parquet.ParquetFile(path) as file:
            about = file.metadata
            groups = [about.row_group(index) for index in range(about.num_row_groups)]
            # What it claims to unpack to, and one byte for every cell: columns of nothing compress without end.
            _refuse_size(path, sum(group.total_byte_size for group in groups) + about.num_rows * about.num_columns)
            table = file.read()
        rows = list(enumerate(table.to_pylist(), 1))
    except (arrow.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"{path}: not a parquet file ({(str(error).splitlines() or ['unreadable'])[0]})") from None
    return Records(str(path), rows, "row", _class_names(table.schema.metadata or {}))


def _refuse_size(path: Path, size: int) -> None:
    if size > MAX_TABLE:
        raise DataError(f"{path}: {size:,} bytes are too many to read at once; write it as jsonl")


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Label names that `datasets` leaves in a parquet file."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {column: tuple(about["names"]) for column, about in features.items() if "names" in about}
    except (KeyError, TypeError, ValueError):
        return {}


def _object(value: Any, source: Any, number: int, unit: str = "line") -> Record:
    if not isinstance(value, Mapping):
        raise DataError(
            f"{source}, {unit} {number}: a {type(value).__name__}, not an object with columns; write one per row"
        )
    return value


@contextmanager
def _json_errors(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, number, error) from None


def _bad_json(path: Path, number: int, error: Exception) -> DataError:
    about = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else type(error).__name__
    return DataError(f"{path}, line {number}: bad JSON ({about}); fix or delete that line")


@contextmanager
def _long_cells() -> Iterator[None]:
    """Cells up to `MAX_LINE`; the csv module's own limit is lower, and global."""
    before = csv.field_size_limit(MAX_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)
