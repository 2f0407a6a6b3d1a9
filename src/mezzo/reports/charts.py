"""What is drawn of a run, as data: two renderers (SVG for the page, PNG by matplotlib) draw the same charts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mezzo.reports.run_data import Story

Style = Literal["line", "points", "steps"]
BUCKETS = 100
"""Most points of a line: more are summed up, for no screen shows them."""


@dataclass(frozen=True)
class Series:
    """A line; `low` and `high` are a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    style: Style = "line"
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Level:
    """A horizontal line: a figure to compare with."""

    name: str
    y: float
    colour: int = 4


@dataclass(frozen=True)
class Chart:
    """One picture. `bars` are (left, right, height); `marks` are vertical lines at steps that matter."""

    key: str
    title: str
    series: tuple[Series, ...] = ()
    levels: tuple[Level, ...] = ()
    bars: tuple[tuple[float, float, float], ...] = ()
    marks: tuple[tuple[float, str], ...] = ()
    x_label: str = "step"
    percent: bool = False
    from_zero: bool = False
    note: str = ""


def charts_of(story: Story) -> list[Chart]:
    """Every chart there is data for."""
    makers = (_loss, _metric, _distribution, _zeros, _rate, _speed, _memory)
    return [chart for make in makers if (chart := make(story)) is not None]


def comparison_of(stories: Sequence[Story]) -> list[Chart]:
    """The curves of several runs in one picture each."""
    dev = [
        Series(name, [look.step for look in s.looks], [look.value for look in s.looks], number, "points")
        for number, (name, s) in enumerate(_named(stories))
        if s.looks
    ]
    loss = [
        Series(name, *_summed(s, s.losses)[:2], number) for number, (name, s) in enumerate(_named(stories)) if s.losses
    ]
    charts = []
    if dev:
        charts.append(Chart("compare-metric", f"dev {stories[0].metric}", tuple(dev), percent=True))
    if loss:
        charts.append(Chart("compare-loss", "training loss", tuple(loss)))
    return charts


def _named(stories: Sequence[Story]) -> Iterable[tuple[str, Story]]:
    names = [story.name for story in stories]
    for number, story in enumerate(stories, 1):
        yield (story.name if names.count(story.name) == 1 else f"{story.name} ({number})"), story


def _loss(story: Story) -> Chart | None:
    if not story.losses:
        return None
    x, y, low, high = _summed(story, story.losses)
    series = [Series("training", x, y, 0, low=low, high=high)]
    dev = [look for look in story.looks if math.isfinite(look.loss)]
    if dev:
        series.append(Series("dev", [look.step for look in dev], [look.loss for look in dev], 1, "points"))
    note = "band: the tenth to ninetieth percent of batches" if low else ""
    return Chart("loss", "loss", tuple(series), marks=_best(story), note=note)


def _metric(story: Story) -> Chart | None:
    if not story.looks:
        return None
    looks = story.looks
    dev = Series(
        *("dev", [look.step for look in looks], [look.value for look in looks], 1, "points"),
        low=[look.low for look in looks],
        high=[look.high for look in looks],
    )
    levels = []
    if story.zero_shot:
        levels.append(Level("zero-shot (test)", story.zero_shot.value, 4))
        if math.isfinite(story.zero_shot.calibrated):
            levels.append(Level("calibrated zero-shot (test)", story.zero_shot.calibrated, 3))
    series = [dev]
    if (tested := story.tested) is not None:
        series.append(
            Series(tested.what + " at the end", [tested.step], [tested.value], 2, "points", [tested.low], [tested.high])
        )
    return Chart("metric", story.metric, tuple(series), tuple(levels), marks=_best(story), percent=True)


def _distribution(story: Story) -> Chart | None:
    """Slopes by size; the outermost hundredth is gathered in the end bars."""
    slopes = sorted(value for slopes in story.slopes for value in slopes)
    if len(slopes) < 2:
        return None
    reach = max(abs(slopes[len(slopes) // 100]), abs(slopes[-1 - len(slopes) // 100])) or max(map(abs, slopes)) or 1.0
    count = 24 if len(slopes) > 100 else 12
    heights = [0] * count
    for value in slopes:
        heights[min(count - 1, max(0, int((value / reach + 1) / 2 * count)))] += 1
    width = 2 * reach / count
    bars = tuple((-reach + i * width, -reach + (i + 1) * width, h / len(slopes)) for i, h in enumerate(heights))
    note = f"{story.zero_share:.1%} of steps had no slope at all"
    return Chart("slopes", "slopes by size", bars=bars, x_label="slope g", percent=True, from_zero=True, note=note)


def _zeros(story: Story) -> Chart | None:
    if not story.slopes:
        return None
    flags = [float(not any(slopes)) for slopes in story.slopes]
    x, y, _, _ = _summed(story, flags)
    series = Series("share of steps without a slope", x, y, 3)
    return Chart("zero-slopes", "zero slopes over time", (series,), percent=True, from_zero=True)


def _rate(story: Story) -> Chart | None:
    if not story.rates:
        return None
    x, y, _, _ = _summed(story, story.rates)
    return Chart("learning-rate", "learning rate", (Series("lr", x, y, 5),), from_zero=True)


def _speed(story: Story) -> Chart | None:
    pairs = zip(story.seconds, story.seconds[1:], strict=False)
    gaps = [(j, 1 / (b - a)) for (i, a), (j, b) in pairs if j == i + 1 and b > a]
    if len(gaps) < 2:
        return None
    x, y = _bucketed([float(step) for step, _ in gaps], [rate for _, rate in gaps], statistics.median)
    return Chart("speed", "steps per second", (Series("steps/s", x, y, 0),), from_zero=True)


def _memory(story: Story) -> Chart | None:
    if len(story.memory) < 2:
        return None
    x, y = _bucketed([float(step) for step, _ in story.memory], [mib for _, mib in story.memory], max)
    return Chart("memory", "memory, MiB", (Series("in use", x, y, 2),), from_zero=True)


def _best(story: Story) -> tuple[tuple[float, str], ...]:
    best = story.best
    return ((best.step, f"best: step {best.step}"),) if best and len(story.looks) > 1 else ()


Points = list[float]


def _summed(story: Story, values: Sequence[float]) -> tuple[Points, Points, Points, Points]:
    """Steps, means and the band of values; the values themselves if there are few."""
    steps = [float(position) for position in story.positions]
    if len(values) <= 2 * BUCKETS // 5:
        return steps, list(values), [], []
    size = max(5, math.ceil(len(values) / BUCKETS))
    cut = [values[first : first + size] for first in range(0, len(values), size)]
    x = [sum(steps[first : first + size]) / len(steps[first : first + size]) for first in range(0, len(values), size)]
    ranked = [sorted(part) for part in cut]
    low, high = ([part[int(share * (len(part) - 1))] for part in ranked] for share in (0.1, 0.9))
    return x, [sum(part) / len(part) for part in cut], low, high


def _bucketed(x: Points, y: Points, summary: Callable[[Points], float]) -> tuple[Points, Points]:
    size = max(1, math.ceil(len(x) / BUCKETS))
    starts = range(0, len(x), size)
    return [statistics.mean(x[i : i + size]) for i in starts], [float(summary(y[i : i + size])) for i in starts]
