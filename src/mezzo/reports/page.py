"""Runs as one self-contained HTML page: styles and pictures inside, all text of the runs escaped. One run needs no script;
several have one that sorts, filters and says what is under the pointer."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from mezzo.evaluation.figures import format_figure
from mezzo.reports import html
from mezzo.reports.charts import comparison_charts, unique_names
from mezzo.reports.comparison import Comparison
from mezzo.reports.run_data import RunData
from mezzo.reports.sections import run_section
from mezzo.untrusted import printable, without_credentials

RUN_COLUMNS = ("run", "verdict", "method")
FIGURE_COLUMNS = (
    *("figure", "95% interval", "zero-shot", "calibrated", "best step", "steps"),
    *("example-forwards", "zero slopes", "steps/s", "MiB"),
)
FILTER = (
    '<p><input type="search" class="filter" placeholder="filter runs by words of a row" aria-label="filter runs"></p>'
)
# From how many runs on their sections are folded.
MANY = 4


def render_page(runs: Sequence[RunData], live: bool = False) -> str:
    """The page. `live` adds the script that reloads it from the server."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    several = len(runs) > 1
    scripts = [_read_asset(name) for name, used in (("live.js", live), ("compare.js", several)) if used]
    # If text of an untrusted run were ever not escaped, the browser would still run nothing but our own scripts.
    digests = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    policy += (f"; script-src {digests}" if scripts else "") + ("; connect-src 'self'" if live else "")
    sections = (run_section(run, several) for run in runs)
    if len(runs) >= MANY:
        sections = (
            f"<details><summary>{escape(name)}: {escape(run.verdict.word)}</summary>{section}</details>"
            for name, run, section in zip(unique_names(runs), runs, sections, strict=True)
        )
    body = [_comparison(runs) if several else "", html.heading("Each run") if len(runs) >= MANY else "", *sections]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · mezzo</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
        f"<style>{_read_asset('style.css')}</style></head>\n<body><main>{''.join(body)}</main>"
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )
    return printable(without_credentials(page))


def _read_asset(name: str) -> str:
    return (resources.files("mezzo.reports") / name).read_text(encoding="utf-8")


# --- several runs


def _comparison(runs: Sequence[RunData]) -> str:
    found = Comparison(runs)
    curves = html.heading("Curves") + html.chart_grid(comparison_charts(runs))
    return (
        f"<h1>{len(runs)} runs compared</h1>{_settings(found)}{html.heading('Runs')}{FILTER}{_runs_table(found)}"
        f"{curves}{_differences(found)}"
    )


def _settings(found: Comparison) -> str:
    """Figures by setting, where one has several runs or none differs."""
    if len(found.settings) == len(found.runs):
        return ""
    head = (*found.differing, "runs", found.metric, "lowest", "highest", "zero-shot")
    rows = (
        f'<tr data-series="{escape(setting.name)}">{_texts(setting.options.values())}'
        + html.number_cells(
            (
                setting.finished,
                setting.figure,
                setting.show(min(setting.figures, default=None)),
                setting.show(max(setting.figures, default=None)),
                setting.show(setting.zero_shot),
            )
        )
        + "</tr>"
        for setting in found.settings
    )
    note = '<p class="note">± is the standard deviation over seeds. A click on a column\'s name sorts by it.</p>'
    return html.table(head, rows, len(found.differing), sortable=True) + note


def _runs_table(found: Comparison) -> str:
    options = [name for name in found.differing if name not in RUN_COLUMNS]
    head = (*RUN_COLUMNS, *options, "seed", *FIGURE_COLUMNS)
    names = unique_names(found.runs)
    rows = (_run_row(found, run, name) for run, name in zip(found.runs, names, strict=True))
    return html.table(head, rows, len(RUN_COLUMNS) + len(options), sortable=True)


def _run_row(found: Comparison, run: RunData, name: str) -> str:
    metrics, verdict = run.metrics, run.verdict
    evaluation = metrics.final or run.best
    figures = (
        escape(html.plain_text(run.config.get("seed"))),
        format_figure(evaluation.value, evaluation.metric) if evaluation else "–",
        html.interval(evaluation) if evaluation else "–",
        format_figure(metrics.zero_shot.value, metrics.zero_shot.metric) if metrics.zero_shot else "–",
        html.percent(metrics.zero_shot.calibrated if metrics.zero_shot else None),
        f"{evaluation.step:,}" if evaluation else "–",
        f"{run.steps:,}",
        html.count(run.spent) if run.spent else "–",
        "–" if run.method != "spsa" else f"{run.zero_slope_share:.1%}",
        f"{run.speed:.3g}" if run.speed else "–",
        f"{metrics.peak_memory:,.0f}" if metrics.peak_memory else "–",
    )
    texts = f'<td>{escape(name)}</td><td class="word {verdict.tone}">{escape(verdict.word)}</td>'
    options = [value for option, value in found.options_of(run).items() if option not in RUN_COLUMNS]
    texts += f"<td>{run.method}</td>{_texts(options)}"
    return f'<tr data-series="{escape(name)}">{texts}{html.number_cells(figures)}</tr>'


def _texts(values: Iterable[str]) -> str:
    return "".join(f"<td>{escape(value)}</td>" for value in values)


def _differences(found: Comparison) -> str:
    if found.differing:
        return ""
    return '<p class="soft">The runs have the same options' + (
        ", except for their seeds.</p>" if len({str(run.config.get("seed")) for run in found.runs}) > 1 else ".</p>"
    )
