"""A run folder, read for a report. The folder may be a stranger's or half written: what is not a number is not drawn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo.evaluation.evaluate import rank
from mezzo.journal.journal import read
from mezzo.runs.folder import METRICS, Folder
from mezzo.runs.health import Verdict, verdict

FRESH = 120
"""Seconds after its last line in which an unfinished run counts as running."""


@dataclass(frozen=True)
class Look:
    """One evaluation, of whatever examples."""

    what: str
    step: int
    metric: str
    value: float
    low: float
    high: float
    loss: float
    n: int
    calibrated: float


@dataclass(frozen=True)
class Story:
    """Everything a report says of a run."""

    path: Path
    config: Mapping[str, Any]
    header: Mapping[str, Any]
    steps: int
    positions: Sequence[int]
    losses: Sequence[float]
    slopes: Sequence[Sequence[float]]
    rates: Sequence[float]
    seconds: Sequence[tuple[int, float]]
    memory: Sequence[tuple[int, float]]
    looks: Sequence[Look]
    zero_shot: Look | None
    result: Mapping[str, Any]
    warnings: Sequence[tuple[int, str, str]]
    commands: Sequence[str]
    mistakes: Sequence[Mapping[str, Any]]
    start: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    """What the engine said of itself at the end: its counters."""
    failure: str = ""
    alive: bool = False

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def planned(self) -> int:
        return int(number(self.config.get("steps")) or self.steps)

    @property
    def metric(self) -> str:
        return next((look.metric for look in (*self.looks, *([self.zero_shot] if self.zero_shot else []))), "accuracy")

    @property
    def best(self) -> Look | None:
        """The best dev evaluation, as the trainer chooses it."""
        return max(self.looks, key=lambda look: rank(look.value, look.loss, look.step), default=None)

    @property
    def tested(self) -> Look | None:
        """The figure the run ends with."""
        found, interval = self.result, self.result.get("interval")
        value = number(found.get("value"))
        if value is None or not isinstance(interval, list) or len(interval) != 2:
            return None
        low, high = (number(bound) for bound in interval)
        what = str(found.get("tested_on", "test"))
        step, n = (int(number(found.get(key)) or 0) for key in ("best_step", "n_test"))
        if low is None or high is None:
            return None
        return Look(what, step, str(found.get("metric", "")), value, low, high, math.nan, n, math.nan)

    @property
    def skipped(self) -> int:
        return self.steps - len(self.losses)

    @property
    def zero_share(self) -> float:
        return sum(not any(slopes) for slopes in self.slopes) / len(self.slopes) if self.slopes else 0.0

    @property
    def speed(self) -> float | None:
        """Steps a second: the median over steps, which evaluations do not disturb."""
        pairs = zip(self.seconds, self.seconds[1:], strict=False)
        gaps = [b - a for (i, a), (j, b) in pairs if j == i + 1 and b > a]
        return 1 / statistics.median(gaps) if gaps else None

    @property
    def verdict(self) -> Verdict:
        kinds = {kind for _, kind, _ in self.warnings}
        if self.failure:
            return Verdict("diverged" if "not a number" in self.failure else "failed", "bad", self.failure)
        if not self.result:
            word = "running" if self.alive else "unfinished"
            bad = [text for _, kind, text in self.warnings if kind in ("diverging", "no signal", "overfitting")]
            reason = f"step {self.steps} of {self.planned}" + (f": {bad[-1]}" if bad else "")
            more = "" if self.alive else f"; continue with: mezzo train --resume {self.path}"
            return Verdict(word, "bad" if bad else "neutral", reason + more)
        tested = self.tested
        before, calibrated = (number(self.result.get(key)) for key in ("zero_shot", "zero_shot_calibrated"))
        if tested is None:
            return verdict(kinds, None, None, before, calibrated, 0)
        return verdict(kinds, tested.value, (tested.low, tested.high), before, calibrated, tested.step)


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def story_of(path: str | Path) -> Story:
    """Read a run folder."""
    folder = Folder.open(path)
    content = read(folder.path)
    events = folder.metrics()
    records = [r for r in content.records if r.losses and all(map(math.isfinite, (*r.losses, *r.slopes, r.lr)))]
    return Story(
        path=folder.path,
        config=folder.read_config() or content.header.config,
        header=content.header.to_dict(),
        steps=content.steps,
        positions=[record.step + 1 for record in records],
        losses=[sum(record.losses) / len(record.losses) for record in records],
        slopes=[record.slopes for record in records],
        rates=[record.lr for record in records],
        seconds=_numbered(events, "seconds"),
        memory=_numbered(events, "memory_mib"),
        looks=[look for e in events if e.get("event") == "evaluation" and (look := _look(e, "dev"))],
        zero_shot=next((look for e in events if e.get("event") == "zero-shot" and (look := _look(e, "test"))), None),
        result=_last(events, "result"),
        start=_last(events, "start"),
        engine=_last(events, "engine"),
        warnings=[
            (int(number(e.get("step")) or 0), str(e.get("kind", "note")), str(e.get("text", "")))
            for e in events
            if e.get("event") == "warning"
        ],
        commands=[str(e.get("text", "")) for e in events if e.get("event") == "command"],
        mistakes=folder.mistakes(),
        failure=_failure(events),
        alive=_alive(folder.path / METRICS),
    )


def _look(entry: Mapping[str, Any], what: str) -> Look | None:
    interval = entry.get("interval")
    bounds = [number(bound) for bound in interval] if isinstance(interval, list) else []
    figures = [number(entry.get(key)) for key in ("step", "value", "loss", "n", "calibrated")]
    if len(bounds) != 2 or None in bounds or None in figures[:2]:
        return None
    step, value, loss, n, calibrated = (math.nan if figure is None else figure for figure in figures)
    low, high = (float(bound or 0) for bound in bounds)
    metric = str(entry.get("metric", "accuracy"))
    return Look(what, int(step), metric, value, low, high, loss, 0 if math.isnan(n) else int(n), calibrated)


def _numbered(events: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    found = [(number(e.get("step")), number(e.get(key))) for e in events if e.get("event") == "step"]
    return [(int(step), value) for step, value in found if step is not None and value is not None]


def _last(events: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The last event of that name; a result that was resumed past no longer counts."""
    found: Mapping[str, Any] = {}
    for entry in events:
        if entry.get("event") == name:
            found = entry
        elif name == "result" and entry.get("event") == "step":
            found = {}
    return found


def _failure(events: Sequence[Mapping[str, Any]]) -> str:
    """What ended the run, if nothing came after it."""
    last: Mapping[str, Any] = next((e for e in reversed(events) if e.get("event") in ("failed", "start", "result")), {})
    return str(last.get("text", "")) if last.get("event") == "failed" else ""


def _alive(metrics: Path) -> bool:
    try:
        return time.time() - metrics.stat().st_mtime < FRESH
    except OSError:
        return False
