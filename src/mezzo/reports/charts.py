"""The charts of a run, as data. Two renderers draw them: SVG for the page, PNG by matplotlib.

To add a chart, write one function below that takes a `RunData` and returns a `Chart`, or None without data, and name it in
`run_charts`. The page and the plot files then contain it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mezzo.reports.metrics import RecordedEvaluation
from mezzo.reports.run_data import RunData

BUCKETS = 100
"""Most points of a line; more are aggregated, because no screen shows them."""


@dataclass(frozen=True)
class Series:
    """A line, with a marker at each point if `markers`; `low` and `high` are a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    markers: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Baseline:
    """A horizontal line: a figure to compare with."""

    name: str
    y: float
    colour: int = 4


@dataclass(frozen=True)
class Chart:
    """One picture. `bars` are (left, right, height); `vertical_lines` are (x, name)."""

    key: str
    title: str
    series: tuple[Series, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    bars: tuple[tuple[float, float, float], ...] = ()
    vertical_lines: tuple[tuple[float, str], ...] = ()
    x_label: str = "step"
    percent: bool = False
    from_zero: bool = False
    note: str = ""


def run_charts(run: RunData) -> list[Chart]:
    """Every chart there is data for, in the order of the page."""
    makers = (_loss, _metric, _slope_histogram, _zero_slopes, _learning_rate, _speed, _memory)
    return [chart for make in makers if (chart := make(run)) is not None]


def comparison_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Curves of several runs in one chart."""
    named = list(enumerate(zip(_unique_names(runs), runs, strict=True)))
    evaluated = [(colour, name, run.metrics.evaluations) for colour, (name, run) in named if run.metrics.evaluations]
    metric = [_evaluation_series(name, evaluations, "value", colour) for colour, name, evaluations in evaluated]
    loss = [Series(name, *_aggregate(run, run.losses)[:2], colour) for colour, (name, run) in named if run.losses]
    charts = []
    if metric:
        charts.append(Chart("compare-metric", f"dev {runs[0].metric}", tuple(metric), percent=True))
    if loss:
        charts.append(Chart("compare-loss", "training loss", tuple(loss)))
    return charts


# --- one function per chart


def _loss(run: RunData) -> Chart | None:
    if not run.losses:
        return None
    x, y, low, high = _aggregate(run, run.losses)
    series = [Series("training", x, y, low=low, high=high)]
    dev = [evaluation for evaluation in run.metrics.evaluations if math.isfinite(evaluation.loss)]
    if dev:
        series.append(_evaluation_series("dev", dev, "loss", 1))
    note = "band: 10th to 90th percentile of the batches" if low else ""
    return Chart("loss", "loss", tuple(series), vertical_lines=_best_step(run), note=note)


def _metric(run: RunData) -> Chart | None:
    metrics = run.metrics
    if not metrics.evaluations:
        return None
    series = [_evaluation_series("dev", metrics.evaluations, "value", 1, band=True)]
    if final := metrics.final:
        series.append(_evaluation_series(f"{final.split} at the end", [final], "value", 2, band=True))
    baselines = []
    if zero_shot := metrics.zero_shot:
        baselines.append(Baseline("zero-shot (test)", zero_shot.value, 4))
        if math.isfinite(zero_shot.calibrated):
            baselines.append(Baseline("calibrated zero-shot (test)", zero_shot.calibrated, 3))
    best_step = _best_step(run)
    return Chart("metric", run.metric, tuple(series), tuple(baselines), vertical_lines=best_step, percent=True)


def _slope_histogram(run: RunData) -> Chart | None:
    """Slopes by size; the outermost percent is in the first and last bar."""
    slopes = sorted(value for slopes in run.slopes for value in slopes)
    if len(slopes) < 2:
        return None
    outer = len(slopes) // 100
    limit = max(abs(slopes[outer]), abs(slopes[-1 - outer])) or max(map(abs, slopes)) or 1.0
    count = 24 if len(slopes) > 100 else 12
    heights = [0] * count
    for value in slopes:
        heights[min(count - 1, max(0, int((value / limit + 1) / 2 * count)))] += 1
    width = 2 * limit / count
    bars = tuple((-limit + i * width, -limit + (i + 1) * width, h / len(slopes)) for i, h in enumerate(heights))
    note = f"{run.zero_slope_share:.1%} of steps had slope zero"
    return Chart("slopes", "slopes by size", bars=bars, x_label="slope g", percent=True, from_zero=True, note=note)


def _zero_slopes(run: RunData) -> Chart | None:
    if not run.slopes:
        return None
    x, y, _, _ = _aggregate(run, [float(not any(slopes)) for slopes in run.slopes])
    series = Series("share of steps with slope zero", x, y, 3)
    return Chart("zero-slopes", "zero slopes over time", (series,), percent=True, from_zero=True)


def _learning_rate(run: RunData) -> Chart | None:
    if not run.learning_rates:
        return None
    x, y, _, _ = _aggregate(run, run.learning_rates)
    return Chart("learning-rate", "learning rate", (Series("lr", x, y, 5),), from_zero=True)


def _speed(run: RunData) -> Chart | None:
    durations = run.metrics.step_durations
    if len(durations) < 2:
        return None
    x, y = _bucket([(step, 1 / seconds) for step, seconds in durations], statistics.median)
    return Chart("speed", "steps per second", (Series("steps/s", x, y),), from_zero=True)


def _memory(run: RunData) -> Chart | None:
    if len(run.metrics.memory) < 2:
        return None
    x, y = _bucket(run.metrics.memory, max)
    return Chart("memory", "memory, MiB", (Series("in use", x, y, 2),), from_zero=True)


# --- shared by charts


def _unique_names(runs: Sequence[RunData]) -> Iterable[str]:
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _evaluation_series(
    name: str, evaluations: Sequence[RecordedEvaluation], figure: str, colour: int, band: bool = False
) -> Series:
    """A field of the evaluations over their steps; `band` adds the interval, which is that of `value`."""
    x, y, low, high = ([getattr(each, key) for each in evaluations] for key in ("step", figure, "low", "high"))
    return Series(name, x, y, colour, True, low if band else (), high if band else ())


def _best_step(run: RunData) -> tuple[tuple[float, str], ...]:
    best = run.best
    return ((best.step, f"best: step {best.step}"),) if best and len(run.metrics.evaluations) > 1 else ()


Floats = list[float]


def _aggregate(run: RunData, values: Sequence[float]) -> tuple[Floats, Floats, Floats, Floats]:
    """Steps, means, and a band from the 10th to the 90th percentile; the values themselves if there are few."""
    steps = [float(position) for position in run.positions]
    if len(values) <= 2 * BUCKETS // 5:
        return steps, list(values), [], []
    size = max(5, math.ceil(len(values) / BUCKETS))
    buckets = [slice(start, start + size) for start in range(0, len(values), size)]
    ranked = [sorted(values[bucket]) for bucket in buckets]
    low, high = ([bucket[int(share * (len(bucket) - 1))] for bucket in ranked] for share in (0.1, 0.9))
    means = [statistics.fmean(values[bucket]) for bucket in buckets]
    return [statistics.fmean(steps[bucket]) for bucket in buckets], means, low, high


def _bucket(points: Sequence[tuple[int, float]], summary: Callable[[Floats], float]) -> tuple[Floats, Floats]:
    """Mean step and summary of the values of each bucket."""
    size = max(1, math.ceil(len(points) / BUCKETS))
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    x = [statistics.fmean(step for step, _ in bucket) for bucket in buckets]
    return x, [float(summary([value for _, value in bucket])) for bucket in buckets]
