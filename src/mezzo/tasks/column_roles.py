"""Which column of a table is the label and which are the texts: by usual names, else by what the columns hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mezzo.errors import DataError, LabelError

# Usual names, in order of preference; the last word of a longer name (`issue_category`) counts too.
LABEL_NAMES = (
    *(
        "label_text",
        "label_name",
        "label",
        "labels",
        "gold_label",
        "class",
        "category",
        "target",
        "sentiment",
        "intent",
    ),
    *("topic", "stars", "rating", "emotion", "verdict", "tag", "queue", "department", "type", "priority", "score"),
)
TEXT_NAMES = (
    *("text", "sentence", "body", "message", "review", "content", "comment", "description", "utterance", "tweet"),
    *("document", "question", "query", "feedback", "complaint", "ticket", "post", "email", "article", "abstract"),
    *("passage", "premise", "summary", "note", "notes"),
)
PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("text1", "text2")),
    *(("text_a", "text_b"), ("s1", "s2"), ("question", "sentence"), ("question", "passage"), ("question", "context")),
)
# Names of a short text that belongs to a longer one.
TITLES = ("title", "subject", "headline")
# A label column that is recognised by its content has at most this many values.
MOST_LABELS = 100
_NUMBERS = re.compile(r"[\d\s.,:/+TZ%-]+")


@dataclass(frozen=True)
class Roles:
    """Names of the columns of a table."""

    texts: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Column:
    """The cells of a column that are not empty."""

    name: str
    cells: Sequence[str]

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(self.cells)

    @cached_property
    def words(self) -> float:
        """Words in a cell, on average."""
        return sum(len(cell.split()) for cell in self.cells) / max(1, len(self.cells))

    @cached_property
    def is_number(self) -> bool:
        """Does it hold numbers, dates or nothing?"""
        return all(_NUMBERS.fullmatch(cell) for cell in self.counts)

    def could_be_label(self, largest_share: float = 0.5) -> bool:
        """Does it have few values? `largest_share` is that of different values among the cells."""
        return 2 <= len(self.counts) <= max(2, len(self.cells) * largest_share)


def find_roles(columns: Mapping[str, Sequence[str]], where: str, named: Mapping[str, str], texts: int | None) -> Roles:
    """The roles of `columns` (name → cells). `named` has those that the user stated: `label`, and texts by any other key.
    `texts` is how many there must be; None: one, or a pair."""
    for key, source in named.items():
        if source not in columns:
            raise DataError(f"{where}: no column {source!r} for {key!r}; found {_quote(columns)}")
    table = {name: Column(name, [cell for cell in cells if cell]) for name, cells in columns.items()}
    stated = tuple(source for key, source in named.items() if key != "label")
    label = named.get("label") or _label_by_name(table, stated)
    found = stated or _texts(table, label, where, texts)
    label = label or _label_by_content(table, found, where)
    _refuse_one_class(table[label], where)
    return Roles(found, label)


def is_usual(name: str) -> bool:
    """Is this a usual name of a label or a text? Used to recognise a header."""
    return _simplify(name) in {*LABEL_NAMES, *TEXT_NAMES, *TITLES, *(each for pair in PAIRS for each in pair), "id"}


def _label_by_name(table: Mapping[str, Column], texts: Sequence[str]) -> str | None:
    others = {name: column for name, column in table.items() if name not in texts}
    usable = _by_name(others, LABEL_NAMES, Column.could_be_label)
    return usable or _by_name(others, LABEL_NAMES, lambda column: len(column.counts) == 1)  # refused later, by its name


def _label_by_content(table: Mapping[str, Column], texts: Sequence[str], where: str) -> str:
    others = [column for name, column in table.items() if name not in texts and column.could_be_label(0.2)]
    short = [column for column in others if column.words <= 3 and len(column.counts) <= MOST_LABELS]
    likely = [column.name for column in short if not column.is_number] or [column.name for column in short]
    if len(likely) == 1:
        return likely[0]
    if likely:
        raise DataError(
            f"{where}: the label could be {' or '.join(map(repr, likely))}; say which it is: --columns label=NAME"
        )
    raise LabelError(
        f"{where}: no column looks like labels (a few values that repeat) among {_quote(table)}; "
        "say which it is: --columns label=NAME"
    )


def _texts(table: Mapping[str, Column], label: str | None, where: str, wanted: int | None) -> tuple[str, ...]:
    """One text or a pair: by names, else the columns with the most words."""
    others = {name: column for name, column in table.items() if name != label and not column.is_number}
    names = {_simplify(name): name for name in others}
    for first, second in PAIRS if wanted != 1 else ():
        if first in names and second in names:
            return names[first], names[second]
    by_words = sorted(others.values(), key=lambda column: -column.words)
    if not by_words:
        raise DataError(f"{where}: no column holds texts; found {_quote(table)}; say which it is: --columns text=NAME")
    by_name = _by_name(others, TEXT_NAMES, lambda column: not column.could_be_label(0.05))
    text = by_name or by_words[0].name
    title = next((names[each] for each in TITLES if each in names and names[each] != text), None)
    if title and wanted != 1:
        return title, text
    others_by_words = [column for column in by_words if column.name != text]
    if others_by_words and wanted != 1:
        # Without usual names, two columns of similar length are a pair.
        similar = not by_name and others_by_words[0].words >= max(3.0, by_words[0].words / 2)
        if wanted == 2 or similar:
            pair = (text, others_by_words[0].name)
            return pair if wanted == 2 else tuple(name for name in table if name in pair)
    return (text,)


def _by_name(columns: Mapping[str, Column], usual: Sequence[str], fits: Callable[[Column], bool]) -> str | None:
    """The fitting column with the most usual name: all of it, else its last word."""
    for simplify in (_simplify, _last_word):
        named = {simplify(name): name for name in reversed(list(columns)) if fits(columns[name])}
        if match := next((named[name] for name in usual if name in named), None):
            return match
    return None


def _refuse_one_class(column: Column, where: str) -> None:
    if len(column.counts) < 2:
        held = f"only {next(iter(column.counts))[:40]!r}" if column.counts else "nothing"
        raise DataError(
            f"{where}: the label column {column.name!r} holds {held}; training needs at least two labels"
            " (another column: --columns label=NAME)"
        )


def _simplify(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _last_word(name: str) -> str:
    """`issue_category` and `issueCategory` are a category."""
    return _simplify(re.sub(r"([a-z])([A-Z])", r"\1_\2", name)).rpartition("_")[2]


def _quote(names: Mapping[str, object]) -> str:
    shown = ", ".join(repr(name[:30]) for name in list(names)[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")
