"""Reading data files: every failure is one line that names the file, the line and the remedy."""

from __future__ import annotations

import csv
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mezzo.errors import DataError, MezzoWarning

# Longest line in bytes. A longer one belongs to some other kind of file, and would fill the memory.
MAX_LINE = 10_000_000
# Bytes that a file may have, or unpack to, when it can only be read as a whole.
MAX_TABLE = 2**30
# Columns of a table. With more of them, finding those of a task takes minutes.
MAX_COLUMNS = 10_000
# What separates the cells of a .csv file, most likely first, and the rows that are tried.
DELIMITERS, SNIFFED_ROWS = (",", ";", "\t"), 100
# How files that are not text begin, and what they are.
_BINARY = {
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"SQLite format 3": "an SQLite database",
    b"%PDF": "a PDF",
    b"PAR1": "a parquet file",
    b"ARROW1": "an Arrow file",
}

Row = Mapping[str, Any]
Cells = list[str]
Content = TypeVar("Content")


@dataclass(frozen=True)
class Table:
    """Rows by column name, each with its number in the source."""

    source: str
    rows: Sequence[tuple[int, Row]]
    unit: str = "line"
    label_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Column → the names of its ids 0, 1, …, where the data carries them."""

    def location(self, number: int) -> str:
        return f"{self.source}, {self.unit} {number}"


@dataclass(frozen=True)
class RawTable:
    """Rows of cells whose columns have no names yet: the first row may be a header. `lines`: of one cell each, with no header."""

    source: str
    rows: Sequence[tuple[int, Cells]]
    lines: bool = False


class BadRows:
    """Rows that cannot be used, reported together: at most ten of them, then a count."""

    LISTED = 10

    def __init__(self, source: object, unit: str = "line") -> None:
        self.source, self.unit = source, unit
        self.count = 0
        self.rows_of: dict[str, list[int]] = {}

    def add(self, number: int, problem: str) -> None:
        if self.count < self.LISTED:
            self.rows_of.setdefault(problem, []).append(number)
        self.count += 1

    def refuse(self) -> None:
        """Raise DataError if there are any."""
        if not self.count:
            return
        more = self.count - sum(map(len, self.rows_of.values()))
        of_one_kind = len(self.rows_of) == 1
        parts = []
        for problem, numbers in self.rows_of.items():
            rest = f" and {more} more" if more and of_one_kind else ""
            parts.append(f"{self.unit}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}{rest}: {problem}")
        end = f"; and {more} more rows" if more and not of_one_kind else ""
        raise DataError(f"{self.source}, {'; also '.join(parts)}{end}")


class _NotDecodable(DataError):
    """A line is not in the encoding that the file is read in."""


def read_file(
    path: Path, encoding: str | None = None, published_encoding: str = "", suffix: str | None = None
) -> Table | RawTable:
    """The content of a file, by its suffix unless another is given.

    Without a stated encoding it is UTF-8; where that fails, that of the data set's published files, or latin-1 and a warning.
    """
    suffix = suffix or path.suffix.lower()

    def read(path: Path, encoding: str) -> Table | RawTable:
        if suffix not in READERS:
            raise DataError(f"{path}: unknown file type {suffix!r}; use one of {', '.join(READERS)}")
        return READERS[suffix](path, encoding)

    table = _read_decoded(path, read, encoding, published_encoding)
    if not table.rows:
        raise DataError(f"{path}: the file has no rows; give one with data")
    return table


def read_lines(path: Path, encoding: str | None = None) -> list[str]:
    """All lines of a text file, blank ones included."""
    return _read_decoded(path, lambda *file: [line for _, line in numbered_lines(*file)], encoding)


def _read_decoded(
    path: Path, read: Callable[[Path, str], Content], encoding: str | None, published_encoding: str = ""
) -> Content:
    """What `read` makes of a text file in its encoding, as `read_file` finds it."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a file; give one that can be read twice, such as a copy on disk")
    try:
        _refuse_binary(path)
        try:
            return read(path, encoding or "utf-8")
        except _NotDecodable as error:
            if encoding is not None:
                raise
            content = read(path, published_encoding or "latin-1")
            if not published_encoding:
                text = f"{error}; the file is read as latin-1 (--encoding NAME if it is another)"
                warnings.warn(text, MezzoWarning, stacklevel=2)
            return content
    except _NotDecodable as error:
        raise DataError(f"{error}; save the file as UTF-8, or pass --encoding latin-1") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def numbered_lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded one by one so that an invalid byte is located."""
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(raw) > MAX_LINE:
                raise DataError(f"{path}, line {number}: longer than {MAX_LINE:,} bytes; is this a data file?")
            if number == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DataError(f"{path}, line 1: encoded as UTF-16; save the file as UTF-8")
            if number == 1 and not raw.endswith(b"\n") and b"\r" in raw.rstrip(b"\r"):
                raise DataError(f"{path}: it has the line endings of old Macs (CR); save it with Unix ones (LF)")
            try:
                yield number, raw.decode(encoding).removeprefix("\ufeff" if number == 1 else "")
            except UnicodeDecodeError as error:
                raise _NotDecodable(
                    f"{path}, line {number}: not {encoding.upper()} (byte 0x{raw[error.start]:02x} at {error.start + 1})"
                ) from None
            except (LookupError, UnicodeError):
                raise _unknown_encoding(path, encoding) from None


def table_from_json(value: Any, source: str) -> Table:
    """The table in a parsed value: a list of objects, or an object of equally long columns, perhaps under `data`."""
    if isinstance(value, Mapping) and isinstance(value.get("data"), list | dict):
        value = value["data"]
    if isinstance(value, Mapping):
        columns = {key: column for key, column in value.items() if isinstance(column, list)}
        if len({len(column) for column in columns.values()}) != 1 or len(columns) != len(value):
            raise DataError(f"{source}: one object that is not a table; give a list of rows, or lists of equal length")
        value = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    if not isinstance(value, list):
        raise DataError(f"{source}: {type(value).__name__} is not a table; give a list of objects, one per row")
    return Table(source, [(n, _check_object(row, source, n, "row")) for n, row in enumerate(value, 1)], "row")


def _read_jsonl(path: Path, encoding: str) -> Table:
    rows, bad = [], BadRows(path)
    for number, line in numbered_lines(path, encoding):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                bad.add(number, _json_problem(error))
                continue
            rows.append((number, _check_object(value, path, number)))
    bad.refuse()
    return Table(str(path), rows)


def _read_json(path: Path, encoding: str) -> Table:
    """A list of objects, an object of columns, or `{"data": …}`; also JSON lines under the wrong suffix."""
    _check_size(path, path.stat().st_size)
    try:
        text = path.read_bytes().decode(encoding, errors="replace")
        value = json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or "\ufffd" in text:
            return _read_jsonl(path, encoding)  # which also finds the line of an invalid byte
        raise _bad_json(path, error.lineno, error) from None
    except (LookupError, UnicodeError):
        raise _unknown_encoding(path, encoding) from None
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, 1, error) from None
    if "\ufffd" in text:
        list(numbered_lines(path, encoding))
    return table_from_json(value, str(path))


def _read_csv(path: Path, encoding: str) -> RawTable:
    """Separated by commas, semicolons or tabs; quoted cells may contain separators, quotes and newlines."""
    default_limit = csv.field_size_limit(MAX_LINE)  # the module's own limit is lower, and global
    try:
        rows = []
        for number, cells in _csv_rows(path, encoding, _sniff_delimiter(path, encoding)):
            _check_columns(path, number, len(cells))
            rows.append((number, cells))
        return RawTable(str(path), rows)
    finally:
        csv.field_size_limit(default_limit)


def _csv_rows(path: Path, encoding: str, delimiter: str) -> Iterator[tuple[int, Cells]]:
    reader = csv.reader((line for _, line in numbered_lines(path, encoding)), strict=True, delimiter=delimiter)
    start = 1
    try:
        for cells in reader:
            if cells:
                yield start, cells
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {start}: bad csv ({error}); close or double its quotes") from None


def _sniff_delimiter(path: Path, encoding: str) -> str:
    """The separator by which most rows have as many cells as the first, which has several; a comma if none does."""

    def share_of_regular_rows(delimiter: str) -> float:
        try:
            rows = itertools.islice(_csv_rows(path, encoding, delimiter), SNIFFED_ROWS)
            widths = [len(cells) for _, cells in rows]
        except DataError:  # quotes that do not fit the separator; reported when the file is read
            return 0.0
        share = sum(width == widths[0] > 1 for width in widths) / max(1, len(widths))
        return share if share > 0.5 else 0.0

    return max(DELIMITERS, key=share_of_regular_rows)


def _read_tsv(path: Path, encoding: str) -> RawTable:
    """Tab-separated as in GLUE: quotes are ordinary characters, except in a cell that was quoted when it was written."""
    rows = []
    for number, line in numbered_lines(path, encoding):
        if line.strip():
            _check_columns(path, number, line.count("\t") + 1)
            rows.append((number, [unquote(cell) for cell in line.rstrip("\r\n").split("\t")]))
    return RawTable(str(path), rows)


def _read_txt(path: Path, encoding: str) -> RawTable:
    """Lines of text, one cell each."""
    lines = numbered_lines(path, encoding)
    return RawTable(str(path), [(number, [line.strip()]) for number, line in lines if line.strip()], lines=True)


def _read_parquet(path: Path, _: str) -> Table:
    try:
        import pyarrow as arrow  # type: ignore[import-untyped, unused-ignore]
        from pyarrow import parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow; pip install pyarrow, or convert it to jsonl") from None
    try:
        with parquet.ParquetFile(path) as file:
            metadata = file.metadata
            _check_columns(path, 1, metadata.num_columns, "row")
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            # The size it claims to unpack to, and one byte per cell: empty columns compress without limit.
            cells = metadata.num_rows * metadata.num_columns
            _check_size(path, sum(group.total_byte_size for group in groups) + cells)
            table = file.read()
        rows = list(enumerate(table.to_pylist(), 1))
    except (arrow.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"{path}: not a parquet file ({(str(error).splitlines() or ['unreadable'])[0]})") from None
    return Table(str(path), rows, "row", _label_names(table.schema.metadata or {}))


# Readers by suffix, in order of preference where a folder has a split in several formats.
READERS: dict[str, Callable[[Path, str], Table | RawTable]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".tsv": _read_tsv,
    ".csv": _read_csv,
    ".txt": _read_txt,
    ".all": _read_txt,  # TREC, MR, CR, MPQA and Subj as sent-conv publishes them
    ".label": _read_txt,  # TREC as its authors do
    ".parquet": _read_parquet,
}


def unquote(cell: str) -> str:
    """`"a ""b"" c"` is `a "b" c`: a writer quotes a cell only if it contains quotes, and doubles all of them."""
    inner = cell[1:-1]
    quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '""' in inner and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if quoted else cell


def _label_names(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Label names that the `datasets` library stores in a parquet file."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {column: tuple(feature["names"]) for column, feature in features.items() if "names" in feature}
    except (KeyError, TypeError, ValueError):
        return {}


def _refuse_binary(path: Path) -> None:
    """Refuse a file that is not text by saying what it is, whatever its name."""
    with path.open("rb") as file:
        start = file.read(1024)
    if path.suffix.lower() == ".parquet" or start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return
    kind = next((kind for magic, kind in _BINARY.items() if start.startswith(magic)), None)
    if kind is not None:
        raise DataError(f"{path} is {kind}, not text; unpack or convert it, and give one of {', '.join(READERS)}")
    if b"\0" in start:
        raise DataError(f"{path} is a binary file, not text; give one of {', '.join(READERS)}")


def _check_size(path: Path, size: int) -> None:
    if size > MAX_TABLE:
        raise DataError(f"{path}: {size:,} bytes are too many to read at once; write it as jsonl")


def _check_object(value: Any, source: Any, number: int, unit: str = "line") -> Row:
    if not isinstance(value, Mapping):
        raise DataError(
            f"{source}, {unit} {number}: {type(value).__name__} is not an object with columns; write one object per row"
        )
    _check_columns(source, number, len(value), unit)
    return value


def _check_columns(source: Any, number: int, count: int, unit: str = "line") -> None:
    if count > MAX_COLUMNS:
        raise DataError(
            f"{source}, {unit} {number}: {count:,} columns, and {MAX_COLUMNS:,} is the most; keep those that the task needs"
        )


def _bad_json(path: Path, number: int, error: Exception) -> DataError:
    return DataError(f"{path}, line {number}: {_json_problem(error)}")


def _json_problem(error: Exception) -> str:
    reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else type(error).__name__
    return f"bad JSON ({reason}); fix or delete that line"


def _unknown_encoding(path: Path, encoding: str) -> DataError:
    return DataError(f"{path}: unknown encoding {encoding!r}; use utf-8 or latin-1")
