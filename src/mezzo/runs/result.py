"""The result of a run, as values, as a table, and in a notebook."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from mezzo.drawing import Chart, Series, render_svg
from mezzo.drawing.figure import make_figure
from mezzo.errors import ConfigError
from mezzo.evaluation.figures import format_figure, format_perplexity, is_reward_metric
from mezzo.journal.content import NAME as JOURNAL
from mezzo.runs.folder import Folder


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run. `value`, `interval`, `majority` and the calibrated and zero-shot figures are of `metric`, as
    fractions of one."""

    out: str
    steps: int
    metric: str = "accuracy"
    value: float | None = None
    calibrated: float | None = None
    """The value without the prompt's prior; None where answers are no labels."""
    accuracy: float | None = None
    interval: tuple[float, float] | None = None
    zero_shot: float | None = None
    zero_shot_calibrated: float | None = None
    majority: float | None = None
    """The figure of always answering the most frequent label."""
    perplexity: float | None = None
    """That of the held-out text at the tested step of a run on rewards."""
    zero_shot_perplexity: float | None = None
    best_step: int = 0
    tested_on: str = "test"
    n_test: int = 0
    task: str = ""
    columns: tuple[str, ...] = ()
    zero_slope_share: float = 0.0
    skipped_steps: int = 0
    failed_rewards: int = 0
    """Texts of training whose reward could not be computed."""
    failed_test_rewards: int = 0
    """The same of the texts that the tested checkpoint wrote."""
    digest: str = ""
    seconds: float = 0.0
    example_forwards: int = 0
    """Forward passes of training times the examples in each."""
    moves: int | None = None
    """Steps of `--method solve` that moved the weights."""
    stopped: str = ""
    warnings: tuple[str, ...] = field(default=())
    workers: dict[str, Any] | None = None
    """Statistics of parallel workers: their number, bytes exchanged, share of time spent waiting, workers lost."""
    verdict: str = ""
    memory_mib: int = 0
    curve: tuple[dict[str, float], ...] = ()
    """The evaluations on dev: `step`, `example_forwards`, `value` and `loss` of each."""
    corrected: int | None = None
    broken: int | None = None
    """Test examples that were answered wrongly before training and rightly after it, and the reverse; of rewards, those that
    rose and those that fell."""
    examples: tuple[dict[str, Any], ...] = ()
    """A few test examples with the answers before and after."""
    classes: dict[str, Any] | None = None
    """By label: examples, recall, and the confusion matrix, whose rows are the right labels."""

    @property
    def journal(self) -> Path:
        return Path(self.out) / JOURNAL

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in self.__slots__}

    def __str__(self) -> str:
        return "\n".join(f"{name:<22} {value}" for name, value in self.table())

    __repr__ = __str__

    def table(self) -> list[tuple[str, str]]:
        """The summary as (name, figure) rows."""
        rows = [("run", self.out), ("steps", f"{self.steps} ({self.stopped})")]
        if self.value is not None:
            low, high = self.interval or (self.value, self.value)
            at = "" if self.best_step == self.steps else f", at step {self.best_step}"
            shown, low_shown, high_shown = (format_figure(each, self.metric) for each in (self.value, low, high))
            figure = f"{shown}  95% [{low_shown}, {high_shown}], n={self.n_test}{at}"
            baselines = (
                ("zero-shot", self.zero_shot),
                ("calibrated zero-shot", self.zero_shot_calibrated),
                ("majority class", self.majority),
            )
            rows += [(name, format_figure(value, self.metric)) for name, value in baselines if value is not None]
            rows.append((f"{self.tested_on} {self.metric}", figure))
            rows += self._perplexity_rows()
            rows += [] if self.calibrated is None else [("the same, calibrated", f"{self.calibrated:.1%}")]
        if self.moves is None:
            rows.append(("zero slopes", f"{self.zero_slope_share:.1%} of steps"))
        else:
            rows.append(("moves", f"{self.moves} of {self.steps} steps moved the weights"))
        if self.skipped_steps:
            rows.append(("skipped steps", str(self.skipped_steps)))
        if self.failed_rewards or self.failed_test_rewards:
            tested = f", and {self.failed_test_rewards:,} of {self.tested_on}" if self.failed_test_rewards else ""
            rows.append(("failed rewards", f"{self.failed_rewards:,} of {self.example_forwards:,} texts{tested}"))
        rows.append(("time", f"{self.seconds:.0f} s, {self.example_forwards:,} example-forwards"))
        if self.workers:
            rows.append(("workers", _workers_row(self.workers)))
        rows += [("memory", f"{self.memory_mib:,} MiB at most")] if self.memory_mib else []
        rows.append(("digest", self.digest[:16]))
        rows += [("verdict", self.verdict)] if self.verdict else []
        return [*rows, ("report", f"mezzo report {shlex.quote(self.out)}")]

    def _perplexity_rows(self) -> list[tuple[str, str]]:
        if self.perplexity is None or self.zero_shot_perplexity is None:
            return []
        before, tested = map(format_perplexity, (self.zero_shot_perplexity, self.perplexity))
        return [("held-out perplexity", f"{before} before training, {tested} at step {self.best_step}")]

    def chart(self) -> Chart | None:
        """The dev figure over example-forwards; None with fewer than two evaluations."""
        return dev_chart(self.curve, self.metric)

    def plot(self) -> Any:
        """The curve as a matplotlib Figure."""
        chart = self.chart()
        if chart is None:
            raise ConfigError("there is no curve to plot: the run has fewer than two evaluations on dev")
        return make_figure(chart)

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row per step, and the dev figures of the steps after which there was an evaluation."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_frame() needs pandas, which is not installed: pip install pandas") from None
        rows: dict[int, dict[str, Any]] = {}
        left_out = ("event", "step", "slopes", "spent", "forwards", *(() if self.moves is None else ("lr",)))
        for entry in Folder(Path(self.out)).metrics():
            row = {"example_forwards": entry.get("spent")}
            if entry.get("event") == "step":  # its row has the position after it
                row |= {name: _number(value) for name, value in entry.items() if name not in left_out}
                rows.setdefault(int(entry["step"]) + 1, {}).update(row)
            elif entry.get("event") == "evaluation":
                row |= {f"dev_{entry['metric']}": _number(entry["value"]), "dev_loss": _number(entry["loss"])}
                rows.setdefault(int(entry["step"]), {}).update(row)
        return pandas.DataFrame.from_dict(dict(sorted(rows.items())), orient="index").rename_axis("step")

    def _repr_html_(self) -> str:
        """The table and the curve for a notebook."""
        chart = self.chart()
        return html_table(self.table()) + (html_figure(chart) if chart else "")


