"""A task for data that comes without one: its columns, its labels with their words, and templates to choose from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mezzo.errors import DataError, join_names
from mezzo.tasks.column_roles import Roles, find_roles, is_usual
from mezzo.tasks.columns import flatten_row
from mezzo.tasks.label_words import propose_words
from mezzo.tasks.labels import is_missing, normalize_label
from mezzo.tasks.readers import RawTable, Table
from mezzo.tasks.registry import list_tasks
from mezzo.tasks.task import Task
from mezzo.tasks.tokenizer import TokenizerWrapper
from mezzo.types import Example, Family

# Templates by family and number of texts; the first is used where they are not compared.
TEMPLATES: dict[tuple[Family, int], tuple[str, ...]] = {
    ("masked", 1): (
        "{0} It was [MASK].",
        "{0} This is [MASK].",
        "{0} This is about [MASK].",
        "{0} Topic: [MASK].",
        "[MASK]: {0}",
    ),
    ("masked", 2): (
        "{0:.}? [MASK], {1:l}",
        "{0} [MASK], {1:l}",
        "{0} {1} This is [MASK].",
        "{0} {1} This is about [MASK].",
        "[MASK]: {0} {1}",
    ),
    ("causal", 1): (
        "{0} It was",
        "{0}\nThis is about",
        "{0}\nTopic:",
        "{0}\nThis text is",
        "Which is it: LABELS?\n{0}\nAnswer:",
    ),
    ("causal", 2): (
        "{0}\n{1}\nThis is about",
        "{0}\n{1}\nTopic:",
        "Which is it: LABELS?\n{0}\n{1}\nAnswer:",
    ),
}
MAX_LENGTH: dict[Family, int] = {"masked": 128, "causal": 2048}
# Labels that a template lists at most.
MOST_LISTED = 10
_SLOT = re.compile(r"\{([^{}:]+)(?::[^{}]*)?\}|\*\+?sent[lu]?-?_(\d+)\*")


@dataclass(frozen=True)
class Proposal:
    """A task made for a table. Its template is the first of `templates`, or the best of `ranking`."""

    task: Task
    sources: Mapping[str, str]
    """Column of the task → column of the data."""
    templates: tuple[str, ...]
    counts: Mapping[str, int]
    """Label → rows."""
    head: bool = False
    """Labels are read from a fresh classification head, because they have no words."""
    notes: tuple[str, ...] = ()
    ranking: tuple[tuple[str, float], ...] = ()
    """Templates, best first, with the mutual information in bits between a text and the untrained model's answer."""

    def rank(self, bits: Mapping[str, float]) -> Proposal:
        """With the template of which a text says most about the answer."""
        ranking = tuple(sorted(bits.items(), key=lambda each: -each[1]))
        return replace(self, ranking=ranking, task=self.task.replace(template=ranking[0][0]))

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task.as_dict(),
            "columns": dict(self.sources),
            "rows": dict(self.counts),
            "readout": "head" if self.head else "words",
            "ranking": [{"template": template, "bits": round(bits, 4)} for template, bits in self.ranking],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The block that is shown before the task is used."""
        task = self.task
        labels = [label if self.head else f"{label} → {word}" for label, word in task.word_of.items()]
        lines = [
            f"proposed task {task.name!r}:",
            f"  text      {', '.join(self.sources[column] for column in task.columns)}",
            f"  label     {self.sources[task.label_column]}: {join_names(labels)}",
        ]
        if not self.head or task.family == "causal":
            lines.append(f"  template  {one_line(task.template)}")
        return "\n".join([*lines, *(f"  note      {note}" for note in self.notes)])


def propose(
    table: Table | RawTable,
    tokenizer: TokenizerWrapper,
    family: Family,
    *,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    words: Mapping[str, str] | None = None,
    head: bool | None = None,
) -> Proposal:
    """A task for `table`. What is given is kept: columns (`label`, and texts by any other key), template, label → word.

    `head`: whether labels are read from a fresh classification head; None: if they have no words.
    """
    cells, has_header = table_columns(table)
    if columns and not has_header:
        raise DataError(f"{table.source}: it has no header for --columns to name; write one as the first line")
    slots = list(dict.fromkeys(name or index for name, index in _SLOT.findall(template or "")))
    named = dict(columns or {})
    if not set(named) - {"label"} and set(slots) <= set(cells):
        named = {slot: slot for slot in slots} | named
    roles = find_roles(cells, table.source, named, len(slots) or None)
    sources = _name_columns(roles, named, slots, has_header)
    *text_columns, label_column = sources
    if len(text_columns) > 2 and template is None:
        raise DataError(
            f"{table.source}: for more than two texts, write the template: --template '{{a}} {{b}} {{c}} [MASK]'"
        )
    counts, aliases = _count_labels(cells[roles.label], words or (), table.source)
    space = template is None or not template[-1:].isspace()
    found = words or propose_words(tokenizer, tuple(counts), space or family == "masked")
    notes = _make_notes(found, given=bool(words)) if head is None else []
    head = found is None if head is None else head
    word_of = dict(found or {label: label for label in counts})
    candidates = (template,) if template else _make_templates(family, text_columns, word_of)
    task = Task(
        name=_make_name(table.source),
        template=candidates[0],
        columns=tuple(text_columns),
        labels=tuple(word_of),
        words=tuple(word_of.values()),
        family=family,
        max_length=MAX_LENGTH[family],
        label_column=label_column,
        label_aliases=aliases,
        column_aliases={c: (source,) for c, source in sources.items() if has_header and source != c},
        layout=() if has_header else tuple({s: c for c, s in sources.items()}.get(name, "") for name in cells),
    )
    return Proposal(task, sources, candidates, counts, head, tuple(notes))


def sample_texts(table: Table | RawTable, proposal: Proposal) -> list[Example]:
    """The texts of all rows, as examples without labels."""
    cells, _ = table_columns(table)
    columns = proposal.task.columns
    rows = zip(*(cells[proposal.sources[column]] for column in columns), strict=True)
    return [Example(dict(zip(columns, texts, strict=True))) for texts in rows if any(texts)]


def table_columns(table: Table | RawTable) -> tuple[dict[str, list[str]], bool]:
    """The cells of each column as text, empty where there is none, and whether the columns have names of their own."""
    if isinstance(table, RawTable):
        return _raw_columns(table)
    rows = [flatten_row(row) for _, row in table.rows]
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, str | int | float))
    return {name: [_cell(row.get(name), table.label_names.get(name, ())) for row in rows] for name in names}, True


def one_line(template: str) -> str:
    """A template as it is shown: a newline as `\\n`."""
    return template.replace("\n", "\\n")


def _raw_columns(table: RawTable) -> tuple[dict[str, list[str]], bool]:
    first = table.rows[0][1]
    if table.lines:
        raise DataError(f"{table.source}: lines of text have no columns to propose a task from; pass --task NAME")
    body = [cells for _, cells in table.rows[1:] if len(cells) == len(first)]
    # A row of data holds values that come again, at least its label; a header does not.
    repeated = [value.strip() and any(cells[i] == value for cells in body) for i, value in enumerate(first)]
    has_header = not any(repeated) or any(is_usual(v) and not again for v, again in zip(first, repeated, strict=True))
    names = first if has_header else [f"column {number}" for number in range(1, len(first) + 1)]
    rows = body if has_header else [first, *body]
    if not rows:
        raise DataError(f"{table.source}: a header but no rows; give a file with data")
    return {name: [_cell(cells[i]) for cells in rows] for i, name in enumerate(names) if name.strip()}, has_header


def _cell(value: Any, names: Sequence[str] = ()) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    is_value = isinstance(value, str | int | float) and (str(value).strip() == "-1" or not is_missing(value))
    return str(value).strip() if is_value else ""


def _name_columns(roles: Roles, named: Mapping[str, str], slots: Sequence[str], has_header: bool) -> dict[str, str]:
    """Names of the task's columns, texts first, then the label → the data's columns.

    As the user or the user's template names them, else as the data does.
    """
    given = {source: key for key, source in named.items()}
    invented = slots if len(slots) == len(roles.texts) and not any(map(str.isdecimal, slots)) else ()
    plain = ("text",) if len(roles.texts) == 1 else ("text1", "text2")
    defaults = invented or (roles.texts if has_header else plain)
    texts = {given.get(source, default): source for source, default in zip(roles.texts, defaults, strict=True)}
    return {**texts, given.get(roles.label, roles.label if has_header else "label"): roles.label}


def _count_labels(cells: Sequence[str], known: Collection[str], where: str) -> tuple[dict[str, int], dict[str, str]]:
    """Label → rows, in order, and other spellings of labels. Case, spaces and underscores make no difference."""
    spellings = Counter(cell for cell in cells if cell)
    if not set(spellings) <= {"-1", "0", "1"} and "-1" not in known:
        del spellings["-1"]  # a row without a label
    # Tables with gaps store the label 1 as 1.0.
    aliases = {cell: cell[:-2] for cell in spellings if re.fullmatch(r"-?\d+\.0", cell)}
    name_of = {normalize_label(label): label for label in known}
    counts = dict.fromkeys(known, 0)
    for cell, count in spellings.most_common():
        label = name_of.setdefault(normalize_label(aliases.get(cell, cell)), aliases.get(cell, cell))
        counts[label] = counts.get(label, 0) + count
    if not known:
        return dict(sorted(counts.items(), key=_label_order)), aliases
    if unknown := [f"{label!r} ({count} rows)" for label, count in counts.items() if label not in known]:
        raise DataError(f"{where}: no word for the label {join_names(unknown)}; --words needs one for every label")
    return counts, aliases


def _label_order(item: tuple[str, int]) -> tuple[bool, float, str]:
    """Numbers by value, then names by letter."""
    number = re.fullmatch(r"-?\d{1,15}", item[0])
    return number is None, float(item[0]) if number else 0.0, item[0].casefold()


def _make_templates(family: Family, columns: Sequence[str], word_of: Mapping[str, str]) -> tuple[str, ...]:
    """The templates with the columns by name, where a name can stand in a slot."""
    *firsts, last = (word.replace("{", "{{").replace("}", "}}") for word in word_of.values())
    listed = f"{', '.join(firsts)} or {last}"
    usable = [t for t in TEMPLATES[family, len(columns)] if "LABELS" not in t or len(word_of) <= MOST_LISTED]
    plain = [not re.search(r"[{}:]", column) and not column.isdecimal() for column in columns]
    names = dict(enumerate(columns)) if all(plain) else {}
    filled = lambda found: listed if found[0] == "LABELS" else "{" + names.get(int(found[1]), found[1])  # noqa: E731
    return tuple(re.sub(r"\{(\d)|LABELS", filled, template) for template in usable)


def _make_name(source: str) -> str:
    """The file's name, unless a task of the catalogue has it: its bundled data is not this data."""
    stem = Path(source).stem.removeprefix("the ")
    return f"own-{stem}" if any(task.name == stem for task in list_tasks()) else stem


def _make_notes(word_of: Mapping[str, str] | None, given: bool) -> list[str]:
    if word_of is None:
        return ["the labels are not single words of this model; a fresh classification head is trained instead"]
    if not given and all(label == word and label.lstrip("-").isdecimal() for label, word in word_of.items()):
        example = ",".join(f"{label}=WORD" for label in list(word_of)[:2])
        return [f"the labels are numbers, which mean little to a model; words for them learn faster: --words {example}"]
    return []
