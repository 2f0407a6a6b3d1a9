"""One run as a section of the page: verdict, figures, curves, evaluations, mistakes, what was trained, the command."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from mezzo.evaluation.evaluate import wilson_interval
from mezzo.reports import html
from mezzo.reports.charts import charts_of
from mezzo.reports.run_data import Look, Story, number

SHOWN = 8
"""Mistakes that are seen without opening the rest."""


def section(story: Story, among_others: bool) -> str:
    shown = [_head(story, among_others), _figures(story), _warnings(story)]
    shown.append(html.heading("Curves") + html.charts(charts_of(story)) if story.losses or story.looks else "")
    shown += [_evaluations(story), _mistakes(story), _trained(story), _commands(story)]
    return f"<section>{''.join(shown)}</section>"


def _head(story: Story, among_others: bool) -> str:
    level = "h2" if among_others else "h1"
    found = story.verdict
    data = [f"{int(story.start[key]):,} {key}" for key in ("train", "dev", "test") if number(story.start.get(key))]
    about = f"{story.config.get('model')} · {_task(story).get('name', '?')} · {', '.join(data)} examples"
    return (
        f'<{level}>{escape(story.name)}</{level}><p class="soft">{escape(about)}</p>'
        f'<div class="verdict {found.tone}"><strong>{escape(found.word)}</strong>{escape(found.reason)}</div>'
    )


def _figures(story: Story) -> str:
    """The numbers a person looks for first."""
    cells: list[tuple[str, str]] = []
    if (tested := story.tested) is not None:
        cells.append((f"{tested.what} {tested.metric}, step {tested.step}", f"{tested.value:.1%}"))
    elif story.best:
        cells.append((f"best dev {story.metric}, step {story.best.step}", f"{story.best.value:.1%}"))
    if story.zero_shot:
        cells.append(("zero-shot", f"{story.zero_shot.value:.1%}"))
        cells.append(("calibrated zero-shot", f"{story.zero_shot.calibrated:.1%}"))
    cells.append((f"steps of {story.planned:,}", f"{story.steps:,}"))
    if story.slopes:
        cells.append(("steps without a slope", f"{story.zero_share:.1%}"))
    if story.skipped:
        cells.append(("skipped steps", str(story.skipped)))
    if story.speed:
        cells.append(("steps per second", f"{story.speed:.3g}"))
    if story.memory:
        peak = number(story.result.get("memory_mib")) or max(mib for _, mib in story.memory)
        cells.append(("memory at most", f"{peak:,.0f} MiB"))
    if (seconds := number(story.result.get("seconds"))) is not None:
        cells.append(("time", f"{seconds:.0f} s" if seconds < 300 else f"{seconds / 60:.0f} min"))
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in cells)
    return f'<div class="figures">{shown}</div>'


def _warnings(story: Story) -> str:
    return "".join(
        f'<p class="warning">step {step}: {escape(text)}</p>' for step, _, text in dict.fromkeys(story.warnings)
    )


def _evaluations(story: Story) -> str:
    rows = list(_zero_shot_rows(story.zero_shot))
    best = story.best
    looks = sorted({look.step: look for look in story.looks}.values(), key=lambda look: look.step)
    for look in looks:
        chosen = best is not None and look.step == best.step
        rows.append(_row(f"dev{', best' if chosen else ''}", look, chosen))
    if (tested := story.tested) is not None:
        rows.append(_row(f"{tested.what}, final figure", tested, True))
    if not rows:
        return ""
    head = "".join(
        f'<th class="{"number" if place else ""}">{name}</th>'
        for place, name in enumerate(("examples", "step", story.metric, "95% interval", "loss", "n"))
    )
    note = (
        '<p class="note">Calibrated zero-shot predicts every label equally often, without looking at labels: '
        "a gain worth the name is a gain over that figure.</p>"
    )
    return f'{html.heading("Evaluations")}<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>{note}'


def _zero_shot_rows(look: Look | None) -> Iterator[str]:
    if look is None:
        return
    yield _row("test, zero-shot", look)
    if math.isfinite(look.calibrated):
        low, high = (
            wilson_interval(look.calibrated, look.n) if look.metric == "accuracy" and look.n else (math.nan, math.nan)
        )
        calibrated = Look("test", 0, look.metric, look.calibrated, low, high, math.nan, look.n, math.nan)
        yield _row("test, calibrated zero-shot", calibrated)


def _row(name: str, look: Look, chosen: bool = False) -> str:
    interval = html.interval(look)
    loss = f"{look.loss:.3f}" if math.isfinite(look.loss) else "–"
    cells = "".join(
        f'<td class="number">{cell}</td>'
        for cell in (f"{look.step:,}", f"{look.value:.1%}", interval, loss, f"{look.n:,}")
    )
    return f'<tr class="{"chosen" if chosen else ""}"><td>{escape(name)}</td>{cells}</tr>'


def _mistakes(story: Story) -> str:
    if not story.mistakes:
        return ""
    cards = [_mistake(row) for row in story.mistakes]
    rest = f"<details><summary>{len(cards) - SHOWN} more</summary>{''.join(cards[SHOWN:])}</details>"
    more = rest if len(cards) > SHOWN else ""
    note = '<p class="note">Of the final figure; those the model was surest of come first.</p>'
    return f"{html.heading('Examples it got wrong')}{note}{''.join(cards[:SHOWN])}{more}"


def _mistake(row: Any) -> str:
    fields = row.get("fields")
    texts = fields.values() if isinstance(fields, dict) else [fields]
    sure = number(row.get("sure"))
    shown = "".join(f"<p>{escape(str(text))}</p>" for text in texts)
    return (
        f'<div class="card mistake">{shown}<div class="soft">said <b>{escape(str(row.get("given")))}</b>'
        f"{f' ({sure:.0%} sure)' if sure is not None else ''}, right is <b>{escape(str(row.get('right')))}</b></div></div>"
    )


def _trained(story: Story) -> str:
    tensors = [t for t in story.header.get("tensors", []) if isinstance(t, dict)]
    kinds = Counter(str(t.get("kind")) for t in tensors)
    config, task, start = story.config, _task(story), story.start
    words = task.get("words")
    labels = task.get("labels")
    if isinstance(words, (list, tuple)) and isinstance(labels, (list, tuple)):
        words = dict(zip(map(str, labels), words, strict=False))
    method = ("objective", "lr", "schedule", "eps", "batch_size", "samples", "noise", "weight_decay", "seed")
    facts: list[tuple[str, Any]] = [
        ("model", config.get("model")),
        ("space", config.get("space")),
        ("trained values", f"{html.count(start.get('trained_parameters'))} of {html.count(start.get('parameters'))}"),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())),
        ("template", task.get("template")),
        ("label words", ", ".join(f"{a} → {b}" for a, b in words.items()) if isinstance(words, dict) else words),
        *((name.replace("_", " "), config.get(name)) for name in method),
        ("engine", " ".join(str(start[key]) for key in ("engine", "device") if key in start)),
        ("prefix cache", _cache(story.engine)),
        ("torch", start.get("torch")),
        ("base digest", str(story.header.get("base", ""))[:16]),
        ("weights digest", str(story.result.get("digest", ""))[:16]),
    ]
    return f"{html.heading('What was trained')}{html.facts(facts)}"


def _cache(engine: Mapping[str, Any]) -> str:
    """How many tokens came from the engine's prefix cache, by its own count; nothing where it counts none."""
    cached, computed = number(engine.get("cached_tokens")), number(engine.get("computed_tokens"))
    if cached is None or not computed:
        return ""
    return f"{html.count(cached)} tokens of {html.count(cached + computed)} ({cached / (cached + computed):.0%})"


def _commands(story: Story) -> str:
    again = f"mezzo train --config {shlex.quote(str(story.path / 'config.json'))}"
    typed = "".join(f"<pre>{escape(text)}</pre>" for text in dict.fromkeys(story.commands))
    asked = typed or '<p class="soft">It was started from Python.</p>'
    every = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(html.text(value))}</td></tr>" for name, value in story.config.items()
    )
    return (
        f'{html.heading("The exact command")}{asked}<p class="soft">The same run again, in a new folder:</p>'
        f"<pre>{escape(again)}</pre><details><summary>every option as it was resolved</summary>"
        f'<div class="scroll"><table class="facts">{every}</table></div></details>'
    )


def _task(story: Story) -> dict[str, Any]:
    task = story.header.get("task")
    return task if isinstance(task, dict) else {}
