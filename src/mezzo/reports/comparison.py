"""Several runs as a table: the options that differ, and figures with mean and deviation over seeds."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mezzo.config import OPTIONS
from mezzo.errors import JournalError, MezzoWarning
from mezzo.evaluation.figures import format_figure, is_reward_metric
from mezzo.journal.atomic_files import explain_os_errors, json_safe
from mezzo.journal.content import NAME as JOURNAL
from mezzo.reports.html import plain_text
from mezzo.reports.metrics import finite_number
from mezzo.reports.run_data import RunData, read_run
from mezzo.runs.folder import Folder, holds_run
from mezzo.untrusted import printable

# Runs that differ only in these have the same setting.
SEEDS = ("seed", "data_seed")
# What does not change what is learned: the folder, and the machine.
IRRELEVANT = {
    *("out", "track", "snapshot_minutes"),
    *(name for name, option in OPTIONS.items() if option.group == "workers" or option.reopen == "machine"),
} - {"model", "engine"}
# Folders between the one that is named and a run.
MAX_DEPTH = 3
MAX_CHARACTERS = 60


@dataclass(frozen=True)
class Setting:
    """Runs that differ in nothing but their seeds."""

    options: Mapping[str, str]
    """Those in which it differs from other settings."""
    runs: Sequence[RunData]

    @property
    def name(self) -> str:
        """Of several options the values alone, as the table has them: a legend has little room."""
        if len(self.options) == 1:
            return "".join(f"{name}={value or '–'}" for name, value in self.options.items())
        return ", ".join(value or "–" for value in self.options.values()) or "all runs"

    @cached_property
    def figures(self) -> list[float]:
        """The tested figure of every finished run."""
        return [run.metrics.final.value for run in self.runs if run.metrics.final]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.figures) if self.figures else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over seeds; runs of one seed say nothing about chance."""
        seeds = {tuple(_text(run.config.get(name)) for name in SEEDS) for run in self.runs if run.metrics.final}
        return statistics.stdev(self.figures) if len(seeds) > 1 else None

    @property
    def figure(self) -> str:
        if self.mean is None:
            return "–"
        if is_reward_metric(self.runs[0].metric):
            return f"{self.mean:.4g}" + (f" ± {self.deviation:.2g}" if self.deviation is not None else "")
        return f"{100 * self.mean:.1f}" + (f" ± {100 * self.deviation:.1f}" if self.deviation is not None else "") + "%"

    def show(self, value: float | None) -> str:
        """A figure of its runs as text."""
        return "–" if value is None else format_figure(value, self.runs[0].metric)

    @property
    def zero_shot(self) -> float | None:
        found = [run.metrics.zero_shot.value for run in self.runs if run.metrics.zero_shot]
        return statistics.fmean(found) if found else None

    @property
    def finished(self) -> str:
        done = len(self.figures)
        return str(done) if done == len(self.runs) else f"{done} of {len(self.runs)}"

    def to_dict(self) -> dict[str, Any]:
        facts = {"runs": len(self.runs), "finished": len(self.figures), "metric": self.runs[0].metric}
        figures = {"mean": self.mean, "deviation": self.deviation, "zero_shot": self.zero_shot}
        return {"options": dict(self.options), **facts, **figures, "values": list(self.figures)}


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs beside each other."""

    runs: Sequence[RunData]

    @cached_property
    def differing(self) -> dict[str, list[str]]:
        """The options in which the runs differ, seeds aside, with every run's value."""
        names = dict.fromkeys(name for run in self.runs for name in run.config)
        # A run from before an option existed had what is now its default.
        usual = {name: option.default for name, option in OPTIONS.items()}
        values = {name: [_text(run.config.get(name, usual.get(name))) for run in self.runs] for name in names}
        left_out = {*SEEDS, *IRRELEVANT}
        found = {name: texts for name, texts in values.items() if name not in left_out and len(set(texts)) > 1}
        return {name: _shorten(texts) for name, texts in found.items()}

    @cached_property
    def settings(self) -> list[Setting]:
        """The best first."""
        groups: dict[tuple[str, ...], list[RunData]] = {}
        for number, run in enumerate(self.runs):
            groups.setdefault(tuple(texts[number] for texts in self.differing.values()), []).append(run)
        found = [Setting(dict(zip(self.differing, values, strict=True)), runs) for values, runs in groups.items()]
        return sorted(found, key=lambda setting: (setting.mean is None, -(setting.mean or 0.0)))

    @property
    def metric(self) -> str:
        names = {run.metric for run in self.runs}
        return names.pop() if len(names) == 1 else "figure"

    def options_of(self, run: RunData) -> dict[str, str]:
        number = next(n for n, each in enumerate(self.runs) if each is run)
        return {name: texts[number] for name, texts in self.differing.items()}

    def rows(self) -> list[dict[str, Any]]:
        """A row per run: its differing options and its figures."""
        return [{"run": str(run.path), **self.options_of(run), **_figures(run)} for run in self.runs]

    def to_dict(self) -> dict[str, Any]:
        return {"settings": [setting.to_dict() for setting in self.settings], "runs": self.rows()}

    def to_csv(self) -> str:
        rows, text = self.rows(), io.StringIO()
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
        return text.getvalue()

    def to_json(self) -> str:
        return json.dumps(json_safe(self.to_dict()), indent=2) + "\n"

    def __str__(self) -> str:
        """The settings as a table, the best first."""
        head = [*self.differing, "runs", self.metric, "zero-shot"]
        body = [[*s.options.values(), s.finished, s.figure, s.show(s.zero_shot)] for s in self.settings]
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        lines = ["  ".join(f"{t:<{w}}" for t, w in zip(row, widths, strict=True)).rstrip() for row in (head, *body)]
        seeds = any(setting.deviation is not None for setting in self.settings)
        return "\n".join([*lines, *(["± is the standard deviation over seeds"] if seeds else [])])

    __repr__ = __str__


