"""The charts of a run, as data. Two renderers draw them: SVG for the page, PNG by matplotlib.

To add a chart, yield it from one of the functions below, or from one of its own that is named in `run_charts`. The page and
the plot files then contain it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from mezzo.reports.metrics import RecordedEvaluation
from mezzo.reports.run_data import RunData

# Most points of a line; more are aggregated, because no screen shows them.
BUCKETS = 100


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
    """One picture. `bars` are (left, right, height); a vertical line marks `best_step`."""

    key: str
    title: str
    series: tuple[Series, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    bars: tuple[tuple[float, float, float], ...] = ()
    best_step: int | None = None
    x_label: str = "step"
    percent: bool = False
    from_zero: bool = False
    note: str = ""


def run_charts(run: RunData) -> list[Chart]:
    """Every chart there is data for, in the order of the page."""
    return [chart for make in (_loss, _metric, _slope_histogram, _line_charts) for chart in make(run)]


def comparison_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Curves of several runs in one chart."""
    named = list(enumerate(zip(_unique_names(runs), runs, strict=True)))
    evaluated = [(colour, name, run.metrics.evaluations) for colour, (name, run) in named if run.metrics.evaluations]
    metric = [_evaluation_series(name, evaluations, "value", colour) for colour, name, evaluations in evaluated]
    loss = [Series(name, *_aggregate(run, run.losses)[:2], colour) for colour, (name, run) in named if run.records]
    charts = (
        Chart("compare-metric", f"dev {runs[0].metric}", tuple(metric), percent=True),
        Chart("compare-loss", "training loss", tuple(loss)),
    )
    return [chart for chart in charts if chart.series]


# --- one function per chart


def _loss(run: RunData) -> Iterator[Chart]:
    if not run.records:
        return
    x, y, low, high = _aggregate(run, run.losses)
    series = [Series("training", x, y, low=low, high=high)]
    dev = [evaluation for evaluation in run.metrics.evaluations if math.isfinite(evaluation.loss)]
    if dev:
        series.append(_evaluation_series("dev", dev, "loss", 1))
    note = "band: 10th to 90th percentile of the batches" if low else ""
    yield Chart("loss", "loss", tuple(series), best_step=_best_step(run), note=note)


def _metric(run: RunData) -> Iterator[Chart]:
    metrics = run.metrics
    if not metrics.evaluations:
        return
    series = [_evaluation_series("dev", metrics.evaluations, "value", 1, band=True)]
    if final := metrics.final:
        series.append(_evaluation_series(f"{final.split} at the end", [final], "value", 2, band=True))
    baselines = []
    if zero_shot := metrics.zero_shot:
        baselines.append(Baseline("zero-shot (test)", zero_shot.value, 4))
        if math.isfinite(zero_shot.calibrated):
            baselines.append(Baseline("calibrated zero-shot (test)", zero_shot.calibrated, 3))
    best_step = _best_step(run)
    yield Chart("metric", run.metric, tuple(series), tuple(baselines), best_step=best_step, percent=True)


def _slope_histogram(run: RunData) -> Iterator[Chart]:
    """Slopes by size; the outermost percent is in the first and last bar."""
    slopes = sorted(slope for record in run.records for slope in record.slopes)
    if len(slopes) < 2:
        return
    outer = len(slopes) // 100
    limit = max(abs(slopes[outer]), abs(slopes[-1 - outer])) or max(map(abs, slopes)) or 1.0
    count = 24 if len(slopes) > 100 else 12
    heights = [0] * count
    for value in slopes:
        heights[min(count - 1, max(0, int((value / limit + 1) / 2 * count)))] += 1
    width = 2 * limit / count
    bars = tuple((-limit + i * width, -limit + (i + 1) * width, h / len(slopes)) for i, h in enumerate(heights))
    note = f"{run.zero_slope_share:.1%} of steps had slope zero"
    yield Chart("slopes", "slopes by size", bars=bars, x_label="slope g", percent=True, from_zero=True, note=note)


def _line_charts(run: RunData) -> Iterator[Chart]:
    """Charts of a single line, from zero."""
    if run.records:
        zero_slopes = [float(not any(record.slopes)) for record in run.records]
        line = Series("share of steps with slope zero", *_aggregate(run, zero_slopes)[:2], 3)
        yield Chart("zero-slopes", "zero slopes over time", (line,), percent=True, from_zero=True)
        line = Series("lr", *_aggregate(run, [record.lr for record in run.records])[:2], 5)
        yield Chart("learning-rate", "learning rate", (line,), from_zero=True)
    if len(durations := run.metrics.step_durations) > 1:
        speeds = [(step, 1 / seconds) for step, seconds in durations]
        yield Chart(
            "speed", "steps per second", (Series("steps/s", *_bucket(speeds, statistics.median)),), from_zero=True
        )
    if len(memory := run.metrics.memory) > 1:
        yield Chart("memory", "memory, MiB", (Series("in use", *_bucket(memory, max), 2),), from_zero=True)


# --- shared by charts


def _unique_names(runs: Sequence[RunData]) -> Iterable[str]:
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _evaluation_series(
    name: str, evaluations: Sequence[RecordedEvaluation], figure: str, colour: int, band: bool = False
) -> Series:
    """A field of the evaluations over their steps; `band` adds the interval, which is that of `value`."""
    x, y = ([getattr(each, key) for each in evaluations] for key in ("step", figure))
    low, high = zip(*(each.interval for each in evaluations), strict=True) if band else ((), ())
    return Series(name, x, y, colour, True, low, high)


def _best_step(run: RunData) -> int | None:
    return run.best.step if run.best and len(run.metrics.evaluations) > 1 else None


Floats = list[float]


def _aggregate(run: RunData, values: Sequence[float]) -> tuple[Floats, Floats, Floats, Floats]:
    """Steps, means, and a band from the 10th to the 90th percentile; the values themselves if there are few."""
    points = [(record.step + 1, value) for record, value in zip(run.records, values, strict=True)]
    if len(points) <= 2 * BUCKETS // 5:
        return *_bucket(points, statistics.fmean), [], []
    low, high = (_bucket(points, partial(_percentile, share), 5)[1] for share in (0.1, 0.9))
    return *_bucket(points, statistics.fmean, 5), low, high


def _percentile(share: float, values: Floats) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def _bucket(
    points: Sequence[tuple[int, float]], summary: Callable[[Floats], float], smallest: int = 1
) -> tuple[Floats, Floats]:
    """Mean step and summary of the values of each bucket."""
    size = max(smallest, math.ceil(len(points) / BUCKETS))
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    x = [statistics.fmean(step for step, _ in bucket) for bucket in buckets]
    return x, [float(summary([value for _, value in bucket])) for bucket in buckets]
