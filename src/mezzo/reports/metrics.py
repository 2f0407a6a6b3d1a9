"""The content of metrics.jsonl. All parsing of its events for reports is here.

The file may be untrusted or half written: anything that is not a finite number is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class RecordedEvaluation:
    """One evaluation on a split; `low` and `high` are its 95% interval."""

    split: str
    step: int
    metric: str
    value: float
    low: float
    high: float
    loss: float = math.nan
    n: int = 0
    calibrated: float = math.nan


@dataclass(frozen=True)
class RunWarning:
    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class Metrics:
    """What a run wrote about itself while it trained."""

    step_times: Sequence[tuple[int, float]]
    """(step, seconds since the start)."""
    memory: Sequence[tuple[int, float]]
    """(step, MiB in use)."""
    evaluations: Sequence[RecordedEvaluation]
    """On dev, in order."""
    zero_shot: RecordedEvaluation | None
    final: RecordedEvaluation | None
    """The tested checkpoint of a finished run."""
    baselines: tuple[float | None, float | None]
    """Zero-shot and calibrated zero-shot figure of a finished run."""
    warnings: Sequence[RunWarning]
    commands: Sequence[str]
    finished: bool
    failure: str
    """What ended the run; empty if nothing did, or if it was resumed since."""
    seconds: float | None
    peak_memory: float | None
    digest: str
    examples: Mapping[str, int]
    """Split → number of examples."""
    parameters: float | None
    trained_parameters: float | None
    engine: str
    torch: str
    cached_tokens: float | None
    """From the engine's prefix cache; None for an engine that does not count them."""
    computed_tokens: float | None

    @property
    def step_durations(self) -> list[tuple[int, float]]:
        """(step, seconds) of each step whose predecessor was recorded too."""
        pairs = zip(self.step_times, self.step_times[1:], strict=False)
        return [(step, end - start) for (before, start), (step, end) in pairs if step == before + 1 and end > start]


def parse_metrics(events: Sequence[Event]) -> Metrics:
    result, start, engine = _last(events, "result"), _last(events, "start"), _last(events, "engine")
    memory = _step_values(events, "memory_mib")
    zero_shot = (_parse_evaluation(event, "test") for event in _all(events, "zero-shot"))
    dev = (_parse_evaluation(event, "dev") for event in _all(events, "evaluation"))
    return Metrics(
        step_times=_step_values(events, "seconds"),
        memory=memory,
        evaluations=[evaluation for evaluation in dev if evaluation],
        zero_shot=next((evaluation for evaluation in zero_shot if evaluation), None),
        final=_parse_final(result),
        baselines=(finite_number(result.get("zero_shot")), finite_number(result.get("zero_shot_calibrated"))),
        warnings=[
            RunWarning(int(finite_number(e.get("step")) or 0), str(e.get("kind", "note")), str(e.get("text", "")))
            for e in _all(events, "warning")
        ],
        commands=[str(event.get("text", "")) for event in _all(events, "command")],
        finished=bool(result),
        failure=_failure(events),
        seconds=finite_number(result.get("seconds")),
        peak_memory=finite_number(result.get("memory_mib")) or max((mib for _, mib in memory), default=None),
        digest=str(result.get("digest", "")),
        examples={s: int(count) for s in ("train", "dev", "test") if (count := finite_number(start.get(s)))},
        parameters=finite_number(start.get("parameters")),
        trained_parameters=finite_number(start.get("trained_parameters")),
        engine=" ".join(str(start[key]) for key in ("engine", "device") if key in start),
        torch=str(start.get("torch", "")),
        cached_tokens=finite_number(engine.get("cached_tokens")),
        computed_tokens=finite_number(engine.get("computed_tokens")),
    )


def finite_number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _parse_final(result: Event) -> RecordedEvaluation | None:
    """The evaluation in the event `result`, whose keys differ."""
    fields = {key: result.get(key) for key in ("value", "interval", "metric")}
    fields |= {"step": result.get("best_step", 0), "n": result.get("n_test")}
    return _parse_evaluation(fields, str(result.get("tested_on", "test")))


def _parse_evaluation(event: Event, split: str) -> RecordedEvaluation | None:
    interval = event.get("interval")
    low, high = map(finite_number, interval if isinstance(interval, list) and len(interval) == 2 else (None, None))
    step, value, loss, n, calibrated = (
        finite_number(event.get(k)) for k in ("step", "value", "loss", "n", "calibrated")
    )
    if step is None or value is None or low is None or high is None:
        return None
    metric = str(event.get("metric", "accuracy"))
    loss, calibrated = (math.nan if figure is None else figure for figure in (loss, calibrated))
    return RecordedEvaluation(split, int(step), metric, value, low, high, loss, int(n or 0), calibrated)


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


def _failure(events: Sequence[Event]) -> str:
    ends = (event for event in reversed(events) if event.get("event") in ("failed", "start", "result"))
    last: Event = next(ends, {})
    return str(last.get("text", "")) if last.get("event") == "failed" else ""
