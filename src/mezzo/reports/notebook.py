"""A run in a notebook while it trains: a table and the dev curve, updated in place by IPython's display."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

from mezzo.evaluation.figures import format_figure
from mezzo.runs.progress import RunProgress
from mezzo.runs.result import dev_chart, html_figure, html_table, read_curve

Observer = Callable[[str, dict[str, Any]], None]
# Seconds between two updates; evaluations and the end are shown at once.
INTERVAL = 0.5


def notebook_observer() -> Observer | None:
    """An observer that shows the run, where this process is the kernel of a notebook; None elsewhere."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython else None
    return LiveTable() if getattr(shell, "kernel", None) is not None else None


class LiveTable:
    """Call it with the events of a run."""

    def __init__(self) -> None:
        self._progress = RunProgress()
        self._events: list[dict[str, Any]] = []
        self._warnings: list[str] = []
        self._rows: list[tuple[str, str]] = []
        self._handle: Any = None
        self._shown = 0.0

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        self._progress(event, values)
        if event == "evaluation":
            self._events.append({"event": event, **values})
        elif event == "zero-shot":
            self._rows.append((f"zero-shot {values['metric']}", format_figure(values["value"], values["metric"])))
        elif event == "warning":
            self._warnings.append(str(values["text"]))
        if event != "step" or time.monotonic() - self._shown >= INTERVAL:
            self._show(finished=event == "result")

    def _show(self, finished: bool) -> None:
        from IPython.display import HTML, display

        page = HTML(self._html(finished))
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)
        self._shown = time.monotonic()

    def _html(self, finished: bool) -> str:
        progress = self._progress
        best = max((event["value"] for event in self._events), default=None)
        best_figure = "" if best is None else f" (best {format_figure(best, self._events[-1]['metric'])})"
        rows = [
            ("progress", f"{progress.place} ({progress.share:.0%})"),
            *self._rows,
            ("loss", progress.loss.removeprefix("loss ")),
            ("dev", progress.dev_figure.removeprefix("dev ") + best_figure),
            ("pace", "  ".join(filter(None, (progress.pace, progress.token_pace)))),
            ("time left", "" if finished else progress.time_left.removesuffix(" left")),
        ]
        chart = dev_chart(read_curve(self._events), str(self._events[-1]["metric"])) if self._events else None
        warnings = "".join(f"<p>warning: {escape(text)}</p>" for text in self._warnings)
        return html_table([row for row in rows if row[1]]) + (html_figure(chart) if chart else "") + warnings
