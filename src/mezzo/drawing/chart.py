"""A chart as data, for every renderer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace


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
    hidden_markers: bool = False
    """In a page, the pointer finds points that are not drawn."""
    group: str = ""
    """What the legend calls it, once for all lines of the group; empty: its name."""


@dataclass(frozen=True)
class Baseline:
    """A horizontal line: a figure to compare with."""

    name: str
    y: float
    colour: int = 4


@dataclass(frozen=True)
class Chart:
    """One picture. `bars` are (left, right, height); a vertical line marks `best`, a place on the x axis."""

    key: str
    title: str
    series: tuple[Series, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    bars: tuple[tuple[float, float, float], ...] = ()
    best: float | None = None
    x_label: str = "step"
    percent: bool = False
    from_zero: bool = False
    note: str = ""

    def xs(self) -> Iterator[float]:
        """Everything that must have a place on the x axis."""
        yield from (value for series in self.series for value in series.x)
        yield from (edge for left, right, _ in self.bars for edge in (left, right))

    def ys(self) -> Iterator[float]:
        yield from (value for series in self.series for value in (*series.y, *series.low, *series.high))
        yield from (baseline.y for baseline in self.baselines)
        yield from (height for _, _, height in self.bars)


def drawable(charts: Iterable[Chart]) -> list[Chart]:
    """The charts that have an axis for all of their values; a line without points is left out."""
    found = [replace(chart, series=tuple(series for series in chart.series if len(series.x))) for chart in charts]
    return [chart for chart in found if _has_span([*chart.xs()]) and _has_span([*chart.ys()])]


def _has_span(values: Sequence[float]) -> bool:
    """False where a value is not a number, or two are further apart than a number says."""
    return bool(values) and all(map(math.isfinite, values)) and math.isfinite(max(values) - min(values))
