"""HTML elements that several sections use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Any

from mezzo.reports.charts import Chart
from mezzo.reports.metrics import RecordedEvaluation
from mezzo.reports.svg import render_svg


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def fact_table(facts: Iterable[tuple[str, Any]]) -> str:
    """A table of names and values, without those that are empty."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(plain_text(value))}</td></tr>"
        for name, value in facts
        if plain_text(value)
    )
    return f'<div class="scroll"><table class="facts">{rows}</table></div>'


def interval(evaluation: RecordedEvaluation) -> str:
    return f"{100 * evaluation.low:.1f}–{evaluation.high:.1%}" if math.isfinite(evaluation.low) else "–"


def count(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def plain_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def chart_grid(charts: Iterable[Chart]) -> str:
    figures = (
        f'<div class="chart"><h3>{escape(chart.title)}</h3>{render_svg(chart)}'
        f"{f'<p class=note>{escape(chart.note)}</p>' if chart.note else ''}</div>"
        for chart in charts
    )
    return f'<div class="charts">{"".join(figures)}</div>'