def compare(paths: Sequence[str | Path]) -> Comparison:
    """The runs of these folders, and of the folders in them. One that is damaged must not hide the others beside it."""
    named, found, damaged = set(map(Path, paths)), [], ""
    for path in find_runs(paths):
        try:
            found.append(read_run(path))
        except (JournalError, OSError) as error:
            if path in named:
                raise
            damaged = str(error)
            warnings.warn(f"left out: {damaged}", MezzoWarning, stacklevel=2)
    if not found:
        raise JournalError(damaged)
    if len({run.name for run in found}) == len(found):
        return Comparison(found)
    whole = [run.path.resolve() for run in found]
    above = os.path.commonpath([path.parent for path in whole])
    return Comparison([replace(run, label=str(p.relative_to(above))) for run, p in zip(found, whole, strict=True)])


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """The run folders among and below these; a folder without any is an error."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        with explain_os_errors(path):
            inside = [path] if _is_run(path) else _runs_in(path, MAX_DEPTH)
        if not inside:
            Folder.open(path)  # says what is wrong with it
            raise JournalError(f"{path} holds no runs")
        found |= dict.fromkeys(inside)
    return list(found)


def _is_run(path: Path) -> bool:
    return path.name == JOURNAL or (path / JOURNAL).is_file()


def _runs_in(path: Path, depth: int) -> list[Path]:
    """The runs below a folder that can be read."""
    if not path.is_dir() or depth == 0:
        return []
    inside = sorted(each for each in path.iterdir() if not each.name.startswith("."))
    return [run for each in inside for run in _runs_at(each, depth - 1)]


def _runs_at(path: Path, depth: int) -> list[Path]:
    """The run in this folder, or those below it. One that cannot be read must not hide the others."""
    try:
        if path.is_symlink() or not path.is_dir():
            return []
        return [path] if holds_run(path) else _runs_in(path, depth)
    except (JournalError, OSError) as error:
        warnings.warn(f"left out: {error}", MezzoWarning, stacklevel=2)
        return []


def _figures(run: RunData) -> dict[str, Any]:
    metrics, final, best = run.metrics, run.metrics.final, run.best
    low, high = final.interval if final else (None, None)
    return {
        "seed": _text(run.config.get("seed")),
        "verdict": run.verdict.word,
        "metric": run.metric,
        "value": final.value if final else None,
        "low": low,
        "high": high,
        "calibrated": final.calibrated if final else None,
        "zero_shot": metrics.zero_shot.value if metrics.zero_shot else None,
        "zero_shot_calibrated": metrics.zero_shot.calibrated if metrics.zero_shot else None,
        "majority": metrics.majority,
        "best_dev": best.value if best else None,
        "best_step": (final or best).step if final or best else None,  # type: ignore[union-attr]
        "steps": run.steps,
        "example_forwards": run.spent,
        "seconds": finite_number(metrics.result.get("seconds")),
        "memory_mib": metrics.peak_memory,
    }


def _text(value: Any) -> str:
    return printable(f"{value:g}" if isinstance(value, float) else plain_text(value))


def _shown(text: str) -> str:
    if named := re.match(r'\{"name": "([^"\\]{1,50})"', text):
        return named[1]
    half = MAX_CHARACTERS // 2 - 1
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]}…{text[-half:]}"


def _shorten(texts: Sequence[str]) -> list[str]:
    """Tasks by their name, other long values without their middle; those that then look alike are numbered."""
    short = {text: _shown(text) for text in texts}
    alike = {text: [other for other in short if short[other] == short[text]] for text in short}
    return [short[t] + (f" ({alike[t].index(t) + 1})" if len(alike[t]) > 1 else "") for t in texts]


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets a quote before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
