"""One run as a section of the page: verdict, figures, curves, evaluations, mistakes, what was trained, the command."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from mezzo.evaluation.evaluate import wilson_interval
from mezzo.evaluation.figures import format_figure, is_reward_metric
from mezzo.reports import html
from mezzo.reports.changes import changes_section, classes_section
from mezzo.reports.charts import run_charts
from mezzo.reports.metrics import MAX_CHARACTERS, Event, RecordedEvaluation, finite_number
from mezzo.reports.run_data import RunData
from mezzo.runs.model_card import option_text, telling_options

# What the units of a pace are called where there is room.
PACES = {"steps/s": "steps per second", "s/step": "seconds per step", "tokens/s": "generated tokens per second"}
# Mistakes that are visible without expanding the rest.
VISIBLE_MISTAKES = 8


def run_section(run: RunData, one_of_several: bool) -> str:
    charts = run_charts(run)
    parts = (
        _title(run, one_of_several),
        _figures(run),
        _warnings(run),
        html.heading("Curves") + html.chart_grid(charts) if charts else "",
        _evaluations(run),
        classes_section(run.metrics.result.get("classes")),
        changes_section(run.metrics.result),
        _mistakes(run),
        _training_facts(run),
        _commands(run),
    )
    return f"<section>{''.join(parts)}</section>"


def _title(run: RunData, one_of_several: bool) -> str:
    level = "h2" if one_of_several else "h1"
    verdict = run.verdict
    counts = ((split, finite_number(run.metrics.start.get(split))) for split in ("train", "dev", "test"))
    data = ", ".join(f"{count:,.0f} {split}" for split, count in counts if count)
    subtitle = f"{run.config.get('model')} · {run.header.task.get('name', '?')} · {data} examples"
    return (
        f'<{level}>{escape(run.name)}</{level}><p class="soft">{escape(subtitle)}</p>'
        f'<div class="verdict {verdict.tone}"><strong>{escape(verdict.word)}</strong>{escape(verdict.reason)}</div>'
    )


def _figures(run: RunData) -> str:
    """The most important numbers."""
    metrics, figures = run.metrics, list[tuple[str, str]]()
    if shown := metrics.final or run.best:
        name = f"{'' if metrics.final else 'best '}{shown.split} {shown.metric}, step {shown.step}"
        figures.append((name, format_figure(shown.value, shown.metric)))
    if zero_shot := metrics.zero_shot:
        figures.append(("zero-shot", format_figure(zero_shot.value, zero_shot.metric)))
        if zero_shot.calibrated is not None:
            figures.append(("calibrated zero-shot", f"{zero_shot.calibrated:.1%}"))
    if metrics.majority is not None:
        figures.append(("majority class", f"{metrics.majority:.1%}"))
    figures.append((f"steps of {run.planned_steps:,}" if run.planned_steps else "steps", f"{run.steps:,}"))
    if run.method == "solve":
        of = f"example-forwards of {run.budget:,.0f}" if run.budget else "example-forwards"
        figures += [(of, f"{run.spent or 0:,.0f}"), ("moves taken", str(run.moves))]
    elif run.records and run.method in ("spsa", "es"):
        figures.append(("steps with slope zero", f"{run.zero_slope_share:.1%}"))
    if run.skipped_steps:
        figures.append(("skipped steps", str(run.skipped_steps)))
    progress = run.progress
    if run.running:
        kind = "reward" if run.method == "es" else "loss"
        # There is room for a number.
        number = progress.loss.removeprefix(f"{kind} ").split(" → ")[-1].split(",")[0].split("  ")[0]
        shown_now = ((kind, number), ("time left", progress.time_left.removesuffix(" left")))
        figures += [(name, figure) for name, figure in shown_now if figure]
    for pace in filter(None, (progress.pace, progress.token_pace)):
        number, unit = pace.split()
        figures.append((PACES[unit], number))
    if metrics.peak_memory:
        figures.append(("peak memory", f"{metrics.peak_memory:,.0f} MiB"))
    if (seconds := finite_number(metrics.result.get("seconds"))) is not None:
        figures.append(("time", f"{seconds:.0f} s" if seconds < 300 else f"{seconds / 60:.0f} min"))
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in figures)
    return f'<div class="figures">{cells}</div>'


def _warnings(run: RunData) -> str:
    return "".join(
        f'<p class="warning">step {warning.step}: {escape(warning.text)}</p>'
        for warning in dict.fromkeys(run.metrics.warnings)
    )


def _evaluations(run: RunData) -> str:
    rows = []
    if zero_shot := run.metrics.zero_shot:
        rows.append(_evaluation_row(f"{run.metrics.tested_on}, zero-shot", zero_shot))
        rows += _calibrated_row(f"{run.metrics.tested_on}, calibrated zero-shot", zero_shot)
        if run.metrics.majority is not None:
            constant = replace(zero_shot, value=run.metrics.majority, interval=(math.nan, math.nan), loss=math.nan)
            rows.append(_evaluation_row(f"{run.metrics.tested_on}, majority class", constant))
    best, by_step = run.best, {evaluation.step: evaluation for evaluation in run.metrics.evaluations}
    for step, evaluation in sorted(by_step.items()):
        is_best = best is not None and step == best.step
        rows.append(_evaluation_row(f"dev{', best' if is_best else ''}", evaluation, is_best))
    if final := run.metrics.final:
        rows.append(_evaluation_row(f"{final.split}, final", final, True))
        rows += _calibrated_row(f"{final.split}, final, calibrated", final)
    if not rows:
        return ""
    loss = "held-out loss" if is_reward_metric(run.metric) else "loss"
    head = ("examples", "step", run.metric, "95% interval", loss, "n")
    note = (
        '<p class="note">Calibrated: with the prompt\'s bias removed, so that every label is predicted equally often. This uses '
        "no labels. Compare like with like: trained with untrained, calibrated with calibrated.</p>"
        if run.metrics.zero_shot and run.metrics.zero_shot.calibrated is not None
        else ""
    )
    return html.heading("Evaluations") + html.table(head, rows, text_columns=1) + note


def _calibrated_row(name: str, evaluation: RecordedEvaluation) -> list[str]:
    if (value := evaluation.calibrated) is None:
        return []
    interval = (math.nan, math.nan)
    if evaluation.metric == "accuracy" and evaluation.n and 0 <= value <= 1:
        interval = wilson_interval(value, evaluation.n)
    return [_evaluation_row(name, replace(evaluation, value=value, interval=interval, loss=math.nan))]


def _evaluation_row(name: str, evaluation: RecordedEvaluation, bold: bool = False) -> str:
    loss = f"{evaluation.loss:.3f}" if math.isfinite(evaluation.loss) else "–"
    figures = (
        f"{evaluation.step:,}",
        format_figure(evaluation.value, evaluation.metric),
        html.interval(evaluation),
        loss,
        f"{evaluation.n:,}",
    )
    return f'<tr class="{"chosen" if bold else ""}"><td>{escape(name)}</td>{html.number_cells(figures)}</tr>'


def _mistakes(run: RunData) -> str:
    if not run.mistakes:
        return ""
    cards = [_mistake(row) for row in run.mistakes]
    visible, hidden = cards[:VISIBLE_MISTAKES], cards[VISIBLE_MISTAKES:]
    more = f"<details><summary>{len(hidden)} more</summary>{''.join(hidden)}</details>" if hidden else ""
    note = '<p class="note">From the final evaluation, most confident first.</p>'
    return f"{html.heading('Examples it got wrong')}{note}{''.join(visible)}{more}"


def _mistake(row: Mapping[str, Any]) -> str:
    fields = row.get("fields")
    texts = fields.values() if isinstance(fields, dict) else [fields]
    confidence = finite_number(row.get("sure"))
    shown = "".join(f"<p>{escape(str(text)[:MAX_CHARACTERS])}</p>" for text in texts)
    predicted, correct = (escape(str(row.get(key))[:MAX_CHARACTERS]) for key in ("given", "right"))
    share = f" ({confidence:.0%} sure)" if confidence is not None else ""
    answer = f'<div class="soft">predicted <b>{predicted}</b>{share}, correct is <b>{correct}</b></div>'
    return f'<div class="card mistake">{shown}{answer}</div>'


def _training_facts(run: RunData) -> str:
    config, task, start = run.config, run.header.task, run.metrics.start
    kinds = Counter(tensor.kind for tensor in run.header.tensors)
    words, labels = task.get("words"), task.get("labels")
    if isinstance(words, (list, tuple)) and isinstance(labels, (list, tuple)):
        words = ", ".join(f"{label} → {word}" for label, word in zip(labels, words, strict=False))
    parameters = " of ".join(html.count(start.get(key)) for key in ("trained_parameters", "parameters"))
    facts: list[tuple[str, Any]] = [
        ("model", config.get("model")),
        ("space", config.get("space")),
        ("trained parameters", parameters),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())),
        ("template", task.get("template")),
        ("label words", words),
        ("data", "; ".join(run.metrics.data)),
        *((name.replace("_", " "), option_text(value)) for name, value in telling_options(config, task).items()),
        ("engine", " ".join(str(start[key]) for key in ("engine", "device") if key in start)),
        ("prefix cache", _prefix_cache(run.metrics.engine)),
        ("torch", start.get("torch")),
        ("base digest", run.header.base[:16]),
        ("weights digest", str(run.metrics.result.get("digest", ""))[:16]),
    ]
    facts = [(name, value) for name, value in facts if html.plain_text(value)]
    return f"{html.heading('What was trained')}{html.fact_table(facts)}"


def _prefix_cache(engine: Event) -> str:
    """How many tokens came from the engine's prefix cache; empty for an engine that does not count them."""
    cached, computed = (finite_number(engine.get(key)) for key in ("cached_tokens", "computed_tokens"))
    if cached is None or not computed:
        return ""
    return f"{html.count(cached)} tokens of {html.count(cached + computed)} ({cached / (cached + computed):.0%})"


def _commands(run: RunData) -> str:
    again = f"mezzo train --config {shlex.quote(str(run.path / 'config.json'))}"
    typed = "".join(f"<pre>{escape(text)}</pre>" for text in dict.fromkeys(run.metrics.commands))
    typed = typed or '<p class="soft">It was started from Python.</p>'
    return (
        f'{html.heading("The exact command")}{typed}<p class="soft">The same run again, in a new folder:</p>'
        f"<pre>{escape(again)}</pre>"
        f"<details><summary>all options with their resolved values</summary>{html.fact_table(run.config.items())}</details>"
    )
