"""Reports on run folders: as a page, as plots, or served live. They only read folders: no model, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mezzo.drawing.figure import has_matplotlib
from mezzo.journal.atomic_files import write_atomically
from mezzo.reports.live import make_server
from mezzo.reports.notebook import notebook_observer
from mezzo.reports.page import render_page
from mezzo.reports.plots import write_plots
from mezzo.reports.run_data import RunData, read_run

__all__ = ["RunData", "has_matplotlib", "make_server", "notebook_observer", "read_run", "write_page", "write_plots"]


def write_page(paths: Sequence[str | Path], out: str | Path | None = None) -> tuple[Path, list[RunData]]:
    """Write the report to `out`; by default into the run folder, or for several runs into the current folder."""
    runs = [read_run(path) for path in paths]
    target = Path(out) if out else (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    write_atomically(target, render_page(runs).encode())
    return target, runs
