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
from mezzo.reports.metrics import Metrics, RecordedEvaluation, finite_number
from mezzo.runs.folder import METRICS, Folder
from mezzo.runs.health import Verdict, verdict
from mezzo.types import StepRecord
from mezzo.untrusted import printable

# An unfinished run counts as running for this long after its last line of metrics.
RUNNING_SECONDS = 120


@dataclass(frozen=True)
class RunData:
    """Everything a report says about a run."""

    path: Path
    config: Mapping[str, Any]
    header: Header
    steps: int
    records: Sequence[StepRecord]
    """The steps with finite numbers."""
    metrics: Metrics
    mistakes: Sequence[Mapping[str, Any]]
    running: bool

    @property
    def name(self) -> str:
        return printable(self.path.resolve().name)

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
    def losses(self) -> list[float]:
        return [sum(record.losses) / len(record.losses) for record in self.records]

    @property
    def skipped_steps(self) -> int:
        return self.steps - len(self.records)

    @property
    def zero_slope_share(self) -> float:
        return sum(not any(record.slopes) for record in self.records) / max(1, len(self.records))

    @property
    def speed(self) -> float | None:
        """Steps per second: by the median step, which evaluations do not affect."""
        durations = [seconds for _, seconds in self.metrics.step_durations]
        return 1 / statistics.median(durations) if durations else None

    @property
    def verdict(self) -> Verdict:
        metrics, final = self.metrics, self.metrics.final
        if failure := metrics.failure:
            return Verdict("diverged" if "not a number" in failure else "failed", "bad", failure)
        if not metrics.result:
            bad = [each.text for each in metrics.warnings if each.kind in ("diverging", "no signal", "overfitting")]
            reason = f"step {self.steps} of {self.planned_steps}" + (f": {bad[-1]}" if bad else "")
            hint = "" if self.running else f"; continue with: mezzo train --resume {self.path}"
            return Verdict("running" if self.running else "unfinished", "bad" if bad else "neutral", reason + hint)
        kinds = {warning.kind for warning in metrics.warnings}
        zero_shot, calibrated = (
            finite_number(metrics.result.get(key)) for key in ("zero_shot", "zero_shot_calibrated")
        )
        value, interval, step = (final.value, final.interval, final.step) if final else (None, None, 0)
        return verdict(kinds, value, interval, zero_shot, calibrated, step)


def read_run(path: str | Path) -> RunData:
    """Read a run folder."""
    folder = Folder.open(path)
    journal = read(folder.path)
    return RunData(
        path=folder.path,
        config=folder.read_config() or journal.header.config,
        header=journal.header,
        steps=journal.steps,
        records=[r for r in journal.records if r.losses and all(map(math.isfinite, (*r.losses, *r.slopes, r.lr)))],
        metrics=Metrics(folder.metrics()),
        mistakes=folder.mistakes(),
        running=_recently_written(folder.path / METRICS),
    )


def _recently_written(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < RUNNING_SECONDS
    except OSError:
        return False
