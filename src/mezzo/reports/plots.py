"""Charts as files: SVG always, PNG if matplotlib is installed."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezzo.journal.atomic_files import write_atomically
from mezzo.reports.charts import Chart, comparison_charts, run_charts
from mezzo.reports.run_data import RunData
from mezzo.reports.svg import COLOURS, render_svg


def write_plots(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write one file per chart and format: `NAME.svg`, `NAME.png`; for several runs the name begins with the run's."""
    named = [(chart.key, chart) for chart in (comparison_charts(runs) if len(runs) > 1 else [])]
    for number, run in enumerate(runs, 1):
        prefix = f"{number}-{re.sub(r'[^A-Za-z0-9._-]', '_', run.name)}-" if len(runs) > 1 else ""
        named += [(prefix + chart.key, chart) for chart in run_charts(run)]
    paths = []
    for name, chart in named:
        files = {"svg": render_svg(chart).encode(), **({"png": render_png(chart)} if has_matplotlib() else {})}
        for suffix, data in files.items():
            path = folder / f"{name}.{suffix}"
            write_atomically(path, data)
            paths.append(path)
    return paths


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def render_png(chart: Chart) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):  # a run's name may hold a dollar sign
        return _draw(chart, Figure(figsize=(6, 3.6), layout="constrained"))


def _draw(chart: Chart, figure: Any) -> bytes:
    from matplotlib.ticker import PercentFormatter

    axes: Any = figure.subplots()
    for series in chart.series:
        colour = COLOURS[series.colour % len(COLOURS)]
        axes.plot(series.x, series.y, color=colour, marker="o" if series.markers else "", label=series.name)
        if series.low and len(series.x) > 1:
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.16, linewidth=0)
        elif series.low:
            axes.vlines(series.x, series.low, series.high, color=colour)
    for baseline in chart.baselines:
        axes.axhline(baseline.y, color=COLOURS[baseline.colour % len(COLOURS)], linestyle="--", label=baseline.name)
    if chart.best_step is not None:
        axes.axvline(chart.best_step, color="black", alpha=0.35, linestyle=":")
    for left, right, share in chart.bars:
        axes.bar(left, share, width=right - left, align="edge", color=COLOURS[0], edgecolor="white")
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if len(chart.series) + len(chart.baselines) > 1:
        axes.legend(frameon=False, fontsize="small")
    axes.set(title=chart.title, xlabel=chart.x_label)
    axes.grid(alpha=0.2)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=144)
    return out.getvalue()
