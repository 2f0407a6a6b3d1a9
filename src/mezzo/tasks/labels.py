"""From what a data file calls a label to the label's index: by name, or by an id order that somebody declared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mezzo.errors import DataError, nearest
from mezzo.tasks.task import Task, as_texts

IdOrder = str | Sequence[str] | Mapping[int, str] | None

_MISSING = ("", "-", "-1", "none", "null", "nan", "?", "hidden")


def is_missing(value: Any) -> bool:
    """Is this how data sets write that a row has no label?"""
    return value is None or value == [] or str(value).strip().lower() in _MISSING


class Labels:
    """Reads labels of one source of data."""

    def __init__(self, task: Task, id_order: IdOrder = None) -> None:
        self.task = task
        self._index = {_key(label): i for i, label in enumerate(task.labels)}
        aliases = {alias: label for alias, label in task.label_aliases.items() if label in task.labels}
        self._index |= {_key(alias): task.labels.index(label) for alias, label in aliases.items()}
        self._ids: dict[int, int] | None = None
        self._why_not = self._no_order()
        if id_order is not None:
            self._ids = self._declared(id_order)
        elif task.id_order is not None:
            self.declare(task.id_orders[task.id_order])
        elif len(set(task.id_orders.values())) == 1:
            self.declare(next(iter(task.id_orders.values())))
        self._stated = id_order is not None

    def declare(self, order: Sequence[str]) -> None:
        self._ids = {i: self._name(label) for i, label in enumerate(order)}

    def suggest(self, source: str) -> None:
        """The data's layout tells its source; an order stated by the caller or the task outranks it."""
        if not self._stated and self.task.id_order is None and source in self.task.id_orders:
            self.declare(self.task.id_orders[source])

    def data_names(self, names: Sequence[str]) -> None:
        """The data carries the label names of its ids; only an order stated by the caller outranks them."""
        if names and not self._stated and all(_key(name) in self._index for name in names):
            self.declare(names)

    def knows(self, value: Any) -> bool:
        """Could this be a label? Used to recognise files without a header."""
        number = _integer(value)
        return _key(str(value)) in self._index or (number is not None and 0 <= number < max(len(self.task.labels), 2))

    def read(self, value: Any, where: str) -> int:
        """The index of a label."""
        name = "true" if value is True else "false" if value is False else str(value)
        if (index := self._index.get(_key(name))) is not None:
            return index
        number = None if isinstance(value, bool) else _integer(value)
        if number is None:
            hint = nearest(_key(name), self._index)
            raise DataError(f"{where}: unknown label {_short(value)}; labels are {', '.join(self.task.labels)}{hint}")
        if self._ids is None:
            raise DataError(f"{where}: label {_short(value)} is an id, and {self._why_not}")
        if number not in self._ids:
            known = ", ".join(f"{i} {self.task.labels[label]}" for i, label in sorted(self._ids.items()))
            raise DataError(
                f"{where}: unknown label {_short(value)}; ids are {known}; a task file states others by id_order"
            )
        return self._ids[number]

    def _declared(self, order: IdOrder) -> dict[int, int]:
        if isinstance(order, str):
            if order not in self.task.id_orders:
                known = ", ".join(self.task.id_orders) or "none"
                raise DataError(
                    f"task {self.task.name!r} declares no id order {order!r} ({known}); "
                    f"give one of those, or the label names in id order{nearest(order, self.task.id_orders)}"
                )
            order = self.task.id_orders[order]
        items = order.items() if isinstance(order, Mapping) else enumerate(order or ())
        return {int(i): self._name(label) for i, label in items}

    def _name(self, label: str) -> int:
        if (index := self._index.get(_key(str(label)))) is None:
            hint = nearest(str(label), self.task.labels)
            raise DataError(f"id_order names {label!r}, not a label of {', '.join(self.task.labels)}{hint}")
        return index

    def _no_order(self) -> str:
        task = self.task
        if not task.id_orders:
            example = ", ".join(map(repr, task.labels))
            return f"task {task.name!r} declares no id order; state what ids 0, 1, … mean in its file: id_order = [{example}]"
        shown = "; ".join(
            f"{source}: {', '.join(f'{i} {label}' for i, label in enumerate(order))}"
            for source, order in task.id_orders.items()
        )
        first = next(iter(task.id_orders))
        return f"task {task.name!r} knows several id orders ({shown}); state one, such as --id-order {first}"


def choice_label(value: Any, candidates: Sequence[str], where: str) -> int:
    """The index of a choice's right candidate: given as the index, or as the candidate's text (or several)."""
    number = None if isinstance(value, bool) else _integer(value)
    if number is not None:
        if not 0 <= number < len(candidates):
            raise DataError(f"{where}: label {number} for {len(candidates)} candidates; give an index from 0")
        return number
    right = as_texts(value)
    for index, candidate in enumerate(candidates):
        if candidate in right:
            return index
    raise DataError(f"{where}: none of the answers {_short(right)} is among the {len(candidates)} candidates")


def _key(name: str) -> str:
    """Case, spaces, hyphens and underscores do not matter in a label's name."""
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


def _integer(value: Any) -> int | None:
    """An id: 1, 1.0 (what tables with gaps make of it), or '1'."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if number.is_integer() else None


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
