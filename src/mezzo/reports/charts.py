"""The charts of a run, as data. `mezzo.drawing` draws them: SVG for the page, PNG by matplotlib.

To add a chart, yield it from one of the functions below, or from one of its own that is named in `run_charts`. The page and
the plot files then contain it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from mezzo.drawing import Baseline, Chart, Series, drawable
from mezzo.evaluation.figures import is_reward_metric
from mezzo.reports.comparison import Comparison, Setting
from mezzo.reports.metrics import RecordedEvaluation, finite_number
from mezzo.reports.run_data import RunData

# Most points of a line; more are aggregated, because no screen shows them.
BUCKETS = 100
FORWARDS = "example-forwards"
# Of a text, from which on its perplexity is no number to draw.
LARGEST_LOSS = 100.0
# The notes of a step of solve that are drawn.
JUDGED = ("before", "after", "gain", "gain_error", "directions", "fitted", "judged", "eps")


def run_charts(run: RunData) -> list[Chart]:
    """Every chart there is data for, in the order of the page."""
    return drawable([chart for make in (_loss, _metric, _rewards, _judged, _slopes, _machine) for chart in make(run)])


def comparison_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Curves of several runs in one chart, over example-forwards where all runs counted them: methods compare in this unit."""
    counted = all(run.forwards for run in runs if run.metrics.evaluations or run.records)
    label = FORWARDS if counted else "step"
    comparison = Comparison(runs)
    settings, names = comparison.settings, unique_names(runs)
    repeated = len(settings) < len(runs)
    metric, loss = [], []
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        place = next(n for n, setting in enumerate(settings) if any(each is run for each in setting.runs))
        # Runs of one setting have one colour.
        look = {"colour": place, "group": settings[place].name} if repeated else {"colour": number}
        if run.metrics.evaluations:
            series = _evaluation_series(run, run.metrics.evaluations, "value", name, 0, counted)
            metric.append(replace(series, **look))
        if run.records:
            points = _aggregate(run, run.losses, counted)[:2]
            loss.append(replace(Series(name, *points, hidden_markers=True), **look))
    means = [_mean_series(setting, colour, counted) for colour, setting in enumerate(settings)] if repeated else []
    title = f"dev {comparison.metric}"
    note, percent = "band: one standard deviation over seeds", not is_reward_metric(comparison.metric)
    charts = (
        Chart(
            "compare-settings", f"{title}, mean", tuple(filter(None, means)), percent=percent, x_label=label, note=note
        ),
        Chart("compare-metric", title, tuple(metric), percent=percent, x_label=label),
        Chart("compare-loss", "training loss", tuple(loss), x_label=label),
    )
    return drawable(chart for chart in charts if chart.series)


def _mean_series(setting: Setting, colour: int, over_forwards: bool) -> Series | None:
    """The mean dev figure of a setting's runs where all have one, between their evaluations by a straight line."""
    curves = [
        _evaluation_series(run, run.metrics.evaluations, "value", "", 0, over_forwards)
        for run in setting.runs
        if run.metrics.evaluations
    ]
    if not curves:
        return None
    start, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = sorted({place for curve in curves for place in curve.x if start <= place <= end})
    if not x:  # the runs have no place in common
        return None
    values = np.array([np.interp(x, curve.x, curve.y) for curve in curves])
    mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(x))
    band = ((mean - spread).tolist(), (mean + spread).tolist()) if len(curves) > 1 else ((), ())
    return Series(setting.name, x, mean.tolist(), colour, True, *band)


# --- one function per kind of chart


def _loss(run: RunData) -> Iterator[Chart]:
    if not run.records or run.method == "es":
        return
    x, y, low, high = _aggregate(run, run.losses, _over_forwards(run))
    series = [Series("fitted batch" if run.method == "solve" else "training", x, y, low=low, high=high)]
    dev = [evaluation for evaluation in run.metrics.evaluations if math.isfinite(evaluation.loss)]
    if dev:
        series.append(_evaluation_series(run, dev, "loss", "dev", 1))
    note = "band: 10th to 90th percentile of the batches" if low else ""
    yield Chart("loss", "loss", tuple(series), best=_best(run), x_label=_x_label(run), note=note)


