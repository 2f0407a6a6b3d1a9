"""A run folder, read for a report. It may be untrusted or half written: steps without finite numbers are left out."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mezzo.evaluation.evaluate import rank
from mezzo.journal.content import Content, read
from mezzo.journal.header import Header
from mezzo.journal.journal import is_in_use
from mezzo.journal.lines import EVENTS
from mezzo.reports.metrics import Metrics, RecordedEvaluation, finite_number, whole_count
from mezzo.reports.sampling import Sample, Totals
from mezzo.runs.folder import METRICS, Folder
from mezzo.runs.progress import RunProgress, replay_progress
from mezzo.runs.verdict import Verdict, parse_verdict
from mezzo.types import StepRecord
from mezzo.untrusted import printable, values_without_credentials


@dataclass(frozen=True)
class RunData:
    """Everything a report says about a run."""

    path: Path
    config: Mapping[str, Any]
    header: Header
    steps: int
    records: Sequence[StepRecord]
    """The steps with finite numbers; of a long run, a sample of them."""
    skipped_steps: int
    moves: int
    """Steps that moved the weights."""
    zero_slope_share: float
    forwards: Totals
    """Example-forwards of training up to a journal position, where they are known."""
    metrics: Metrics
    mistakes: Sequence[Mapping[str, Any]]
    running: bool
    """Whether a process trains it now."""
    progress: RunProgress
    label: str = ""
    """What tells it from others whose folders have the same name."""

    @property
    def name(self) -> str:
        return printable(self.label or self.path.resolve().name)

    @property
    def method(self) -> str:
        method = self.config.get("method")
        return str(method) if method in ("solve", "es", "adam") else "spsa"

    @property
    def planned_steps(self) -> int | None:
        """The most steps it may take; None for a run that has a budget instead."""
        steps = finite_number(self.config.get("steps"))
        return int(steps) if steps else None

    @property
    def budget(self) -> float | None:
        """Example-forwards of training at most."""
        return finite_number(self.metrics.start.get("budget"))

    @property
    def spent(self) -> float | None:
        return self.forwards.get(self.steps)

    @property
    def place(self) -> str:
        """How far the run is, by its steps or its budget."""
        place = f"step {self.steps:,}" + (f" of {self.planned_steps:,}" if self.planned_steps else "")
        if self.budget and self.spent is not None:
            place += f", {self.spent:,.0f} of {self.budget:,.0f} example-forwards"
        return place

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
    def speed(self) -> float | None:
        """Steps per second, as the terminal says it: by the recent steps."""
        return self.progress.steps_per_second or None

    @property
    def verdict(self) -> Verdict:
        metrics = self.metrics
        if failure := metrics.failure:
            diverged = any(words in failure for words in ("not a number", "too large for the weights"))
            return Verdict("diverged" if diverged else "failed", "bad", failure)
        if not metrics.result:
            bad = [each.text for each in metrics.warnings if each.kind in ("diverging", "no signal", "overfitting")]
            left = self.progress.time_left if self.running else ""
            reason = ", ".join(filter(None, (self.place, left))) + (f": {bad[-1]}" if bad else "")
            if self.running:
                return Verdict("running", "bad" if bad else "active", reason)
            hint = f"; continue with: mezzo train --resume {shlex.quote(str(self.path))}"
            return Verdict("unfinished", "bad" if bad else "neutral", reason + hint)
        return parse_verdict(str(metrics.result.get("verdict") or "not tested: the run recorded no verdict"))


def read_run(path: str | Path) -> RunData:
    """Read a run folder."""
    folder = Folder.open(path)
    journal = read(folder.path)
    events = chain(journal.events, (event for event in folder.metrics() if event.get("event") not in EVENTS))
    metrics, running = Metrics(events), is_in_use(folder.path)
    records, moves, zero_slopes = Sample[StepRecord](), 0, 0
    for record in journal.records:
        numbers = (*record.losses, *record.slopes, record.lr)
        if record.losses and all(finite_number(number) is not None for number in numbers):
            records.add(record)
            moves += not record.update.empty
            zero_slopes += not any(record.slopes)
    return RunData(
        path=folder.path,
        config=folder.read_config() or values_without_credentials(journal.header.config),
        header=journal.header,
        steps=journal.steps,
        records=records.items,
        skipped_steps=journal.steps - records.count,
        moves=moves,
        zero_slope_share=zero_slopes / max(1, records.count),
        forwards=_count_forwards(journal, metrics),
        metrics=metrics,
        mistakes=folder.mistakes(),
        running=running,
        progress=replay_progress(folder.metrics(), _seconds_since_written(folder.path / METRICS) if running else 0.0),
    )


def _count_forwards(journal: Content, metrics: Metrics) -> Totals:
    """What the metrics and the evaluations say, else what the records do."""
    said = dict(metrics.spent)
    said |= {event["step"]: spent for event in journal.events if (spent := whole_count(event.get("spent"))) is not None}
    known, last, total = Sample[tuple[int, float]](), {0: 0.0}, 0.0
    for record in journal.records if journal.steps and journal.records[0].notes else ():  # those of solve have notes
        forwards = whole_count(record.notes.get("forwards"))
        total = said.get(record.step + 1, total + (forwards or 0.0))
        if forwards is not None:
            known.add((record.step + 1, total))
            last = {record.step + 1: total}
    return Totals({0: 0.0, **dict(known.items), **last, **said})


def _seconds_since_written(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0
