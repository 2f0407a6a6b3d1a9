"""A task as a TOML file to edit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mezzo.tasks.task import Task
from mezzo.untrusted import printable


def to_toml(task: Task, comments: Iterable[str] = (), other_templates: Iterable[str] = ()) -> str:
    """The text of a file that `get_task` reads, with other templates as comments."""
    values = {key: value for key, value in task.as_dict().items() if key not in ("labels", "words")}
    values["max_length"] = task.max_length
    tables = {key: values.pop(key) for key in list(values) if isinstance(values[key], Mapping)} | {
        "words": task.word_of
    }
    lines = [
        *(f"# {printable(comment)}" for comment in comments),
        *(f"{key} = {_to_toml(value)}" for key, value in values.items()),
    ]
    lines += [f"# template = {_to_toml(template)}" for template in other_templates]
    for name, pairs in tables.items():
        lines += ["", f"[{name}]", *(f"{_to_toml(key)} = {_to_toml(value)}" for key, value in pairs.items())]
    return "\n".join(lines) + "\n"


def _to_toml(value: Any) -> str:
    """Strings, numbers and lists are written as in JSON, except for more characters that are escaped."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_to_toml(key)} = {_to_toml(item)}" for key, item in value.items()) + "}"
    return printable(json.dumps(value, ensure_ascii=False))
