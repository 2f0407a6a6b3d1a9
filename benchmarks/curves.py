"""What a results file of `methods.py` says: a table in Markdown and a picture of the curves."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.reports.charts import Baseline, Chart, Series
from mezzo.reports.plots import draw_chart
from mezzo.reports.svg import WIDTH, render_svg

CELL = ("model", "task", "space", "k", "budget")
SETTING = ("lr", "batch")
KEY = (*CELL, "seed", "method", *SETTING)
COLUMNS = 3
MARGIN, TITLE = 16, 26
Row = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A method at its chosen setting: (mean, standard error) over seeds at each checkpoint."""

    method: str
    lr: float
    batch: int
    seeds: int
    at: list[int]
    loss: list[tuple[float, float]]
    accuracy: list[tuple[float, float]]
    edge: bool
    """The setting was the smallest or largest learning rate of its grid: a wider one might be better."""


def read(path: Path) -> list[Row]:
    """The finished runs of a file; lines of failed and torn ones are left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "curve" in row:
            rows.append(row)
    return rows


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def cells_of(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Curve]]:
    """By cell, each method's curve: `solve` first, the ceiling last."""
    cells: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in CELL), {}).setdefault(row["method"], []).append(row)
    return {cell: [choose(methods[name]) for name in sorted(methods, key=_order)] for cell, methods in cells.items()}


def _order(method: str) -> tuple[bool, bool, str]:
    return method != "solve", method == "adam", method


def choose(rows: Sequence[Row]) -> Curve:
    """The setting with the lowest mean dev loss at the end, among those with the most seeds."""
    settings: dict[tuple[float, int], list[Row]] = {}
    for row in rows:
        settings.setdefault((row["lr"], row["batch"]), []).append(row)
    most = max(map(len, settings.values()))
    complete = {setting: found for setting, found in settings.items() if len(found) == most}
    lr, batch = min(complete, key=lambda setting: _dev_loss(complete[setting]))
    tried = sorted({lr for lr, size in complete if size == batch})
    seeds = complete[lr, batch]
    columns = list(zip(*(row["curve"] for row in seeds), strict=True))
    return Curve(
        method=seeds[0]["method"],
        lr=lr,
        batch=batch,
        seeds=len(seeds),
        at=[points[0]["at"] for points in columns],
        loss=[_summary([point["test_loss"] for point in points]) for points in columns],
        accuracy=[_summary([point["test_accuracy"] for point in points]) for points in columns],
        edge=len(tried) > 1 and lr in (tried[0], tried[-1]),
    )


def _dev_loss(rows: Sequence[Row]) -> float:
    loss = statistics.fmean(row["curve"][-1]["dev_loss"] for row in rows)
    return loss if math.isfinite(loss) else math.inf


def _summary(values: Sequence[float]) -> tuple[float, float]:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def forwards_to_reach(curve: Curve, loss: float) -> float | None:
    """Example-forwards after which the mean test loss is first as low, by straight lines between checkpoints."""
    means = [mean for mean, _ in curve.loss]
    for place, mean in enumerate(means):
        if mean <= loss:
            if place == 0:
                return curve.at[0]
            share = (means[place - 1] - loss) / (means[place - 1] - mean)
            return curve.at[place - 1] + share * (curve.at[place] - curve.at[place - 1])
    return None


def table(rows: Sequence[Row]) -> str:
    return "\n".join(line for cell, found in cells_of(rows).items() for line in _cell_table(cell, found))


def _cell_table(cell: tuple[Any, ...], found: Sequence[Curve]) -> Iterator[str]:
    """Test loss and accuracy (%) at three checkpoints, and what `solve` spends to reach a method's last loss."""
    solve = next((curve for curve in found if curve.method == "solve"), None)
    shown = max((curve.at for curve in found), key=len)[::-4][:COLUMNS][::-1]
    yield f"\n{_title(cell)}\n"
    yield "| method | lr, batch | seeds | " + " | ".join(_thousands(at) for at in shown) + " | solve needs |"
    yield "|---" * (4 + len(shown)) + "|"
    for curve in found:
        setting = f"{curve.lr:.3g}{' (edge of the grid)' if curve.edge else ''}, {curve.batch}" if curve.lr else "none"
        figures = [_figures(curve, at) for at in shown]
        needed = forwards_to_reach(solve, curve.loss[-1][0]) if solve and curve is not solve else None
        share = (
            "" if curve is solve else "–" if needed is None else f"{needed / curve.at[-1]:.2f} ({_thousands(needed)})"
        )
        yield "| " + " | ".join([curve.method, setting, str(curve.seeds), *figures, share]) + " |"


