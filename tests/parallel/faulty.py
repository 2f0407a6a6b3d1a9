"""A real engine with a fault that a test switches on: a file in the model's folder says which."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.engines.base import EngineSpec
from mezzo.engines.torch import open_engine as open_torch
from mezzo.types import Batch, Probe, Update

FACTORY = "tests.parallel.faulty:open_engine"


def plant(model: Path, **fault: Any) -> None:
    """`kind`, and `times`: how many workers catch it."""
    (model / "fault.json").write_text(json.dumps({"times": 1, **fault}))


def open_engine(spec: EngineSpec) -> Any:
    engine = open_torch(spec)
    fault = _caught(Path(spec.model))
    return Faulty(engine, **fault) if fault else engine


def _caught(model: Path) -> dict[str, Any]:
    """The first workers to start catch the fault, those that come later are healthy."""
    path = model / "fault.json"
    if not path.exists():
        return {}
    fault = json.loads(path.read_text())
    for number in range(fault.pop("times")):
        try:
            (model / f"caught-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return fault
    return {}


class Faulty:
    """Works for `after` scorings, then shows its fault."""

    def __init__(self, engine: Any, kind: str, after: int = 3) -> None:
        self.__dict__.update(_engine=engine, _kind=kind, _left=after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._engine, name, value)

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Any:
        found = self._engine.score(batch, probes)
        self.__dict__["_left"] -= 1
        return found if self._left >= 0 else FAULTS[self._kind](found)

    def apply(self, updates: Sequence[Update]) -> None:
        self._engine.apply(updates)
        if self._kind == "drift" and self._left < 0:
            self.__dict__["_left"] = 10**9  # once
            state = self._engine.state()
            next(iter(state.values())).flat[0] += 1
            self._engine.load_state(state)


def _sleep(found: Any) -> Any:
    time.sleep(60)
    return found


def _end(found: Any) -> Any:
    os._exit(3)


FAULTS: dict[str, Any] = {
    "nan": lambda found: np.full_like(found, np.nan),
    "shape": lambda found: found[:, :1],
    "words": lambda found: "what was the question?",
    "noise": lambda found: found + np.random.default_rng().normal(size=found.shape).astype(np.float32),
    "sleep": _sleep,
    "end": _end,
    "drift": lambda found: found,
    "raise": lambda found: 1 / 0,
}
