"""Stories as one HTML page that needs nothing else: styles and pictures inside, no script, every word of the run escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import resources

from mezzo.reports import html
from mezzo.reports.charts import comparison_of
from mezzo.reports.run_data import Story, number
from mezzo.reports.sections import section


def render(stories: Sequence[Story], live: bool = False) -> str:
    """The page. `live` adds the few lines of script that ask the server for it again."""
    title = stories[0].name if len(stories) == 1 else f"{len(stories)} runs"
    script = _asset("live.js") if live else ""
    # Even if something of a stranger's run escaped us, a browser may run nothing but our own script.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    policy += f"; script-src 'sha256-{digest}'; connect-src 'self'" if live else ""
    body = [_comparison(stories), *(section(story, len(stories) > 1) for story in stories)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · mezzo</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
        f"<style>{_asset('style.css')}</style></head>\n<body><main>{''.join(body)}</main>"
        f"{f'<script>{script}</script>' if live else ''}</body></html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files("mezzo.reports") / name).read_text(encoding="utf-8")


# ---- several runs


def _comparison(stories: Sequence[Story]) -> str:
    if len(stories) < 2:
        return ""
    names = (
        "run",
        "verdict",
        "figure",
        "95% interval",
        "calibrated",
        "best step",
        "steps",
        "zero slopes",
        "steps/s",
        "MiB",
    )
    head = "".join(f'<th class="{"number" if place > 1 else ""}">{name}</th>' for place, name in enumerate(names))
    rows = "".join(f"<tr>{_compared(story)}</tr>" for story in stories)
    return (
        f'<h1>{len(stories)} runs compared</h1><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
        f"{html.heading('Curves')}{html.charts(comparison_of(stories))}{_differences(stories)}"
    )


def _compared(story: Story) -> str:
    look = story.tested or story.best
    peak = number(story.result.get("memory_mib")) or max((mib for _, mib in story.memory), default=None)
    cells = (
        f"{look.value:.1%}" if look else "–",
        html.interval(look) if look else "–",
        f"{story.zero_shot.calibrated:.1%}" if story.zero_shot else "–",
        f"{look.step:,}" if look else "–",
        f"{story.steps:,}",
        f"{story.zero_share:.1%}",
        f"{story.speed:.3g}" if story.speed else "–",
        f"{peak:,.0f}" if peak else "–",
    )
    found = story.verdict
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return f'<td>{escape(story.name)}</td><td class="word {found.tone}">{escape(found.word)}</td>{numbers}'


def _differences(stories: Sequence[Story]) -> str:
    """Only the options in which the runs differ."""
    options = dict.fromkeys(name for story in stories for name in story.config if name != "out")
    differing = [name for name in options if len({html.text(story.config.get(name)) for story in stories}) > 1]
    if not differing:
        return f'{html.heading("Options that differ")}<p class="soft">None: the runs have the same options.</p>'
    head = "".join(f"<th>{escape(story.name)}</th>" for story in stories)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(html.text(s.config.get(name)))}</td>' for s in stories)}</tr>"
        for name in differing
    )
    return f'{html.heading("Options that differ")}<div class="scroll"><table><tr><th>option</th>{head}</tr>{rows}</table></div>'
