"""Charts as files: SVG always, PNG if matplotlib is installed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mezzo.drawing import render_svg
from mezzo.drawing.figure import has_matplotlib, render_png
from mezzo.journal.atomic_files import write_atomically
from mezzo.reports.charts import comparison_charts, run_charts
from mezzo.reports.run_data import RunData


def write_plots(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write one file per chart and format: `NAME.svg`, `NAME.png`; for several runs the name begins with the run's."""
    named = [(chart.key, chart) for chart in (comparison_charts(runs) if len(runs) > 1 else [])]
    for number, run in enumerate(runs, 1):
        prefix = f"{number}-{re.sub(r'[^A-Za-z0-9._-]', '_', run.name)}-" if len(runs) > 1 else ""
        named += [(prefix + chart.key, chart) for chart in run_charts(run)]
    paths = []
    for name, chart in named:
        files = {"svg": render_svg(chart).encode(), **({"png": render_png(chart)} if has_matplotlib() else {})}
        for suffix, data in files.items():
            path = folder / f"{name}.{suffix}"
            write_atomically(path, data)
            paths.append(path)
    return paths
