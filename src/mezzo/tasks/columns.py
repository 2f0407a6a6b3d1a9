"""Which column of the data is which column of the task, and what a file without a header means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mezzo.errors import DataError
from mezzo.tasks.labels import Labels
from mezzo.tasks.readers import Cells, Records, Sheet
from mezzo.tasks.task import Task

# Names that mean the same column in the data sets people have.
_SYNONYMS = (
    ("text", "sentence", "review", "content", "comment", "tweet", "utterance", "document", "body", "question"),
    ("premise", "sentence1", "question1", "text1", "text_a", "s1", "#1 string"),
    ("hypothesis", "sentence2", "question2", "text2", "text_b", "s2", "#2 string"),
    ("label", "labels", "gold_label", "coarse_label", "label-coarse", "is_duplicate", "class", "target", "sentiment"),
    ("answers", "answer"),
)


def resolve(task: Task, found: Sequence[str], where: str, named: Mapping[str, str], labelled: bool) -> dict[str, str]:
    """Task column → column of the data: as the caller names it, by the same name, or by a known synonym."""
    for column, source in named.items():
        if source not in found:
            raise DataError(f"{where}: no column {source!r} for {column!r}; found {_list(found)}")
    wanted = needed(task)
    columns = {column: named.get(column) or _guess(task, column, found, where) for column in wanted}
    label = named.get(task.label_column) or _guess(task, task.label_column, found, where)
    missing = [column for column, source in columns.items() if source is None]
    others = [name for name in found if name != label and name not in columns.values()]
    if len(wanted) == 1 and missing and label is not None and len(others) == 1:
        columns[wanted[0]], missing = others[0], []
    if missing or (label is None and labelled):
        column = missing[0] if missing else task.label_column
        raise DataError(f"{where}: no column {column!r}; found {_list(found)}; rename one, or {_say(column)}")
    resolved = {column: source for column, source in columns.items() if source is not None}
    return resolved if label is None else {**resolved, task.label_column: label}


def needed(task: Task) -> list[str]:
    """The columns a row must have, its label aside."""
    return list(dict.fromkeys([*task.columns, *task.candidates, *task.fill[:1]]))


def records(task: Task, sheet: Sheet, labels: Labels, labelled: bool, named: Mapping[str, str]) -> tuple[Records, bool]:
    """A sheet's rows by column name, and whether it had no header."""
    if sheet.source.lower().endswith(".txt"):
        return _labelled_lines(task, sheet, labels, labelled), True
    first = sheet.rows[0][1]
    names = None if is_header(task, first, labelled, named) else headerless(task, sheet.rows, labels, labelled)
    if len(first) == 1 and ";" in first[0] and (not names or is_header(task, first[0].split(";"), labelled, named)):
        raise DataError(
            f"{sheet.source}: it looks separated by ';'; save it with commas: "
            "pandas.read_csv(OLD, sep=';').to_csv(NEW, index=False)"
        )
    rows = sheet.rows if names else sheet.rows[1:]
    header = names or first
    if not rows:
        raise DataError(f"{sheet.source}: a header and no rows; give a file with data")
    if repeated := [name for name in header if name and header.count(name) > 1]:
        raise DataError(f"{sheet.source}: the column {repeated[0]!r} is there twice; rename one")
    rows = [(number, _aligned(header, cells)) for number, cells in rows]
    for number, cells in rows:
        if len(cells) != len(header):
            raise DataError(
                f"{sheet.source}, line {number}: {len(cells)} columns where {len(header)} are expected; "
                "quote cells that contain the separator, or delete the line"
            )
    made = [(number, dict(zip(header, cells, strict=True))) for number, cells in rows]
    return Records(sheet.source, made), names is not None


def _aligned(header: Cells, cells: Cells) -> Cells:
    """SNLI as GLUE has it: a row may hold four annotators' labels that its header does not name, before the last."""
    if header[-2:] == ["label1", "gold_label"] and len(cells) == len(header) + 4:
        return [*cells[: len(header) - 1], cells[-1]]
    return cells


def is_header(task: Task, cells: Cells, labelled: bool, named: Mapping[str, str]) -> bool:
    """Do the cells of the first row name the columns the task needs?"""
    if any(source in cells for source in named.values()):
        return True
    wanted = [*needed(task), *([task.label_column] if labelled else [])]
    return all(_matches(task, column, cells) for column in wanted)


def headerless(task: Task, rows: Sequence[tuple[int, Cells]], labels: Labels, labelled: bool) -> list[str] | None:
    """Names for the columns of a file without a header, or None if it must have one."""
    width = len(rows[0][1])
    if len(task.layout) == width and labels.knows(rows[0][1][task.layout.index(task.label_column)]):
        return list(task.layout)
    if width == len(task.columns) + 1:
        ends = {0: [task.label_column, *task.columns], -1: [*task.columns, task.label_column]}
        possible = [end for end in ends if labels.knows(rows[0][1][end])]
        if possible:  # a text may look like a label; a column of texts does not
            return ends[max(possible, key=lambda end: sum(labels.knows(cells[end]) for _, cells in rows[:100]))]
    if width == len(task.columns) and not labelled and not is_header(task, rows[0][1], False, {}):
        return list(task.columns)
    return None


def _labelled_lines(task: Task, sheet: Sheet, labels: Labels, labelled: bool) -> Records:
    """`label text` lines; without labels, whole lines of text unless every line begins with a label."""
    if len(needed(task)) > 1:
        raise DataError(f"{sheet.source}: a line holds one text, and the task has {_list(needed(task))}; use jsonl")
    column = task.columns[0]
    split = [(number, cells[0].split(maxsplit=1)) for number, cells in sheet.rows]
    if not labelled and not all(labels.knows(words[0]) for _, words in split):
        return Records(sheet.source, [(number, {column: cells[0]}) for number, cells in sheet.rows])
    rows = [(number, {task.label_column: words[0], column: "".join(words[1:])}) for number, words in split]
    return Records(sheet.source, rows)


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its nested objects' fields beside them, by dotted name (`target.span1_text`)."""
    nested = [(key, value) for key, value in row.items() if isinstance(value, Mapping)]
    return {**row, **{f"{key}.{name}": value for key, inner in nested for name, value in inner.items()}}


def _guess(task: Task, column: str, found: Sequence[str], where: str) -> str | None:
    matches = _matches(task, column, found)
    if len(matches) > 1:
        raise DataError(f"{where}: the column {column!r} could be {' or '.join(map(repr, matches))}; {_say(column)}")
    return matches[0] if matches else None


def _matches(task: Task, column: str, found: Iterable[str]) -> list[str]:
    """Columns of the data that may be `column`: the one of that name, else the task's aliases, else synonyms."""
    taken = {name.lower() for name in (*needed(task), task.label_column)} - {column.lower()}
    groups = ({column}, task.column_aliases.get(column, ()), *(group for group in _SYNONYMS if column in group))
    for names in groups:
        wanted = {name.lower() for name in names} - taken
        if matches := [name for name in found if name.strip().lower() in wanted]:
            return matches
    return []


def _say(column: str) -> str:
    return f"say which it is: --columns {column}=NAME (in Python, columns={{{column!r}: NAME}})"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:30]) for name in names[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "") if names else "no columns"
