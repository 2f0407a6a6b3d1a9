"""A chart as lines of text, for a terminal; and text for terminals that cannot show all characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mezzo.drawing.chart import Chart, Series
from mezzo.drawing.svg import format_count, format_y

# What stands for our own characters where the output cannot show them.
ASCII = str.maketrans(
    {
        "→": "->",
        "≈": "~",
        "…": "...",
        "·": ".",
        "•": "*",
        "±": "+/-",
        "–": "-",
        "─": "-",
        "│": "|",
        "└": "+",
        "θ": "theta",
        "ε": "eps",
    }
)


def shows_unicode(encoding: str | None) -> bool:
    """Whether an output of this encoding takes every character; one without an encoding does."""
    return (encoding or "utf-8").lower().startswith("utf")


def fit_encoding(text: str, encoding: str | None) -> str:
    """The text as an output of this encoding can show it; what nothing stands for becomes a question mark."""
    if encoding is None or shows_unicode(encoding):
        return text
    return text.translate(ASCII).encode(encoding, "replace").decode(encoding)


def shorten(text: str, width: int) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: max(0, width - 1)].rstrip() + "…"


def draw_curve(chart: Chart, width: int = 64, height: int = 7) -> list[str]:
    """The chart's first series: its points and the line between them, with the ends of both axes."""
    series = chart.series[0]
    low, high = min(series.y), max(series.y)
    labels = (
        {0: format_y(chart, high), height - 1: format_y(chart, low)}
        if high > low
        else {height // 2: format_y(chart, low)}
    )
    margin = max(map(len, labels.values()))
    grid = _plot(series, low, high, max(8, width - margin - 3), height)
    lines = [f"{labels.get(row, ''):>{margin}} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    first, last = format_count(min(series.x)), f"{format_count(max(series.x))} {chart.x_label}"
    space = max(1, len(grid[0]) - len(first) - len(last))
    return [chart.title, *lines, f"{'':>{margin}} └{'─' * len(grid[0])}", f"{'':>{margin}}  {first}{' ' * space}{last}"]


def _plot(series: Series, low: float, high: float, columns: int, rows: int) -> list[list[str]]:
    grid = [[" "] * columns for _ in range(rows)]
    places = [
        (
            _scale(x, min(series.x), max(series.x), columns),
            rows - 1 - _scale(y, low, high, rows) if high > low else rows // 2,
        )
        for x, y in sorted(zip(series.x, series.y, strict=True))
    ]
    for start, end in pairwise(places):
        for column, row in _line(start, end):
            grid[row][column] = "·"
    for column, row in places:
        grid[row][column] = "•"
    return grid


def _scale(value: float, low: float, high: float, cells: int) -> int:
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0


def _line(start: tuple[int, int], end: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """The cells between two cells."""
    (left, top), (right, bottom) = start, end
    length = max(abs(right - left), abs(bottom - top), 1)
    return [
        (round(left + (right - left) * step / length), round(top + (bottom - top) * step / length))
        for step in range(length + 1)
    ]