def _metric(run: RunData) -> Iterator[Chart]:
    metrics = run.metrics
    if not metrics.evaluations:
        return
    series = [_evaluation_series(run, metrics.evaluations, "value", "dev", 1, band=True)]
    if final := metrics.final:
        series.append(_evaluation_series(run, [final], "value", f"{final.split} at the end", 2, band=True))
    baselines = []
    if zero_shot := metrics.zero_shot:
        baselines.append(Baseline(f"zero-shot ({metrics.tested_on})", zero_shot.value, 4))
        if zero_shot.calibrated is not None:
            baselines.append(Baseline(f"calibrated zero-shot ({metrics.tested_on})", zero_shot.calibrated, 3))
    if metrics.majority is not None:
        baselines.append(Baseline(f"majority class ({metrics.tested_on})", metrics.majority, 7))
    percent = not is_reward_metric(run.metric)
    chart = Chart("metric", run.metric, tuple(series), tuple(baselines), best=_best(run), percent=percent)
    yield _over(run, chart)


def _rewards(run: RunData) -> Iterator[Chart]:
    """Of es: the rewards of the training texts, how sure their slopes are, and whether the model forgets."""
    if run.method != "es" or not run.records:
        return
    x, y, low, high = _aggregate(run, [-loss for loss in run.losses])
    yield Chart("reward", "reward of the training texts", (Series("training", x, y, low=low, high=high),))
    names = (("slope", "slopes", 0), ("slope_error", "their standard error", 1))
    lines = [
        Series(name, *_aggregate(run, [r.notes.get(key, math.nan) for r in run.records])[:2], colour)
        for key, name, colour in names
        if all(finite_number(r.notes.get(key)) is not None for r in run.records)
    ]
    if lines:
        note = "root mean square over the directions of a step"
        yield Chart("slope-errors", "slopes of the reward", tuple(lines), from_zero=True, note=note)
    held_out = [(e.step, math.exp(e.loss)) for e in run.metrics.evaluations if e.loss < LARGEST_LOSS]
    if held_out:
        line = Series("perplexity", [step for step, _ in held_out], [value for _, value in held_out], 2, True)
        yield Chart("perplexity", "perplexity of the held-out text", (line,))


def _judged(run: RunData) -> Iterator[Chart]:
    """How the steps of solve went: their judges' loss, their gain, and their size."""
    steps = [
        record for record in run.records if all(finite_number(record.notes.get(key)) is not None for key in JUDGED)
    ]
    if run.method != "solve" or not steps:
        return
    x = [_x(run, record.step + 1, _over_forwards(run)) for record in steps]
    before, gain, error = ([record.notes[key] for record in steps] for key in ("before", "gain", "gain_error"))
    after = [record.notes["before" if record.update.empty else "after"] for record in steps]
    losses = (
        Series("before the move", x, before, 0, True),
        Series("about after it", x, after, 2, True),
    )
    yield _over(run, Chart("judged-loss", "loss of the judging examples", losses))
    low, high = ([g + sign * e for g, e in zip(gain, error, strict=True)] for sign in (-1, 1))
    line = Series("gain", x, gain, 2, True, low, high)
    note = f"band: one standard error; {run.moves} of {run.steps - run.skipped_steps} moves were taken"
    yield _over(run, Chart("gain", "gain of the whole chosen move", (line,), (Baseline("no gain", 0.0),), note=note))
    sizes = (("directions", "directions", 0), ("fitted", "fitted examples", 1), ("judged", "judging examples", 2))
    lines = tuple(Series(name, x, [record.notes[key] for record in steps], colour, True) for key, name, colour in sizes)
    yield _over(run, Chart("step-size", "size of a step", lines, from_zero=True))
    eps = Series("ε", x, [record.notes["eps"] for record in steps], 5, True)
    yield _over(run, Chart("eps", "ε of the probes", (eps,), from_zero=True))


