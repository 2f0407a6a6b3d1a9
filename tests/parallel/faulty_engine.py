"""A real engine with a fault that a test switches on by a file in the model's folder."""

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

FACTORY = "tests.parallel.faulty_engine:open_engine"


def set_fault(model: Path, **fault: Any) -> None:
    """Choose the `kind` of fault, `after` how many calls of `score` it shows, and `times`: how many workers have it."""
    (model / "fault.json").write_text(json.dumps({"times": 1, **fault}))


def open_engine(spec: EngineSpec) -> Any:
    engine = open_torch(spec)
    fault = _claim_fault(Path(spec.model))
    return FaultyEngine(engine, **fault) if fault else engine


def _claim_fault(model: Path) -> dict[str, Any]:
    """The first workers to start have the fault, later ones are healthy."""
    path = model / "fault.json"
    if not path.exists():
        return {}
    fault = json.loads(path.read_text())
    for number in range(fault.pop("times")):
        try:
            (model / f"claimed-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return fault
    return {}


class FaultyEngine:
    """Works for `after` calls of `score`, then shows its fault."""

    def __init__(self, engine: Any, kind: str, after: int = 3) -> None:
        self.__dict__.update(_engine=engine, _kind=kind, _healthy_calls=after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._engine, name, value)

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Any:
        scores = self._engine.score(batch, probes)
        self.__dict__["_healthy_calls"] -= 1
        return scores if self._healthy_calls >= 0 else FAULTS[self._kind](scores)

    def apply(self, updates: Sequence[Update]) -> None:
        self._engine.apply(updates)
        if self._kind == "drift" and self._healthy_calls < 0:
            self.__dict__["_healthy_calls"] = 10**9  # once
            state = self._engine.state()
            next(iter(state.values())).flat[0] += 1
            self._engine.load_state(state)


def _sleep(scores: Any) -> Any:
    time.sleep(600)
    return scores


def _exit(scores: Any) -> Any:
    os._exit(3)


FAULTS: dict[str, Any] = {
    "nan": lambda scores: np.full_like(scores, np.nan),
    "shape": lambda scores: scores[:, :1],
    "text": lambda scores: "not an array",
    "noise": lambda scores: scores + np.random.default_rng().normal(size=scores.shape).astype(np.float32),
    "sleep": _sleep,
    "exit": _exit,
    "drift": lambda scores: scores,
    "raise": lambda scores: 1 / 0,
}
