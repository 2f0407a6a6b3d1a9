"""Finding a task: by name, in a TOML or JSON file, or in a dict."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mezzo.errors import TaskError, nearest
from mezzo.tasks.catalogue import DEFAULTS, TASKS, Fields
from mezzo.tasks.task import Task
from mezzo.types import Family
from mezzo.untrusted import read_settings

_KEYS = tuple(f.name for f in dataclasses.fields(Task))


def _task_of_family(name: str, entry: Fields, family: str) -> Task:
    own = entry[family] if isinstance(entry[family], dict) else {"template": entry[family]}
    shared = {key: value for key, value in entry.items() if key not in DEFAULTS}
    return Task(**{"name": name, "family": family, **DEFAULTS[family], **shared, **own})


_TASKS = tuple(
    _task_of_family(name, entry, family) for family in DEFAULTS for name, entry in TASKS.items() if family in entry
)


def list_tasks() -> list[Task]:
    """Every task that comes with mezzo: the masked ones, then the causal ones."""
    return list(_TASKS)


def get_task(spec: str | Path | Mapping[str, Any] | Task, family: Family | None = None) -> Task:
    """A task by registry name, from a `.toml` (or `.yaml`, `.json`) file, or from a dict of the same keys.

    A name such as `sst-2` exists in both families: masked unless `family` says otherwise.
    """
    default = {"family": family} if family else {}
    if isinstance(spec, Task):
        task = spec
    elif isinstance(spec, Mapping):
        task = _task_from({**default, **spec}, "your task")
    elif str(spec).endswith((".toml", ".yaml", ".yml", ".json")):
        path = Path(spec)
        task = _task_from({**default, **_read_file(path)}, str(path), name=path.stem)
    else:
        return _find_by_name(str(spec), family)
    if family is not None and task.family != family:
        raise TaskError(f"task {task.name!r} is {task.family}, but {family} was requested; set its family and template")
    return task


def _task_from(values: Mapping[str, Any], source: str, name: str = "custom") -> Task:
    """A task from plain values. `id_order` may be the list of label names that the data's ids 0, 1, … mean."""
    for key in values:
        if key not in _KEYS:
            raise TaskError(f"{source}: unknown key {key!r}{nearest(str(key), _KEYS)}")
    for key in ("columns", "template"):
        if key not in values:
            raise TaskError(f"{source}: no {key!r}; a task needs columns, template, labels and words")
    try:
        return Task(**_with_stated_order({"name": name, **values}))
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise TaskError(f"{source}: a value of the task is not of its field's type: {error}") from None


def _with_stated_order(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a task, a list in `id_order` declared as the order of its data."""
    if isinstance(fields.get("id_order", ""), str | None):
        return fields
    orders = fields.get("id_orders", {})
    if not isinstance(orders, Mapping):
        raise TaskError(f"id_orders is {orders!r}; give a table")
    return fields | {"id_orders": {**orders, "data": fields["id_order"]}, "id_order": "data"}


def _read_file(path: Path) -> dict[str, Any]:
    kind = path.suffix[1:].upper()
    try:
        values = read_settings(path)
    except OSError as error:
        raise TaskError(f"cannot read the task file {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # invalid TOML or JSON, or not UTF-8
        raise TaskError(f"{path}: not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise TaskError(f"{path}: a task is an object with columns, template, labels and words")
    return values


def _find_by_name(name: str, family: Family | None) -> Task:
    matches = [task for task in _TASKS if _normalize_name(task.name) == _normalize_name(name)]
    for task in matches:
        if family in (None, task.family):
            return task
    if matches:
        others = ", ".join(sorted(task.name for task in _TASKS if task.family == family))
        raise TaskError(
            f"task {name!r} is {matches[0].family}, not {family}: name a {matches[0].family} model with --model, or one of "
            f"the {family} tasks {others}"
        )
    names = list(dict.fromkeys(task.name for task in _TASKS))
    hint = nearest(name.lower(), names) or f"; known: {', '.join(names)}, or a path that ends in .toml"
    raise TaskError(f"unknown task {name!r}{hint}")


def _normalize_name(name: str) -> str:
    """`SST2`, `sst_2` and `sst-2` are the same task."""
    return re.sub(r"[-_ ]", "", name.lower())