def _slopes(run: RunData) -> Iterator[Chart]:
    """The slopes of spsa by size and over time, or the gradient's norm, and the learning rate."""
    if run.method == "solve" or not run.records:
        return
    if run.method == "adam":
        norms = Series("norm", *_aggregate(run, [sum(record.slopes) for record in run.records])[:2], 3)
        yield Chart("gradient", "norm of the gradient", (norms,), from_zero=True)
    else:
        yield from _slope_histogram(run)
        zero_slopes = [float(not any(record.slopes)) for record in run.records]
        line = Series("share of steps with slope zero", *_aggregate(run, zero_slopes)[:2], 3)
        yield Chart("zero-slopes", "zero slopes over time", (line,), percent=True, from_zero=True)
    line = Series("lr", *_aggregate(run, [record.lr for record in run.records])[:2], 5)
    yield Chart("learning-rate", "learning rate", (line,), from_zero=True)


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
        share = (min(1.0, max(-1.0, value / limit)) + 1) / 2
        heights[min(count - 1, int(share * count))] += 1
    width = 2 * limit / count
    bars = tuple((-limit + i * width, -limit + (i + 1) * width, h / len(slopes)) for i, h in enumerate(heights))
    note = f"{run.zero_slope_share:.1%} of steps had slope zero"
    yield Chart("slopes", "slopes by size", bars=bars, x_label="slope g", percent=True, from_zero=True, note=note)


def _machine(run: RunData) -> Iterator[Chart]:
    """Speed and memory over steps."""
    if len(durations := run.metrics.step_durations) > 1:
        if run.method == "solve":
            taken = [(step, seconds) for step, seconds in durations]
            line = Series("s/step", *_bucket(taken, statistics.median), markers=True)
            yield Chart("speed", "seconds per step", (line,), from_zero=True)
        else:
            speeds = [(step, 1 / seconds) for step, seconds in durations]
            line = Series("steps/s", *_bucket(speeds, statistics.median))
            yield Chart("speed", "steps per second", (line,), from_zero=True)
    if len(memory := run.metrics.memory) > 1:
        yield Chart("memory", "memory, MiB", (Series("in use", *_bucket(memory, max), 2),), from_zero=True)


# --- the x axis: steps, or for solve, whose steps differ in size, example-forwards


def _over_forwards(run: RunData) -> bool:
    return run.method == "solve" and bool(run.forwards)


def _x_label(run: RunData) -> str:
    return FORWARDS if _over_forwards(run) else "step"


def _over(run: RunData, chart: Chart) -> Chart:
    return replace(chart, x_label=_x_label(run))


def _x(run: RunData, position: int, over_forwards: bool) -> float:
    """The place of a journal position."""
    return run.forwards.get(position) or 0.0 if over_forwards else position


def _best(run: RunData) -> float | None:
    if not run.best or len(run.metrics.evaluations) < 2:
        return None
    return _x(run, run.best.step, _over_forwards(run))


# --- shared by charts


def unique_names(runs: Sequence[RunData]) -> list[str]:
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _evaluation_series(
    run: RunData,
    evaluations: Sequence[RecordedEvaluation],
    figure: str,
    name: str,
    colour: int,
    over_forwards: bool | None = None,
    band: bool = False,
) -> Series:
    """A field of the evaluations over their steps; `band` adds the interval, which is that of `value`."""
    over_forwards = _over_forwards(run) if over_forwards is None else over_forwards
    x = [_x(run, each.step, over_forwards) for each in evaluations]
    low, high = zip(*(each.interval for each in evaluations), strict=True) if band else ((), ())
    return Series(name, x, [getattr(each, figure) for each in evaluations], colour, True, low, high)


Floats = list[float]


def _aggregate(
    run: RunData, values: Sequence[float], over_forwards: bool = False
) -> tuple[Floats, Floats, Floats, Floats]:
    """Places, means, and a band from the 10th to the 90th percentile; the values themselves if there are few."""
    # A loss belongs to the weights before its step; among many steps, that is no difference.
    points = [
        (_x(run, record.step + (not over_forwards), over_forwards), value)
        for record, value in zip(run.records, values, strict=True)
    ]
    if len(points) <= 2 * BUCKETS // 5:
        return *_bucket(points, statistics.fmean), [], []
    low, high = (_bucket(points, partial(_percentile, share), 5)[1] for share in (0.1, 0.9))
    return *_bucket(points, statistics.fmean, 5), low, high


def _percentile(share: float, values: Floats) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def _bucket(
    points: Sequence[tuple[float, float]], summary: Callable[[Floats], float], smallest: int = 1
) -> tuple[Floats, Floats]:
    """Mean place and summary of the values of each bucket."""
    size = max(smallest, math.ceil(len(points) / BUCKETS))
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    x = [statistics.fmean(place for place, _ in bucket) for bucket in buckets]
    return x, [float(summary([value for _, value in bucket])) for bucket in buckets]