def _figures(curve: Curve, at: int) -> str:
    if at not in curve.at:
        return "–"
    place = curve.at.index(at)
    (loss, loss_error), (accuracy, accuracy_error) = curve.loss[place], curve.accuracy[place]
    if curve.seeds == 1:
        return f"{loss:.3f} / {100 * accuracy:.1f}"
    return f"{loss:.3f} ± {loss_error:.3f} / {100 * accuracy:.1f} ± {100 * accuracy_error:.1f}"


def _title(cell: tuple[Any, ...]) -> str:
    model, task, space, k, budget = cell
    return f"{model}, {task}, {space}, k = {k}, {_thousands(budget)} example-forwards"


def _thousands(value: float) -> str:
    return f"{value / 1000:.0f}k" if value >= 10_000 else f"{value:.0f}"


# --- the picture


def draw(rows: Sequence[Row], path: Path) -> None:
    """One row of charts a cell: test loss and test accuracy over example-forwards, with a standard error on either side."""
    names = sorted({row["method"] for row in rows}, key=_order)
    cells = [(_title(cell), charts(found, names)) for cell, found in cells_of(rows).items()]
    render: Callable[[list[tuple[str, list[Chart]]]], bytes] = _to_svg if path.suffix == ".svg" else _to_png
    path.write_bytes(render(cells))


def charts(found: Sequence[Curve], names: Sequence[str]) -> list[Chart]:
    """The charts of a cell, from the first checkpoint on: what was there before training would take most of the room. The place
    in `names` is a method's colour."""
    made = []
    for name in ("loss", "accuracy"):
        lines, ceilings = [], []
        for curve in found:
            points, colour = getattr(curve, name), names.index(curve.method)
            if len(points) == 1:
                ceilings.append(Baseline(curve.method, points[0][0], colour))
                continue
            trained = [
                (at / 1000, *point)
                for at, point in zip(curve.at, points, strict=True)
                if at and math.isfinite(point[0])
            ]
            x, mean, error = ([row[place] for row in trained] for place in range(3))
            low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
            lines.append(Series(curve.method, x, mean, colour, False, *((low, high) if curve.seeds > 1 else ())))
        made.append(
            Chart(
                f"methods-{name}",
                f"test {name}",
                tuple(lines),
                tuple(ceilings),
                x_label="thousand example-forwards",
                percent=name == "accuracy",
            )
        )
    return made


def _to_svg(cells: list[tuple[str, list[Chart]]]) -> bytes:
    shapes, top = [], MARGIN
    for title, drawn in cells:
        pictures = [render_svg(chart) for chart in drawn]
        height = max(int(re.findall(r'viewBox="0 0 \d+ (\d+)"', picture)[0]) for picture in pictures)
        shapes.append(f'<text x="{MARGIN}" y="{top + 12}" font-size="15">{escape(title)}</text>')
        for place, (chart, picture) in enumerate(zip(drawn, pictures, strict=True)):
            left = MARGIN + place * (WIDTH + MARGIN)
            shapes.append(f'<text x="{left}" y="{top + TITLE + 8}" font-size="13" opacity="0.7">{chart.title}</text>')
            shapes.append(
                picture.replace(
                    "<svg ", f'<svg x="{left}" y="{top + TITLE + 14}" width="{WIDTH}" height="{height}" ', 1
                )
            )
        top += height + TITLE + 14 + MARGIN
    width = MARGIN + 2 * (WIDTH + MARGIN)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" role="img" '
        f'aria-label="Test loss and accuracy of training methods over example-forwards" font-family="system-ui, sans-serif">'
        f'<rect width="{width}" height="{top}" rx="10" fill="#ffffff"/>'
    )
    return "\n".join([head, *shapes, "</svg>\n"]).encode()


def _to_png(cells: list[tuple[str, list[Chart]]]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8 * len(cells)), layout="constrained")
    rows: Any = figure.subplots(len(cells), 2, squeeze=False)
    for axes, (title, drawn) in zip(rows, cells, strict=True):
        for each, chart in zip(axes, drawn, strict=True):
            draw_chart(each, dataclasses.replace(chart, title=f"{title}\n{chart.title}"))
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=144)
    return out.getvalue()
