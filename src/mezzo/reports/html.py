"""Small pieces of HTML that sections share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Any

from mezzo.reports.charts import Chart
from mezzo.reports.run_data import Look, number
from mezzo.reports.svg import draw


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def facts(facts: Iterable[tuple[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text(value))}</td></tr>" for name, value in facts if text(value)
    )
    return f'<div class="scroll"><table class="facts">{rows}</table></div>'


def interval(look: Look) -> str:
    return f"{100 * look.low:.1f}–{look.high:.1%}" if math.isfinite(look.low) else "–"


def count(value: Any) -> str:
    found = number(value)
    return "?" if found is None else f"{found:,.0f}"


def text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def charts(charts: Iterable[Chart]) -> str:
    shown = (
        f'<div class="chart"><h3>{escape(chart.title)}</h3>{draw(chart)}'
        f"{f'<p class=note>{escape(chart.note)}</p>' if chart.note else ''}</div>"
        for chart in charts
    )
    return f'<div class="charts">{"".join(shown)}</div>'
