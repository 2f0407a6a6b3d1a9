"""A run folder, read for a report. It may be untrusted or half written: steps without finite numbers are left out."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo.evaluation.evaluate import rank
from mezzo.journal.header import Header
from mezzo.journal.journal import read
from mezzo.reports.metrics import Metrics, RecordedEvaluation, finite_number, parse_metrics
from mezzo.runs.folder import METRICS, Folder
from mezzo.runs.health import Verdict, verdict

RUNNING_SECONDS = 120
"""An unfinished run counts as running for this long after its last line of metrics."""


@dataclass(frozen=True)
class RunData:
    """Everything a report says about a run."""

    path: Path
    config: Mapping[str, Any]
    header: Header
    steps: int
    positions: Sequence[int]
    """Journal positions after the steps that `losses`, `slopes` and `learning_rates` belong to."""
    losses: Sequence[float]
    slopes: Sequence[Sequence[float]]
    learning_rates: Sequence[float]
    metrics: Metrics
    mistakes: Sequence[Mapping[str, Any]]
    running: bool

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def task(self) -> Mapping[str, Any]:
        return self.header.task

    @property
    def planned_steps(self) -> int:
        return int(finite_number(self.config.get("steps")) or self.steps)

    @property
    def metric(self) -> str:
        """The name of the task's metric."""
        evaluations = (*self.metrics.evaluations, self.metrics.zero_shot)
        return next((evaluation.metric for evaluation in evaluations if evaluation), "accuracy")

    @property
    def best(self) -> RecordedEvaluation | None:
        """The best dev evaluation, as the trainer chooses it."""
        return max(self.metrics.evaluations, key=lambda each: rank(each.value, each.loss, each.step), default=None)

    @property
    def skipped_steps(self) -> int:
        return self.steps - len(self.losses)

    @property
    def zero_slope_share(self) -> float:
        return sum(not any(slopes) for slopes in self.slopes) / len(self.slopes) if self.slopes else 0.0

    @property
    def speed(self) -> float | None:
        """Steps per second: by the median step, which evaluations do not affect."""
        durations = [seconds for _, seconds in self.metrics.step_durations]
        return 1 / statistics.median(durations) if durations else None

    @property
    def verdict(self) -> Verdict:
        warnings, failure, final = self.metrics.warnings, self.metrics.failure, self.metrics.final
        if failure:
            return Verdict("diverged" if "not a number" in failure else "failed", "bad", failure)
        if not self.metrics.finished:
            bad = [each.text for each in warnings if each.kind in ("diverging", "no signal", "overfitting")]
            reason = f"step {self.steps} of {self.planned_steps}" + (f": {bad[-1]}" if bad else "")
            hint = "" if self.running else f"; continue with: mezzo train --resume {self.path}"
            return Verdict("running" if self.running else "unfinished", "bad" if bad else "neutral", reason + hint)
        kinds = {warning.kind for warning in warnings}
        if final is None:
            return verdict(kinds, None, None, *self.metrics.baselines, 0)
        return verdict(kinds, final.value, (final.low, final.high), *self.metrics.baselines, final.step)


def read_run(path: str | Path) -> RunData:
    """Read a run folder."""
    folder = Folder.open(path)
    journal = read(folder.path)
    records = [r for r in journal.records if r.losses and all(map(math.isfinite, (*r.losses, *r.slopes, r.lr)))]
    return RunData(
        path=folder.path,
        config=folder.read_config() or journal.header.config,
        header=journal.header,
        steps=journal.steps,
        positions=[record.step + 1 for record in records],
        losses=[sum(record.losses) / len(record.losses) for record in records],
        slopes=[record.slopes for record in records],
        learning_rates=[record.lr for record in records],
        metrics=parse_metrics(folder.metrics()),
        mistakes=folder.mistakes(),
        running=_recently_written(folder.path / METRICS),
    )


def _recently_written(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < RUNNING_SECONDS
    except OSError:
        return False
