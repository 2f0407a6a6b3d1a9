"""The types and lengths of a task's values, which may come from anybody's file: checked before anything uses them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mezzo.errors import TaskError

# Characters of one value of a task: each is tokenised as a whole, before anything is cut.
MAX_TEXT = 100_000
# Characters that one replacement of `rewrite` may put into a text: several of them could multiply it.
MAX_REWRITTEN = 10_000_000
TEXTS = ("name", "template", "label_column", "answer_end", "encoding", "family", "kind", "metric")
LISTS = ("columns", "labels", "candidates", "fill", "layout")
TABLES = ("id_orders", "label_aliases", "column_aliases", "rewrite", "sample")
SWITCHES = ("space_prefix", "lower_candidates")
_PLAIN = (str, int, float, bool, type(None), datetime.date, datetime.time)


def check_shapes(task: Any) -> None:
    """TaskError where a value of a task is not of its field's type, or is longer than any task needs."""
    for name in TEXTS:
        _check_text(name, getattr(task, name))
    for name in SWITCHES:
        if not isinstance(value := getattr(task, name), bool):
            raise TaskError(f"{name} is {_shown(value)}; give true or false")
    if task.id_order is not None:
        _check_text("id_order", task.id_order)
    _check_lists(task)
    for name in TABLES:
        _check_table(name, getattr(task, name))
    for key, value in task.label_aliases.items():
        _check_text(f"label_aliases: {key}", value)
    for name in ("id_orders", "column_aliases"):
        for key, value in getattr(task, name).items():
            as_strings(f"{name}: {key}", value)
    for column, pairs in task.rewrite.items():
        _check_table(name := f"rewrite: {column}", pairs)
        for key, value in pairs.items():
            _check_text(f"{name}: {key}", value)
    for key, value in task.sample.items():
        _check_plain(f"sample: {key}", value)
    for name in (*LISTS, "words", *TABLES[:-1]):
        if (count := sum(map(len, _texts(getattr(task, name))))) > MAX_TEXT:
            raise TaskError(f"{name} has {count:,} characters; {MAX_TEXT:,} are allowed")


def _check_lists(task: Any) -> None:
    for name in LISTS:
        as_strings(name, getattr(task, name))
    if isinstance(task.words, Mapping):
        for key, value in task.words.items():
            _check_word(f"words: {key}", value)
    else:
        as_strings("words", task.words)
    if len(task.fill) not in (0, 2):
        raise TaskError(f"fill has {len(task.fill)} values; give a column and the marker in its text")


def as_strings(name: str, value: Any) -> tuple[str, ...]:
    """The items of a list as text; numbers, as labels may be, are written out."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TaskError(f"{name} is {_shown(value)}; give a list, such as ['text']")
    for item in value:
        _check_word(name, item)
    return tuple(str(item) for item in value)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TaskError(f"{name} is {_shown(value)}; give a string")
    if len(value) > MAX_TEXT:
        raise TaskError(f"{name} has {len(value):,} characters; {MAX_TEXT:,} are allowed")


def _check_word(name: str, value: Any) -> None:
    if not isinstance(value, _PLAIN):
        raise TaskError(f"{name} holds {_shown(value)}; give text")


def _check_table(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TaskError(f"{name} is {_shown(value)}; give a table")
    for key in value:
        if not isinstance(key, str):
            raise TaskError(f"{name} has the key {_shown(key)}; put it in quotes, as text")


def _check_plain(name: str, value: Any) -> None:
    """What JSON can hold."""
    if isinstance(value, Mapping):
        _check_table(name, value)
    elif not isinstance(value, str | list | tuple):
        if not isinstance(value, str | int | float | None):
            raise TaskError(f"{name} holds {_shown(value)}; put it in quotes, as text")
        return
    for inner in value.values() if isinstance(value, Mapping) else () if isinstance(value, str) else value:
        _check_plain(name, inner)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, keys included."""
    if isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, str):
        yield value
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
