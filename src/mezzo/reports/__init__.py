"""Run folders as a page, as pictures, or served live. Reads folders only: no model, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mezzo.journal.atomic_files import write_atomically
from mezzo.reports.live import server
from mezzo.reports.page import render
from mezzo.reports.plots import can_png, write_plots
from mezzo.reports.run_data import Story, story_of

__all__ = ["Story", "can_png", "server", "story_of", "write_page", "write_plots"]


def write_page(paths: Sequence[str | Path], out: str | Path | None = None) -> tuple[Path, list[Story]]:
    """Write the report: into the run folder, or for several runs into the current folder, unless `out` says otherwise."""
    stories = [story_of(path) for path in paths]
    target = Path(out) if out else (stories[0].path if len(stories) == 1 else Path()) / "report.html"
    write_atomically(target, render(stories).encode())
    return target, stories
