"""From a journal to an engine: the base model it names, brought to any of its steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mezzo.config import OPTIONS, flatten, from_mapping, option_names, unnamed_options
from mezzo.engines import open_engine
from mezzo.engines.base import Engine
from mezzo.errors import ConfigError, JournalError
from mezzo.journal.atomic_files import explain_os_errors
from mezzo.journal.compact import MAGIC, import_compact
from mezzo.journal.content import NAME as JOURNAL
from mezzo.journal.content import Content, read
from mezzo.replay.replay import bring_to, check_base
from mezzo.runs.datasets import find_task
from mezzo.runs.folder import Folder
from mezzo.runs.recorded_evaluations import best_step
from mezzo.runs.resolve import resolve_setup
from mezzo.runs.setup import Setup
from mezzo.tasks import get_task
from mezzo.untrusted import values_without_credentials


def open_journal(path: str | Path) -> Content:
    """The journal of a run folder, a journal.jsonl, or a compact journal; its header without credentials."""
    content = _read_any(Path(path))
    header = content.header
    harmless = {name: values_without_credentials(getattr(header, name)) for name in ("config", "engine", "task")}
    return dataclasses.replace(content, header=dataclasses.replace(header, **harmless))


def _read_any(path: Path) -> Content:
    with explain_os_errors(path):
        if path.is_dir():
            return read(path)
        if not path.exists():
            raise JournalError(f"{path} does not exist; name a run folder or a journal here, and a model by --model")
        if not path.is_file():
            raise JournalError(f"{path} is neither a run folder nor a file")
        with path.open("rb") as file:
            compact = file.read(len(MAGIC)) == MAGIC
    return import_compact(path) if compact else read(path)


def open_base_engine(content: Content, function: Any = None, **changes: Any) -> tuple[Engine, Setup]:
    """The engine a journal starts from: its base model with the trained tensors untouched. `function` is the user's own
    objective, named again: a journal may be anybody's."""
    given = {key: value for key, value in changes.items() if value is not None}
    refused = sorted(set(given) - {*option_names(reopen="machine"), *option_names(reopen="question")})
    if refused:
        raise ConfigError(f"{', '.join(refused)} belongs to the run and cannot be changed after it")
    # Weights do not depend on what ran the model: unless an engine is named, this process rebuilds them itself.
    here: dict[str, Any] = {} if "engine" in given else {"engine": "torch", "tp": 1}
    # These belonged to the machine of the run, or to its servers.
    here |= {
        name: OPTIONS[name].default
        for name in ("device", "threads", "eval_limit", "server_timeout", "exclusive_server")
    }
    header = content.header
    try:
        recorded = flatten(header.config)
        here |= _without_contacts({**recorded, **given}, given)
        config = from_mapping({**recorded, **here, **given})
        task = get_task(dict(header.task))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise JournalError(f"{content.path}: the header lacks what a rebuild needs: {error}") from None
    changed = any(name in given for name in ("task", "template", "words"))
    setup = resolve_setup(config, find_task(config, header.family) if changed else task, function)
    # The header, not the task that is asked about, says which head was trained.
    spec = dataclasses.replace(setup.engine_spec, family=header.family, classes=header.classes)
    engine = open_engine(setup.config.engine, spec)
    try:
        check_base(engine, content)
    except BaseException:
        engine.close()
        raise
    return engine, setup


def _without_contacts(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The defaults of options whose values would run code or contact other machines, and which the user has not named: a
    journal may be anybody's. What cannot be replaced is refused."""
    unnamed = unnamed_options(values, given)
    needed = ("model", "train") if values.get("demonstrations") else ("model",)
    for option in unnamed:
        if option.name in needed:
            raise ConfigError(
                f"the run used {option.flag} {values[option.name]!r}, which is not on this machine: "
                f"name it again to fetch it: {option.flag} {option.placeholder}"
            )
    return {option.name: option.default for option in unnamed}


def open_run(path: str | Path, at: int | None = None, function: Any = None, **changes: Any) -> tuple[Engine, Setup]:
    """A run's engine at a journal position: the best checkpoint unless `at` says otherwise."""
    content = open_journal(path)
    engine, setup = open_base_engine(content, function, **changes)
    snapshots = Folder(content.path.parent).snapshots if content.path.name == JOURNAL else None
    bring_to(engine, content, best_step(content) if at is None else at, snapshots)
    return engine, setup
