"""The end of `mezzo train`: figures, a curve, answers before and after, labels, and commands to go on with."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator

from mezzo.cli.progress import is_capable_terminal, say
from mezzo.drawing.text import draw_curve, shorten
from mezzo.runs.result import Run
from mezzo.runs.verdict import parse_verdict

COLOURS = {"good": 32, "neutral": 33, "bad": 31}
# Columns that names of the table take, and those at most that a label or an answer may take.
NAMES, LABEL = 23, 18


def show_summary(run: Run) -> None:
    """Everything about a finished run, on standard output."""
    width = max(40, min(120, shutil.get_terminal_size().columns))
    _show_table(run, width)
    for section in (_curve(run, width), _classes(run, width), _examples(run, width), _commands(run)):
        if lines := list(section):
            say("\n".join(["", *lines]))


def _show_table(run: Run, width: int) -> None:
    """The figures; a terminal gets a coloured verdict, wrapped."""
    terminal = is_capable_terminal(sys.stdout)
    coloured = terminal and not os.environ.get("NO_COLOR")
    for name, value in run.table()[:-1]:  # the last row is among the commands
        lines = (
            textwrap.wrap(value, width - NAMES, break_long_words=False, break_on_hyphens=False) if terminal else [value]
        )
        text = f"{name:<{NAMES - 1}} " + f"\n{'':<{NAMES}}".join(lines or [""])
        say(text, colour=COLOURS[parse_verdict(value).tone] if name == "verdict" and coloured else None)


def _curve(run: Run, width: int) -> Iterator[str]:
    if chart := run.chart():
        yield from draw_curve(chart, min(width, 72))


def _classes(run: Run, width: int) -> Iterator[str]:
    """The confusion matrix with recalls; of many labels only the lowest recalls."""
    if not run.classes:
        return
    labels, counts, recalls, matrix = (run.classes[key] for key in ("labels", "n", "recall", "confusion"))
    if matrix is None:
        known = sorted((recall, label, n) for recall, label, n in zip(recalls, labels, counts, strict=True) if n)
        yield f"the lowest recalls of {len(labels)} labels"
        yield from (f"  {recall:>6.1%}  {shorten(label, LABEL)} (n={n})" for recall, label, n in known[:5])
        return
    first = max(len("right label"), *(min(len(label), LABEL) for label in labels))
    room = (width - first - 9) // len(labels) - 2
    digits = max(len(f"{count}") for row in matrix for count in row)
    names = [shorten(label, max(digits, min(LABEL, room))) for label in labels]
    columns = [max(digits, len(name)) for name in names]
    head = "".join(f"  {name:>{size}}" for name, size in zip(names, columns, strict=True))
    yield f"{'right label':<{first}}{head}   recall  (columns: what was predicted)"
    for label, row, recall in zip(labels, matrix, recalls, strict=True):
        cells = "".join(f"  {count:>{size}}" for count, size in zip(row, columns, strict=True))
        share = f"{recall:.1%}" if recall is not None else "–"
        yield f"{shorten(label, LABEL):<{first}}{cells}   {share:>6}"


def _examples(run: Run, width: int) -> Iterator[str]:
    if not run.examples:
        return
    better, worse = ("improved", "worsened") if "rewards" in run.examples[0] else ("corrected", "broke")
    yield (
        f"{len(run.examples)} of {run.n_test:,} {run.tested_on} examples before → after training "
        f"(it {better} {run.corrected:,} and {worse} {run.broken:,})"
    )
    before, after = ([shorten(row[key], LABEL) for row in run.examples] for key in ("before", "after"))
    sizes = [max(map(len, names)) for names in (before, after)]
    for row, old, new in zip(run.examples, before, after, strict=True):
        rewards = " → ".join(f"{reward:.2g}" for reward in row.get("rewards", ()))
        answer = f"  {old:<{sizes[0]}} → {new:<{sizes[1]}}  {rewards or ('right' if row['right_after'] else 'wrong')}  "
        yield answer + shorten(" / ".join(map(str, row["fields"].values())), max(12, width - len(answer)))


def _commands(run: Run) -> Iterator[str]:
    out = shlex.quote(run.out)
    yield "go on with"
    yield f"  echo {shlex.quote(_own_row(run))} | mezzo predict {out}"
    yield f"  mezzo report {out}"
    yield "  mezzo train --train YOUR.csv"


def _own_row(run: Run) -> str:
    """What a user would type to `mezzo predict`: a text, or an object where the task has several columns."""
    if len(run.columns) < 2:
        return "A sentence of your own."
    return json.dumps(dict.fromkeys(run.columns, "…"), ensure_ascii=False)
