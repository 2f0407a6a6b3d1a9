"""From a label in the data to its index: by name, or by a declared id order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mezzo.errors import DataError, join_names, nearest
from mezzo.tasks.task import Task, as_texts

IdOrder = str | Sequence[str] | Mapping[int, str] | None

_MISSING = ("", "-", "-1", "none", "null", "nan", "?", "hidden")


def is_missing(value: Any) -> bool:
    """Is this one of the ways in which data sets mark a row without a label?"""
    return value is None or value == [] or str(value).strip().lower() in _MISSING


class LabelReader:
    """Reads the labels of one data source. An id order stated by the caller outranks the names that the data carries, these
    outrank the task's own order, and that outranks the order of the data's layout."""

    def __init__(self, task: Task, id_order: IdOrder = None) -> None:
        self.task = task
        self._index = {normalize_label(label): i for i, label in enumerate(task.labels)}
        aliases = {alias: label for alias, label in task.label_aliases.items() if label in task.labels}
        self._index |= {normalize_label(alias): task.labels.index(label) for alias, label in aliases.items()}
        self._stated = id_order is not None
        self._index_of_id: dict[int, int] | None = None
        if id_order is not None:
            self._set_id_order(self._declared_order(id_order) if isinstance(id_order, str) else id_order)
        elif task.id_order is not None:
            self._set_id_order(task.id_orders[task.id_order])
        elif len(set(task.id_orders.values())) == 1:
            self._set_id_order(next(iter(task.id_orders.values())))

    def use_layout_order(self, *sources: str) -> None:
        """Use the id order of the first of these sources that the task declares: the data has their file layout."""
        declared = [source for source in sources if source in self.task.id_orders]
        if declared and not self._stated and self.task.id_order is None:
            self._set_id_order(self.task.id_orders[declared[0]])

    def use_data_names(self, names: Sequence[str]) -> None:
        """Use the label names that the data carries for its ids."""
        if names and not self._stated and all(normalize_label(name) in self._index for name in names):
            self._set_id_order(names)

    def is_name(self, value: Any) -> bool:
        return self._find(value) is not None

    def could_be_label(self, value: Any) -> bool:
        """Could this be a label? Used to recognise files without a header."""
        if self.is_name(value):
            return True
        number = _parse_id(value)
        ids = (len(order) for order in (self.task.labels, *self.task.id_orders.values()))
        return number is not None and 0 <= number < max(*ids, 2)

    def read(self, value: Any) -> int:
        """The index of a label."""
        if (index := self._find(value)) is not None:
            return index
        if (number := _parse_id(value)) is None:
            labels, hint = join_names(self.task.labels), nearest(normalize_label(str(value)), self._index)
            hint = hint or "; rename it, or give a task file that lists it under label_aliases"
            raise DataError(f"unknown label {_short_repr(value)}; labels are {labels}{hint}")
        if self._index_of_id is None:
            raise DataError(f"label {_short_repr(value)} is an id, and {self._missing_order()}")
        if number not in self._index_of_id:
            ids = join_names(f"{i} {self.task.labels[label]}" for i, label in sorted(self._index_of_id.items()))
            raise DataError(f"unknown label {_short_repr(value)}; ids are {ids}; a task file states others by id_order")
        return self._index_of_id[number]

    def _find(self, value: Any) -> int | None:
        """The index of a label by its name; of `COARSE:fine`, the coarse one, as in TREC."""
        name = normalize_label(str(value))
        return self._index.get(name, self._index.get(name.partition(":")[0]))

    def _declared_order(self, name: str) -> Sequence[str]:
        orders = self.task.id_orders
        if name not in orders:
            raise DataError(
                f"task {self.task.name!r} declares no id order {name!r} ({', '.join(orders) or 'none'}); "
                f"give one of those, or the label names in id order{nearest(name, orders)}"
            )
        return orders[name]

    def _set_id_order(self, order: Sequence[str] | Mapping[int, str]) -> None:
        items = order.items() if isinstance(order, Mapping) else enumerate(order)
        self._index_of_id = {int(i): self._label_index(label) for i, label in items if label}

    def _label_index(self, label: str) -> int:
        if (index := self._index.get(normalize_label(str(label)))) is None:
            labels, hint = join_names(self.task.labels), nearest(str(label), self.task.labels)
            raise DataError(f"id_order names {label!r}, but the labels are {labels}{hint}")
        return index

    def _missing_order(self) -> str:
        """Why an id cannot be read, and what to do."""
        task = self.task
        if not task.id_orders:
            example = join_names(map(repr, task.labels))
            return f"task {task.name!r} declares no id order; state what ids 0, 1, … mean in its file: id_order = [{example}]"
        first = next(iter(task.id_orders))
        return f"task {task.name!r} knows several id orders ({task.describe_id_orders()}); state one, such as --id-order {first}"


def choice_label(value: Any, candidates: Sequence[str]) -> int:
    """The index of the correct candidate of a choice, which is given by its index or by its text; of several, the first."""
    if (number := _parse_id(value)) is not None:
        if not 0 <= number < len(candidates):
            raise DataError(f"label {number} for {len(candidates)} candidates; give an index from 0")
        return number
    answers = as_texts(value)
    for answer in answers:
        if answer in candidates:
            return candidates.index(answer)
    raise DataError(f"none of the answers {_short_repr(answers)} is among the {len(candidates)} candidates")


def normalize_label(name: str) -> str:
    """Case, spaces, hyphens and underscores do not matter in a label's name."""
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


def _parse_id(value: Any) -> int | None:
    """An id: 1, 1.0 (from tables with gaps), or '1'; not a Boolean."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if number.is_integer() and not isinstance(value, bool) else None


def _short_repr(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
