"""The content of metrics.jsonl. All parsing of its events for reports is here.

The file may be untrusted or half written: anything that is not a finite number is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mezzo.evaluation.evaluate import Evaluation
from mezzo.method.objectives import METRICS

Event = Mapping[str, Any]
# Most texts of a kind, and characters of a text, that a report has.
MAX_TEXTS, MAX_CHARACTERS = 100, 2000


@dataclass(frozen=True, slots=True, repr=False)
class RecordedEvaluation(Evaluation):
    """An evaluation as a run recorded it, on a split after some steps. Figures other than the metric may be NaN."""

    split: str
    step: int


@dataclass(frozen=True)
class RunWarning:
    step: int
    kind: str
    text: str


class Metrics:
    """What a run wrote about itself while it trained."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.start, self.result, self.engine = (_last(events, name) for name in ("start", "result", "engine"))
        # (step, seconds since the start) and (step, MiB in use)
        self.step_times, self.memory = (_step_values(events, key) for key in ("seconds", "memory_mib"))
        # (journal position, example-forwards up to it)
        self.spent = [(step + 1, spent) for step, spent in _step_values(events, "spent")]
        self.evaluations = _parse_evaluations(events, "evaluation", "dev")
        self.zero_shot = next(iter(_parse_evaluations(events, "zero-shot", "test")), None)
        # The tested checkpoint of a finished run. Some keys of its event differ.
        tested = {**self.result, "step": self.result.get("best_step", 0), "n": self.result.get("n_test")}
        self.final = _parse_evaluation(tested, "dev" if self.result.get("tested_on") == "dev" else "test")
        self.warnings = [
            RunWarning(int(finite_number(e.get("step")) or 0), str(e.get("kind", "note")), _text(e))
            for e in _all(events, "warning")[:MAX_TEXTS]
        ]
        # What was noticed about the data before training.
        self.data = [_text(event) for event in _all(events, "data")[:MAX_TEXTS]]
        self.commands = [_text(event) for event in _all(events, "command")[:MAX_TEXTS]]
        # What ended the run; empty if nothing did, or if it was resumed since.
        ends = [event for event in events if event.get("event") in ("failed", "start", "result")]
        self.failure = _text(ends[-1]) if ends and ends[-1]["event"] == "failed" else ""

    @property
    def majority(self) -> float | None:
        """The figure of always answering the most frequent label of the test examples."""
        return finite_number(self.result.get("majority"))

    @property
    def peak_memory(self) -> float | None:
        recorded = finite_number(self.result.get("memory_mib"))
        return recorded or max((mib for _, mib in self.memory), default=None)

    @property
    def step_durations(self) -> list[tuple[int, float]]:
        """(step, seconds) of each step whose predecessor was recorded too."""
        pairs = zip(self.step_times, self.step_times[1:], strict=False)
        return [(step, end - start) for (before, start), (step, end) in pairs if step == before + 1 and end > start]


def finite_number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _parse_evaluations(events: Sequence[Event], name: str, split: str) -> list[RecordedEvaluation]:
    parsed = (_parse_evaluation(event, split) for event in _all(events, name))
    return [evaluation for evaluation in parsed if evaluation is not None]


def _parse_evaluation(event: Event, split: str) -> RecordedEvaluation | None:
    interval = event.get("interval")
    low, high = map(finite_number, interval if isinstance(interval, list) and len(interval) == 2 else (None, None))
    step, value, n = (finite_number(event.get(key)) for key in ("step", "value", "n"))
    if step is None or value is None or low is None or high is None:
        return None
    accuracy, loss, calibrated = (finite_number(event.get(key)) for key in ("accuracy", "loss", "calibrated"))
    metric = next((name for name in METRICS if name == event.get("metric")), "accuracy")
    accuracy, loss = (math.nan if figure is None else figure for figure in (accuracy, loss))
    return RecordedEvaluation(metric, value, (low, high), accuracy, loss, int(n or 0), calibrated, split, int(step))


def _text(event: Event) -> str:
    return str(event.get("text", ""))[:MAX_CHARACTERS]


def _all(events: Sequence[Event], name: str) -> list[Event]:
    return [event for event in events if event.get("event") == name]


def _last(events: Sequence[Event], name: str) -> Event:
    """The last event of that name, or an empty one; a result followed by further steps no longer counts."""
    last: Event = {}
    for event in events:
        if event.get("event") == name:
            last = event
        elif name == "result" and event.get("event") == "step":
            last = {}
    return last


def _step_values(events: Sequence[Event], key: str) -> list[tuple[int, float]]:
    values = [(finite_number(event.get("step")), finite_number(event.get(key))) for event in _all(events, "step")]
    return [(int(step), value) for step, value in values if step is not None and value is not None]
