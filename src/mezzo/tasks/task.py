"""A task as data: its columns, labels, template, label words and metric, checked when it is created."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mezzo.errors import TaskError, join_names, nearest
from mezzo.tasks import shapes, templates
from mezzo.tasks.template_ast import Nodes
from mezzo.types import Example, Family

Kind = Literal["classification", "choice", "generation"]
Metric = Literal["accuracy", "f1", "matthews", "countdown"]

_CHOICES = {"family": get_args(Family), "kind": get_args(Kind), "metric": get_args(Metric)}


@dataclass(frozen=True)
class Task:
    """What to ask a model about a row of data, and which answers are scored.

    `labels` and `words` are in candidate order. A `choice` has its candidates in columns of the row, and a `generation`
    its answers in the label column. `id_orders` says, per source of data, which label each integer id means; '' is no label.
    """

    name: str
    template: str
    columns: tuple[str, ...]
    labels: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    family: Family = "masked"
    kind: Kind = "classification"
    metric: Metric = "accuracy"
    max_length: int = 128
    first_limit: int | None = None
    """Most tokens of text 0."""
    other_limit: int | None = None
    """Most tokens of each other text."""
    space_prefix: bool = True
    """Whether label words are looked up with the space that precedes them in running text."""
    label_column: str = "label"
    id_orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    id_order: str | None = None
    """The source whose id order applies when the data carries none; None: only if all declared sources agree."""
    label_aliases: Mapping[str, str] = field(default_factory=dict)
    column_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layout: tuple[str, ...] = ()
    """Columns of those files of the task that have no header; '' for one to ignore."""
    encoding: str = ""
    """Encoding of the published files, where it is not UTF-8."""
    candidates: tuple[str, ...] = ()
    """For a choice: the columns that hold its candidates, or one column that holds a list of them."""
    fill: tuple[str, ...] = ()
    """For a choice: (column, marker): a candidate is that column's text with the candidate in the marker's place."""
    lower_candidates: bool = False
    """For a choice: the candidate's first word is lowercased, because it continues a sentence."""
    rewrite: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Per column, text to replace before it enters the template."""
    answer_end: str = ""
    """For a generation: text that ends the answer, so that the model learns to stop."""
    sample: Mapping[str, Any] = field(default_factory=dict)
    """An example row to display."""

    def __post_init__(self) -> None:
        try:
            self._normalize()
            json.dumps(dataclasses.astuple(self), ensure_ascii=False, skipkeys=True, default=str).encode()
            self._check()
        except UnicodeEncodeError:
            raise TaskError(f"task {self.name!r} holds half a character (a lone surrogate); correct its text") from None
        except TaskError as error:
            raise TaskError(f"task {self.name!r}: {error}") from None

    # --- use

    @property
    def nodes(self) -> Nodes:
        """The parsed template."""
        return templates.parse(self.template, self.columns, self.family)

    @property
    def word_of(self) -> dict[str, str]:
        """Label name → word."""
        return dict(zip(self.labels, self.words, strict=True)) if self.words else {}

    def replace(self, **changes: Any) -> Task:
        """A copy with changes, checked again."""
        names = [f.name for f in dataclasses.fields(self)]
        for key in changes:
            if key not in names:
                raise TaskError(f"a task has no {key!r}{nearest(key, names)}")
        return dataclasses.replace(self, **changes)

    def texts(self, example: Example) -> list[str]:
        """The example's texts in column order, rewritten as the task says."""
        return [self.text(example, column) for column in self.columns]

    def text(self, example: Example, column: str) -> str:
        if column not in example.fields:
            raise TaskError(f"task {self.name!r}: the example has no {column!r}, only {', '.join(example.fields)}")
        text = str(example.fields[column])
        for old, new in self.rewrite.get(column, {}).items():
            if text.count(old) * len(new) > shapes.MAX_REWRITTEN:
                raise TaskError(f"task {self.name!r}: rewrite makes a text of {column} far longer than the data's")
            text = text.replace(old, new)
        return text

    def answers(self, example: Example) -> list[str]:
        """The answers that are scored: the label words, the example's candidates, or its gold answers."""
        if self.kind == "classification":
            return list(self.words)
        if self.kind == "generation":
            return as_texts(example.fields.get(self.label_column, ()))
        candidates = self.choices(example.fields)
        if self.lower_candidates:
            candidates = [_lower_first_word(text) for text in candidates]
        if self.fill:
            column, marker = self.fill
            candidates = [self.text(example, column).replace(marker, text) for text in candidates]
        return candidates

    def choices(self, fields: Mapping[str, Any]) -> list[str]:
        """The candidates of a choice as the row has them."""
        return [text for column in self.candidates for text in as_texts(fields[column])]

    def right_choices(self, example: Example) -> tuple[int, ...]:
        """The indices of a choice's right candidates, where the row names several right answers."""
        answers = example.fields.get(self.label_column, ()) if self.kind == "choice" else ()
        return tuple(i for i, text in enumerate(self.choices(example.fields)) if text in answers) if answers else ()

    def render(self, example: Example | None = None) -> str:
        """The prompt for a human reader, without a tokenizer; of the task's sample row by default."""
        example = example if example is not None else Example(self.sample)
        return templates.render(self.nodes, self.texts(example))

    def describe_id_orders(self) -> str:
        """`hub: 0 entailment, 1 neutral; lm-bff: …`: what ids mean, by source."""
        return "; ".join(
            f"{source}: {join_names(f'{i} {label}' for i, label in enumerate(order) if label)}"
            for source, order in self.id_orders.items()
        )

    def describe(self) -> dict[str, Any]:
        """What `mezzo tasks NAME` prints."""
        computed = {"words": self.word_of, "example": self.render() if self.sample else ""}
        keys = ("name", "family", "kind", "template", "words", "metric", "example", "max_length")
        return {key: computed[key] if key in computed else getattr(self, key) for key in keys}

    def as_dict(self) -> dict[str, Any]:
        """Plain values from which `get_task` makes an equal task; defaults are left out."""
        return {
            f.name: _to_plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name in ("name", "family") or getattr(self, f.name) != _default_value(f)
        }

    # --- checks

    def _normalize(self) -> None:
        """Lists become tuples; words may be given by label name."""
        shapes.check_shapes(self)
        for name in ("columns", "labels", "candidates", "fill", "layout"):
            object.__setattr__(self, name, shapes.as_strings(name, getattr(self, name)))
        if isinstance(self.words, Mapping):
            object.__setattr__(self, "labels", self.labels or shapes.as_strings("labels", tuple(self.words)))
            object.__setattr__(self, "words", order_by_label(self.words, self.labels))
        object.__setattr__(self, "words", shapes.as_strings("words", self.words))
        for name in ("id_orders", "column_aliases"):
            table = {key: shapes.as_strings(name, value) for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, table)

    def _check(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise TaskError(f"{name} {value!r} is not one of {', '.join(choices)}{nearest(str(value), choices)}")
        for name in ("max_length", "first_limit", "other_limit"):
            value = getattr(self, name)
            if (value is not None or name == "max_length") and (not isinstance(value, int) or value < 1):
                raise TaskError(f"{name} is {value!r}; give a positive number of tokens")
        if not self.columns:
            raise TaskError("no columns; name the data's text columns, such as columns = ['text']")
        for name in ("columns", "labels", "words"):
            if repeated := [value for value, count in Counter(getattr(self, name)).items() if count > 1]:
                raise TaskError(f"{repeated[0]!r} appears twice in {name}; each must be different")
        if self.id_order is not None and self.id_order not in self.id_orders:
            declared = ", ".join(self.id_orders) or "none"
            raise TaskError(f"id_order {self.id_order!r} is not declared in id_orders ({declared})")
        if self.kind == "classification":
            self._check_labels()
        elif self.family == "masked":
            raise TaskError(f"a {self.kind} task needs a causal model; set family = 'causal'")
        if self.kind == "choice" and not self.candidates:
            raise TaskError("a choice task needs candidates: the columns that hold them")
        templates.parse(self.template, self.columns, self.family)

    def _check_labels(self) -> None:
        if len(self.labels) < 2:
            raise TaskError(f"{len(self.labels)} labels; name at least two, such as labels = ['negative', 'positive']")
        if len(self.words) != len(self.labels):
            raise TaskError(f"{len(self.words)} words for {len(self.labels)} labels; give one word per label, in order")
        if empty := [label for label, word in self.word_of.items() if not word.strip()]:
            raise TaskError(f"the word of label {empty[0]!r} is empty")
        for source, order in self.id_orders.items():
            if sorted(filter(None, order)) != sorted(self.labels):
                raise TaskError(f"the id order of {source!r} is {order}; it must list each of {self.labels} once")


@dataclass(frozen=True, slots=True)
class MLMConfig:
    """A user's template and label words. Mapping keys are label names, or integer ids where their meaning is known."""

    template: str | None = None
    label_word_mapping: Mapping[str | int, str] | None = None
    use_space_prefix: bool | None = None
    """None: as in the task."""

    def apply(self, task: Task, id_order: str | None = None) -> Task:
        """`task` with this template and these words. `id_order` names the source whose ids the keys of a mapping are."""
        changes: dict[str, Any] = {} if self.use_space_prefix is None else {"space_prefix": self.use_space_prefix}
        if self.template is not None:
            changes["template"] = self.template
        if mapping := self.label_word_mapping:
            label_of = _labels_by_id(task, mapping, id_order) if _has_ids(mapping, task) else _labels_by_name(task)
            words = {label_of.get(str(key).lower(), key): word for key, word in mapping.items()}
            changes["words"] = order_by_label(words, task.labels)
        return task.replace(**changes)


def _has_ids(mapping: Mapping[Any, str], task: Task) -> bool:
    return all(str(key).isdecimal() and str(key) not in task.labels for key in mapping)


def _labels_by_name(task: Task) -> dict[str, str]:
    """Label by its name in lower case, or by an alias."""
    return {**task.label_aliases, **{label.lower(): label for label in task.labels}}


def _labels_by_id(task: Task, mapping: Mapping[Any, str], id_order: str | None) -> dict[str, str]:
    """Label by id; an order that differs between sources is never guessed."""
    by_name = (
        f"map label names, such as {{{join_names([f'{label!r}: {word!r}' for label, word in task.word_of.items()])}}}"
    )
    source = id_order or task.id_order or ""
    orders = {task.id_orders[source]} if source in task.id_orders else set(task.id_orders.values())
    if len(orders) != 1:
        if not orders:
            raise TaskError(f"the words are mapped by ids, which have no declared order; {by_name}")
        raise TaskError(
            f"the words are mapped by ids, which mean different labels ({task.describe_id_orders()}); {by_name}, "
            f"or state whose ids they are, such as --id-order {next(iter(task.id_orders))}"
        )
    label_of = {str(i): label for i, label in enumerate(orders.pop()) if label}
    if unknown := sorted(set(map(str, mapping)) ^ set(label_of)):
        raise TaskError(
            f"the words are mapped by ids {join_names(mapping)}, and id {unknown[0]} has no pair; {by_name}"
        )
    return label_of


def order_by_label(words: Mapping[Any, str], labels: Sequence[str]) -> tuple[str, ...]:
    """The words in label order; every label must have one, and nothing else."""
    for key in words:
        if str(key) not in labels:
            named = (
                f"the labels are {join_names(labels)}{nearest(str(key), labels)}"
                if labels
                else "the task has no labels"
            )
            raise TaskError(f"a word for {key!r}, but {named}")
    word_of = {str(key): word for key, word in words.items()}
    if missing := [label for label in labels if label not in word_of]:
        raise TaskError(f"no word for label {missing[0]!r}; give one per label")
    return tuple(word_of[label] for label in labels)


def as_texts(value: Any) -> list[str]:
    """The distinct texts of a string, a list of strings, or a `{"text": [...]}`."""
    if isinstance(value, Mapping):
        value = value.get("text", value.get("spans", ()))
    values = [value] if isinstance(value, str) else list(value or ())
    return list(dict.fromkeys(str(text) for text in values))


def _lower_first_word(text: str) -> str:
    first, space, rest = text.strip().partition(" ")
    return text.strip() if first == "I" or first.startswith("I'") else first.lower() + space + rest


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _default_value(f: dataclasses.Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
