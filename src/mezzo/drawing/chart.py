"""A chart as data, for every renderer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
