"""HTML elements that several sections use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Any

from mezzo.drawing import Chart, render_svg
from mezzo.evaluation.figures import is_reward_metric
from mezzo.reports.metrics import RecordedEvaluation, finite_number


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def fact_table(facts: Iterable[tuple[str, Any]]) -> str:
    """A table of names and values."""
    rows = (f"<tr><td>{escape(name)}</td><td>{escape(plain_text(value))}</td></tr>" for name, value in facts)
    return f'<div class="scroll"><table class="facts">{"".join(rows)}</table></div>'


def table(head: Iterable[str], rows: Iterable[str], text_columns: int, sortable: bool = False) -> str:
    """A table of complete `<tr>` rows, whose columns after the first `text_columns` hold numbers."""
    names = (
        f'<th class="{"number" if column >= text_columns else ""}">{escape(name)}</th>'
        for column, name in enumerate(head)
    )
    opening = '<table class="sortable">' if sortable else "<table>"
    return f'<div class="scroll">{opening}<tr>{"".join(names)}</tr>{"".join(rows)}</table></div>'


def number_cells(figures: Iterable[str]) -> str:
    return "".join(f'<td class="number">{figure}</td>' for figure in figures)


def interval(evaluation: RecordedEvaluation) -> str:
    low, high = evaluation.interval
    if is_reward_metric(evaluation.metric) and math.isfinite(low):
        return f"{low:.4g} to {high:.4g}"
    return f"{100 * low:.1f}–{high:.1%}" if math.isfinite(low) else "–"


def count(value: Any) -> str:
    return "?" if (number := finite_number(value)) is None else f"{number:,.0f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


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
