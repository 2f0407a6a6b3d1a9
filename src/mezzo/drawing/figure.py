"""Charts by matplotlib, where it is installed."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from mezzo.drawing.chart import Chart
from mezzo.drawing.svg import COLOURS
from mezzo.errors import ConfigError


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def make_figure(chart: Chart) -> Any:
    """A matplotlib Figure of the chart."""
    if not has_matplotlib():
        raise ConfigError("plots need matplotlib: pip install 'mezzo[plots]'")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A notebook shows it even where pyplot has not been imported."""

        def _repr_png_(self) -> bytes:
            return _to_png(self)

    figure = ShownFigure(figsize=(6, 3.6), layout="constrained")
    with rc_context({"text.parse_math": False}):  # a run's name may hold a dollar sign
        draw_chart(figure.subplots(), chart)
    return figure


def draw_chart(axes: Any, chart: Chart) -> None:
    """Draw a chart on axes of matplotlib."""
    from matplotlib.ticker import PercentFormatter

    for series in chart.series:
        colour = COLOURS[series.colour % len(COLOURS)]
        axes.plot(series.x, series.y, color=colour, marker="o" if series.markers else "", label=series.name)
        if series.low and len(series.x) > 1:
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.16, linewidth=0)
        elif series.low:
            axes.vlines(series.x, series.low, series.high, color=colour)
    for baseline in chart.baselines:
        axes.axhline(baseline.y, color=COLOURS[baseline.colour % len(COLOURS)], linestyle="--", label=baseline.name)
    if chart.best is not None:
        axes.axvline(chart.best, color="black", alpha=0.35, linestyle=":")
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


def render_png(chart: Chart) -> bytes:
    return _to_png(make_figure(chart))


def _to_png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=144)
    return out.getvalue()
