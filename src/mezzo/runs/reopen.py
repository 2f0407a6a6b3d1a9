"""From a journal back to an engine: the base model it names, brought to any of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mezzo.config import from_mapping, option_names
from mezzo.engines.base import Engine
from mezzo.errors import ConfigError, JournalError
from mezzo.evaluation.evaluate import rank
from mezzo.journal.atomic_files import explained
from mezzo.journal.compact import MAGIC, import_compact
from mezzo.journal.journal import Content, read
from mezzo.replay.replay import bring_to, check_base
from mezzo.runs import datasets, setup
from mezzo.runs.folder import Folder
from mezzo.tasks import get_task

MOST_CLASSES = 100_000


def open_journal(path: str | Path) -> Content:
    """The journal of a run folder, a journal.jsonl, or a compact journal."""
    path = Path(path)
    if path.is_dir():
        return read(path)
    if not path.exists():
        raise JournalError(f"{path} does not exist; name a run folder or a journal here, and a model by --model")
    with explained(path), path.open("rb") as file:
        compact = file.read(len(MAGIC)) == MAGIC
    return import_compact(path) if compact else read(path)


def base_engine(content: Content, **changes: Any) -> tuple[Engine, setup.Parts]:
    """The engine a journal starts from: its base model with the trained tensors untouched."""
    given = {key: value for key, value in changes.items() if value is not None}
    refused = sorted(set(given) - {*option_names(reopen="machine"), *option_names(reopen="question")})
    if refused:
        raise ConfigError(f"{', '.join(refused)} belongs to the run and cannot be changed after it")
    # Weights do not depend on what ran the model: without a word about it, this process rebuilds them itself.
    here: dict[str, Any] = {} if "engine" in given else {"engine": "torch", "tp": 1}
    here |= {"url": ()}  # prompts and weights go to servers that were named here, not in a journal
    here |= {"device": "auto", "threads": None, "eval_limit": None}  # of that run's machine and of its own looks at dev
    here |= {"remote_code": False}  # a model's code runs only for who asks for it, not because a journal says so
    try:
        header = content.header
        config = from_mapping({**header["config"], **here, **given})
        family, classes, recorded = header["family"], int(header["classes"]), get_task(dict(header["task"]))
        if family not in ("masked", "causal") or not 0 <= classes <= MOST_CLASSES:
            raise ValueError(f"a {family} model with {classes} classes")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise JournalError(f"{content.path}: the header lacks what a rebuild needs: {error}") from None
    changed = any(name in given for name in ("task", "template", "words"))
    parts = setup.prepare(config, datasets.task_of(config, family) if changed else recorded)
    engine = setup.engine_for(parts.config, family, classes, parts.padding_id)
    try:
        check_base(engine, content)
    except BaseException:
        engine.close()
        raise
    return engine, parts


def rebuilt(path: str | Path, at: int | None = None, **changes: Any) -> tuple[Engine, setup.Parts]:
    """A run's engine at a journal position: the best checkpoint unless `at` says otherwise."""
    content = open_journal(path)
    engine, parts = base_engine(content, **changes)
    snapshots = Folder(Path(path)).snapshots if Path(path).is_dir() else None
    bring_to(engine, content, best_step(path, content) if at is None else at, snapshots)
    return engine, parts


def best_step(path: str | Path, content: Content) -> int:
    """The position with the best dev evaluation, the last one if nothing was evaluated."""
    if not Path(path).is_dir():
        best = content.header.get("best", content.steps)  # a compact journal knows its best step
        return best if isinstance(best, int) and 0 <= best <= content.steps else content.steps
    looks = [
        (e["value"], e["loss"], e["step"])
        for e in Folder(Path(path)).metrics()
        if e.get("event") == "evaluation"
        and all(isinstance(e.get(key), (int, float)) for key in ("value", "loss"))
        and isinstance(e.get("step"), int)
        and 0 <= e["step"] <= content.steps
    ]
    return max(looks, key=lambda look: rank(*look))[2] if looks else content.steps
