"""Runs as one self-contained HTML page: styles and pictures inside, no script, all text of the runs escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import resources

from mezzo.reports import html
from mezzo.reports.charts import comparison_charts
from mezzo.reports.run_data import RunData
from mezzo.reports.sections import run_section
from mezzo.untrusted import printable, without_credentials

COMPARISON_COLUMNS = (
    *("run", "verdict", "method", "figure", "95% interval", "zero-shot", "calibrated", "best step", "steps"),
    *("example-forwards", "zero slopes", "steps/s", "MiB"),
)


def render_page(runs: Sequence[RunData], live: bool = False) -> str:
    """The page. `live` adds the script that reloads it from the server."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    script = _read_asset("live.js") if live else ""
    # If text of an untrusted run were ever not escaped, the browser would still run nothing but our own script.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    policy += f"; script-src 'sha256-{digest}'; connect-src 'self'" if live else ""
    several = len(runs) > 1
    body = [_comparison(runs) if several else "", *(run_section(run, several) for run in runs)]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · mezzo</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
        f"<style>{_read_asset('style.css')}</style></head>\n<body><main>{''.join(body)}</main>"
        f"{f'<script>{script}</script>' if live else ''}</body></html>\n"
    )
    return printable(without_credentials(page))


def _read_asset(name: str) -> str:
    return (resources.files("mezzo.reports") / name).read_text(encoding="utf-8")


# --- several runs


def _comparison(runs: Sequence[RunData]) -> str:
    table = html.table(COMPARISON_COLUMNS, map(_comparison_row, runs), text_columns=3)
    curves = html.heading("Curves") + html.chart_grid(comparison_charts(runs))
    return f"<h1>{len(runs)} runs compared</h1>{table}{curves}{_differences(runs)}"


def _comparison_row(run: RunData) -> str:
    metrics, verdict = run.metrics, run.verdict
    evaluation = metrics.final or run.best
    figures = (
        f"{evaluation.value:.1%}" if evaluation else "–",
        html.interval(evaluation) if evaluation else "–",
        f"{metrics.zero_shot.value:.1%}" if metrics.zero_shot else "–",
        html.percent(metrics.zero_shot.calibrated if metrics.zero_shot else None),
        f"{evaluation.step:,}" if evaluation else "–",
        f"{run.steps:,}",
        html.count(run.spent) if run.spent else "–",
        "–" if run.method != "spsa" else f"{run.zero_slope_share:.1%}",
        f"{run.speed:.3g}" if run.speed else "–",
        f"{metrics.peak_memory:,.0f}" if metrics.peak_memory else "–",
    )
    texts = f'<td>{escape(run.name)}</td><td class="word {verdict.tone}">{escape(verdict.word)}</td>'
    texts += f"<td>{run.method}</td>"
    return f"<tr>{texts}{html.number_cells(figures)}</tr>"


def _differences(runs: Sequence[RunData]) -> str:
    """The options in which the runs differ."""
    names = dict.fromkeys(name for run in runs for name in run.config if name != "out")
    values = {name: [html.plain_text(run.config.get(name)) for run in runs] for name in names}
    differing = {name: texts for name, texts in values.items() if len(set(texts)) > 1}
    heading = html.heading("Options that differ")
    if not differing:
        return f'{heading}<p class="soft">None: the runs have the same options.</p>'
    rows = (
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in (name, *texts))}</tr>"
        for name, texts in differing.items()
    )
    return heading + html.table(("option", *(run.name for run in runs)), rows, text_columns=len(runs) + 1)