def read_curve(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], ...]:
    """The evaluations on dev, from a run's metrics; a line that was edited by hand is left out."""
    found = [
        {"step": e.get("step"), "example_forwards": e.get("spent"), "value": e.get("value"), "loss": e.get("loss")}
        for e in events
        if e.get("event") == "evaluation"
    ]
    return tuple(point for point in found if all(isinstance(value, (int, float)) for value in point.values()))  # type: ignore[misc]


def dev_chart(curve: Any, metric: str) -> Chart | None:
    """The dev figure over example-forwards; None with fewer than two evaluations."""
    if len(curve) < 2:
        return None
    x, y = ([point[key] for point in curve] for key in ("example_forwards", "value"))
    line = Series("dev", x, y, markers=True)
    return Chart("dev", f"dev {metric}", (line,), x_label="example-forwards", percent=not is_reward_metric(metric))


def html_table(rows: list[tuple[str, str]]) -> str:
    cells = (
        f"<tr><th style='text-align:left'>{escape(a)}</th><td style='text-align:left'>{escape(b)}</td></tr>"
        for a, b in rows
    )
    return f"<table>{''.join(cells)}</table>"


def html_figure(chart: Chart) -> str:
    return f"<figure style='max-width:440px'><figcaption>{escape(chart.title)}</figcaption>{render_svg(chart)}</figure>"


def _number(value: Any) -> Any:
    """A number that a line of metrics holds as text, because JSON has none that are not finite."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def _workers_row(workers: dict[str, Any]) -> str:
    kilobytes, waiting = workers["bytes_per_step"] / 1000, workers["waiting"]
    row = f"{workers['count']}: {kilobytes:.1f} kB a step, waiting {waiting:.0%} of their time"
    for name, word in (("lost", "lost and replaced"), ("rebuilt", "rebuilt because they differed")):
        row += f"; {workers[name]} {word}" if workers[name] else ""
    return row
