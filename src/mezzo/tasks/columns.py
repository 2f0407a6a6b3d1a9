"""Which column of the data is which column of the task, with or without a header."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mezzo.errors import DataError, LabelError
from mezzo.tasks.column_names import SYNONYMS
from mezzo.tasks.labels import LabelReader
from mezzo.tasks.readers import BadRows, Cells, RawTable, Table
from mezzo.tasks.task import Task


def match_columns(
    task: Task, names: Sequence[str], where: str, column_map: Mapping[str, str], labelled: bool
) -> dict[str, str]:
    """Task column → column of the data: as `column_map` states, by the same name, or by a known synonym."""
    for column, source in column_map.items():
        if source not in names and (labelled or column != task.label_column):
            raise DataError(f"{where}: no column {source!r} for {column!r}; found {_quote_names(names)}")
    required = required_columns(task)
    columns = {c: column_map.get(c) or _find_column(task, c, names, where) for c in (*required, task.label_column)}
    label = columns[task.label_column]
    missing = [column for column in required if columns[column] is None]
    others = [name for name in names if name not in columns.values()]
    if len(required) == 1 and missing and label is not None and len(others) == 1:
        columns[required[0]], missing = others[0], []
    if missing or (label is None and labelled):
        column = missing[0] if missing else task.label_column
        hint = _columns_hint(column)
        error = DataError if missing else LabelError
        raise error(f"{where}: no column {column!r}; found {_quote_names(names)}; rename one, or {hint}")
    return {column: source for column, source in columns.items() if source is not None}


def required_columns(task: Task) -> list[str]:
    """The columns a row must have besides its label."""
    return list(dict.fromkeys([*task.columns, *task.candidates, *task.fill[:1]]))


def name_columns(
    task: Task, raw: RawTable, labels: LabelReader, labelled: bool, column_map: Mapping[str, str]
) -> tuple[Table, bool]:
    """The rows by column name, and whether the file had a header."""
    if raw.lines:
        return _table_from_lines(task, raw, labels, labelled), False
    first = raw.rows[0][1]
    inferred = None if _is_header(task, first, labelled, column_map) else _infer_header(task, raw, labels, labelled)
    header = inferred or first
    rows = raw.rows if inferred else raw.rows[1:]
    if not rows:
        raise DataError(f"{raw.source}: a header but no rows; give a file with data")
    if repeated := [name for name, count in Counter(header).items() if name and count > 1]:
        raise DataError(f"{raw.source}: the column {repeated[0]!r} appears twice; rename one")
    rows = [(number, _align_snli_row(header, cells)) for number, cells in rows]
    bad = BadRows(raw.source)
    for number, cells in rows:
        if len(cells) != len(header):
            bad.add(
                number,
                f"{len(cells)} columns where {len(header)} are expected; "
                "quote cells that contain the separator, or delete the line",
            )
    bad.refuse()
    named_rows = [(number, dict(zip(header, cells, strict=True))) for number, cells in rows]
    return Table(raw.source, named_rows), inferred is None


def _align_snli_row(header: Cells, cells: Cells) -> Cells:
    """SNLI in GLUE: before the last cell, a row may hold the labels of four annotators that its header does not name."""
    if header[-2:] == ["label1", "gold_label"] and len(cells) == len(header) + 4:
        return [*cells[: len(header) - 1], cells[-1]]
    return cells


def _is_header(task: Task, cells: Cells, labelled: bool, column_map: Mapping[str, str]) -> bool:
    """Do the cells of the first row name the columns the task needs?"""
    if any(source in cells for source in column_map.values()):
        return True
    required = [*required_columns(task), *([task.label_column] if labelled else [])]
    return all(_matching_columns(task, column, cells) for column in required)


def is_header_line(task: Task, cells: Cells, column_map: Mapping[str, str]) -> bool:
    """Can these cells, of a first line that may also be a text, be nothing but a header?"""
    if any(cell != cell.strip() for cell in cells) or len(set(cells)) < len(cells):
        return False
    if len(cells) == 1:  # the name itself: a synonym such as "review" may be a text
        return cells[0] in (column_map.get(name, name) for name in required_columns(task))
    return _is_header(task, cells, False, column_map)


def _infer_header(task: Task, raw: RawTable, labels: LabelReader, labelled: bool) -> list[str] | None:
    """Names for the columns of a file without a header, or None if it must have one."""
    first = raw.rows[0][1]
    width = len(first)
    if len(task.layout) == width and labels.could_be_label(first[task.layout.index(task.label_column)]):
        return list(task.layout)
    if width == len(task.columns) + 1:
        headers = {0: [task.label_column, *task.columns], -1: [*task.columns, task.label_column]}
        places = [place for place in headers if labels.could_be_label(first[place])]
        if places:  # one text may look like a label; a column of texts does not
            labels_at = lambda place: sum(labels.could_be_label(cells[place]) for _, cells in raw.rows[:100])  # noqa: E731
            return headers[max(places, key=labels_at)]
    if width == len(task.columns) and not labelled and not _is_header(task, first, False, {}):
        return list(task.columns)
    return None


def _table_from_lines(task: Task, raw: RawTable, labels: LabelReader, labelled: bool) -> Table:
    """`label text` lines; without labels, whole lines of text unless every line begins with a label."""
    required = required_columns(task)
    if len(required) > 1:
        raise DataError(f"{raw.source}: a line holds one text, but the task has {_quote_names(required)}; use jsonl")
    column = task.columns[0]
    split = [(number, cells[0].split(maxsplit=1)) for number, cells in raw.rows]
    if not labelled and not all(labels.could_be_label(words[0]) for _, words in split):
        return Table(raw.source, [(number, {column: cells[0]}) for number, cells in raw.rows])
    rows = [(number, {task.label_column: words[0], column: "".join(words[1:])}) for number, words in split]
    return Table(raw.source, rows)


def flatten_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the fields of its nested objects added by dotted name (`target.span1_text`)."""
    nested = [(key, value) for key, value in row.items() if isinstance(value, Mapping)]
    return {**row, **{f"{key}.{name}": value for key, inner in nested for name, value in inner.items()}}


def _find_column(task: Task, column: str, names: Sequence[str], where: str) -> str | None:
    matches = _matching_columns(task, column, names)
    if len(matches) > 1:
        candidates, hint = " or ".join(map(repr, matches)), _columns_hint(column)
        raise DataError(f"{where}: the column {column!r} could be {candidates}; {hint}")
    return matches[0] if matches else None


def _matching_columns(task: Task, column: str, names: Iterable[str]) -> list[str]:
    """Columns of the data that may be `column`: the one of that name, else the task's aliases, else synonyms."""
    reserved = {name.lower() for name in (*required_columns(task), task.label_column)} - {column.lower()}
    groups = ({column}, task.column_aliases.get(column, ()), *(group for group in SYNONYMS if column in group))
    for group in groups:
        accepted = {name.lower() for name in group} - reserved
        if matches := [name for name in names if name.strip().lower() in accepted]:
            return matches
    return []


def _columns_hint(column: str) -> str:
    return f"say which it is: --columns {column}=NAME (in Python, columns={{{column!r}: NAME}})"


def _quote_names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:30]) for name in names[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "") if names else "no columns"
