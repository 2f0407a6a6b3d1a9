"""Reports on run folders: as a page, as plots, or served live. They only read folders: no model, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mezzo.drawing.figure import has_matplotlib
from mezzo.errors import ConfigError
from mezzo.journal.atomic_files import write_atomically
from mezzo.reports.comparison import Comparison, compare, find_runs
from mezzo.reports.live import make_server
from mezzo.reports.notebook import notebook_observer
from mezzo.reports.page import render_page
from mezzo.reports.plots import write_plots
from mezzo.reports.run_data import RunData, read_run

__all__ = [
    "Comparison",
    "RunData",
    "compare",
    "find_runs",
    "has_matplotlib",
    "make_server",
    "notebook_observer",
    "read_run",
    "write_page",
    "write_plots",
]


def write_page(paths: Sequence[str | Path], out: str | Path | None = None) -> tuple[Path, Comparison]:
    """Write the report to `out`; by default into the folder that is named, or for several into the current one. The figures of
    several runs are also written as CSV and JSON beside it."""
    if out and Path(out).is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file")
    found = compare(paths)
    several = len(found.runs) > 1
    folder = Path(paths[0]) if several else found.runs[0].path
    target = Path(out) if out else (folder if len(paths) == 1 else Path()) / "report.html"
    write_atomically(target, render_page(found.runs).encode())
    if several:
        write_atomically(target.with_suffix(".csv"), found.to_csv().encode())
        write_atomically(target.with_suffix(".json"), found.to_json().encode())
    return target, found
