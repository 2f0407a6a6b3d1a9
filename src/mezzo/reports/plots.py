"""The charts as files: SVG always, PNG where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezzo.journal.atomic_files import write_atomically
from mezzo.reports.charts import Chart, charts_of, comparison_of
from mezzo.reports.run_data import Story
from mezzo.reports.svg import COLOURS, draw


def write_plots(stories: Sequence[Story], folder: Path) -> list[Path]:
    """One file a chart and format: `NAME.svg`, `NAME.png`; several runs have their names in front."""
    named = [(chart.key, chart) for chart in (comparison_of(stories) if len(stories) > 1 else [])]
    for place, story in enumerate(stories, 1):
        front = f"{place}-{re.sub(r'[^A-Za-z0-9._-]', '_', story.name)}-" if len(stories) > 1 else ""
        named += [(front + chart.key, chart) for chart in charts_of(story)]
    written = []
    for name, chart in named:
        for ending, data in [("svg", draw(chart).encode()), *([("png", png(chart))] if can_png() else [])]:
            path = folder / f"{name}.{ending}"
            write_atomically(path, data)
            written.append(path)
    return written


def can_png() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def png(chart: Chart) -> bytes:
    """The chart drawn by matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes: Any = figure.subplots()
    for series in chart.series:
        ink = COLOURS[series.colour % len(COLOURS)]
        axes.plot(series.x, series.y, color=ink, marker="o" if series.style == "points" else "", label=series.name)
        if series.low and len(series.x) > 1:
            axes.fill_between(series.x, series.low, series.high, color=ink, alpha=0.16, linewidth=0)
        elif series.low:
            axes.vlines(series.x, series.low, series.high, color=ink)
    for level in chart.levels:
        axes.axhline(level.y, color=COLOURS[level.colour % len(COLOURS)], linestyle="--", label=level.name)
    for place, _ in chart.marks:
        axes.axvline(place, color="black", alpha=0.35, linestyle=":")
    for left, right, share in chart.bars:
        axes.bar(left, share, width=right - left, align="edge", color=COLOURS[0], edgecolor="white")
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if len(chart.series) + len(chart.levels) > 1:
        axes.legend(frameon=False, fontsize="small")
    axes.set(title=chart.title, xlabel=chart.x_label)
    axes.grid(alpha=0.2)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=144)
    return out.getvalue()
