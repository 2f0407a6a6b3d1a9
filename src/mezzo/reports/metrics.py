"""The content of metrics.jsonl. All parsing of its events for reports is here.

The file may be untrusted or half written: anything that is not a finite number of a plausible size is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mezzo.evaluation.evaluate import MAX_COUNT, MAX_FIGURE, Evaluation
from mezzo.evaluation.rewards import REWARD_METRICS
from mezzo.method.objectives import METRICS
from mezzo.reports.sampling import Sample

Event = Mapping[str, Any]
# Most texts of a kind, characters of a text, and evaluations that a report has.
MAX_TEXTS, MAX_CHARACTERS, MAX_EVALUATIONS = 100, 2000, 200_000


@dataclass(frozen=True, slots=True, repr=False)
class RecordedEvaluation(Evaluation):
    """An evaluation as a run recorded it, on a split after some steps. Figures other than the metric may be NaN."""

    split: str = ""
    step: int = 0


@dataclass(frozen=True)
class RunWarning:
    step: int
    kind: str
    text: str


class Metrics:
    """What a run wrote about itself while it trained."""

    def __init__(self, events: Iterable[Event]) -> None:
        """Read a stream of events once."""
        self.start: Event = {}
        self.result: Event = {}
        self.engine: Event = {}
        self.evaluations: list[RecordedEvaluation] = []
        self.zero_shot: RecordedEvaluation | None = None
        self.warnings: list[RunWarning] = []
        # What was noticed about the data before training.
        self.data: list[str] = []
        self.commands: list[str] = []
        # What ended the run; empty if nothing did, or if it was resumed since.
        self.failure = ""
        self._durations, self._memory = Sample[tuple[int, float]](), Sample[tuple[int, float]]()
        self._spent = Sample[tuple[int, float]]()
        self._last_spent: list[tuple[int, float]] = []
        self._before: tuple[float, float] | None = None
        self._peak = 0.0
        for event in events:
            self._see(event)
        # The tested checkpoint of a finished run. Some keys of its event differ.
        tested = {**self.result, "step": self.result.get("best_step", 0), "n": self.result.get("n_test")}
        self.final = _parse_evaluation(tested, self.tested_on)

    @property
    def tested_on(self) -> str:
        """The split of the zero-shot and the final figure: dev where there is no test data."""
        return "dev" if self.result.get("tested_on") == "dev" or self.start.get("test") == 0 else "test"

    def _see(self, event: Event) -> None:
        match event.get("event"):
            case "step":
                self.result = {}  # one that is followed by further steps no longer counts
                self._see_step(event)
            case "start":
                self.start, self.failure = event, ""
            case "result":
                self.result, self.failure = event, ""
            case "failed":
                self.failure = _text(event)
            case "engine":
                self.engine = event
            case "evaluation" if (found := _parse_evaluation(event, "dev")) and len(self.evaluations) < MAX_EVALUATIONS:
                self.evaluations.append(found)
            case "zero-shot":
                self.zero_shot = self.zero_shot or _parse_evaluation(event, self.tested_on)
            case "warning" if len(self.warnings) < MAX_TEXTS:
                step = int(finite_number(event.get("step")) or 0)
                self.warnings.append(RunWarning(step, str(event.get("kind", "note"))[:MAX_CHARACTERS], _text(event)))
            case "data" if len(self.data) < MAX_TEXTS:
                self.data.append(_text(event))
            case "command" if len(self.commands) < MAX_TEXTS:
                self.commands.append(_text(event))

    def _see_step(self, event: Event) -> None:
        seconds, memory = (finite_number(event.get(key)) for key in ("seconds", "memory_mib"))
        step, spent = (whole_count(event.get(key)) for key in ("step", "spent"))
        if step is None:
            return
        if seconds is not None:
            if self._before and step == self._before[0] + 1 and seconds > self._before[1]:
                self._durations.add((int(step), seconds - self._before[1]))
            self._before = step, seconds
        if memory is not None:
            self._memory.add((int(step), memory))
            self._peak = max(self._peak, memory)
        if spent is not None:
            self._spent.add(last := (int(step) + 1, spent))
            self._last_spent = [last]

    @property
    def memory(self) -> list[tuple[int, float]]:
        """(step, MiB in use)."""
        return self._memory.items

    @property
    def spent(self) -> list[tuple[int, float]]:
        """(journal position, example-forwards up to it)."""
        return self._spent.items + self._last_spent

    @property
    def step_durations(self) -> list[tuple[int, float]]:
        """(step, seconds) of each step whose predecessor was recorded too."""
        return self._durations.items

    @property
    def majority(self) -> float | None:
        """The figure of always answering the most frequent label of the test examples."""
        return finite_number(self.result.get("majority"))

    @property
    def peak_memory(self) -> float | None:
        recorded = finite_number(self.result.get("memory_mib"))
        return recorded or self._peak or None


def finite_number(value: Any) -> float | None:
    """A finite number that can still be added up and drawn, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= MAX_FIGURE else None  # NaN is not


def whole_count(value: Any) -> float | None:
    """A count of steps, examples or forwards, or None for anything else."""
    number = finite_number(value)
    return number if number is not None and 0 <= number < MAX_COUNT else None


def _parse_evaluation(event: Event, split: str) -> RecordedEvaluation | None:
    interval = event.get("interval")
    low, high = map(finite_number, interval if isinstance(interval, list) and len(interval) == 2 else (None, None))
    value, step, n = finite_number(event.get("value")), whole_count(event.get("step")), whole_count(event.get("n") or 0)
    if step is None or value is None or n is None or low is None or high is None:
        return None
    accuracy, loss, calibrated = (finite_number(event.get(key)) for key in ("accuracy", "loss", "calibrated"))
    metric = next((name for name in (*METRICS, *REWARD_METRICS) if name == event.get("metric")), "accuracy")
    accuracy, loss = (math.nan if figure is None else figure for figure in (accuracy, loss))
    figures = (metric, value, (low, high), accuracy, loss, int(n), calibrated)
    return RecordedEvaluation(*figures, int(whole_count(event.get("failed")) or 0), split, int(step))


def _text(event: Event) -> str:
    return str(event.get("text", ""))[:MAX_CHARACTERS]
