"""The result of a run, as values and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from mezzo.journal.journal import NAME as JOURNAL


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run. `value`, `interval` and both zero-shot figures are of `metric`, as fractions of one."""

    out: str
    steps: int
    metric: str = "accuracy"
    value: float | None = None
    accuracy: float | None = None
    interval: tuple[float, float] | None = None
    zero_shot: float | None = None
    zero_shot_calibrated: float | None = None
    best_step: int = 0
    tested_on: str = "test"
    n_test: int = 0
    zero_slope_share: float = 0.0
    skipped_steps: int = 0
    digest: str = ""
    seconds: float = 0.0
    example_forwards: int = 0
    """Forward passes of training times the examples in each."""
    moves: int | None = None
    """Steps of `--method solve` whose move helped and was taken."""
    stopped: str = ""
    warnings: tuple[str, ...] = field(default=())
    workers: dict[str, Any] | None = None
    """Statistics of parallel workers: their number, bytes exchanged, share of time spent waiting, workers lost."""
    verdict: str = ""
    memory_mib: int = 0

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
            for name, value in (("zero-shot", self.zero_shot), ("calibrated zero-shot", self.zero_shot_calibrated)):
                rows += [(name, f"{value:.1%}")] if value is not None else []
            at = "" if self.best_step == self.steps else f", at step {self.best_step}"
            rows.append(
                (
                    f"{self.tested_on} {self.metric}",
                    f"{self.value:.1%}  95% [{low:.1%}, {high:.1%}], n={self.n_test}{at}",
                )
            )
        if self.moves is None:
            rows.append(("zero slopes", f"{self.zero_slope_share:.1%} of steps"))
        else:
            rows.append(("moves", f"{self.moves} of {self.steps} steps found one that helped"))
        if self.skipped_steps:
            rows.append(("skipped steps", str(self.skipped_steps)))
        rows.append(("time", f"{self.seconds:.0f} s, {self.example_forwards:,} example-forwards"))
        if self.workers:
            rows.append(("workers", _workers_row(self.workers)))
        rows += [("memory", f"{self.memory_mib:,} MiB at most")] if self.memory_mib else []
        rows.append(("digest", self.digest[:16]))
        rows += [("verdict", self.verdict)] if self.verdict else []
        return [*rows, ("report", f"mezzo report {self.out}")]

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        rows = (f"<tr><th style='text-align:left'>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in self.table())
        return f"<table>{''.join(rows)}</table>"


def _workers_row(workers: dict[str, Any]) -> str:
    kilobytes, waiting = workers["bytes_per_step"] / 1000, workers["waiting"]
    row = f"{workers['count']}: {kilobytes:.1f} kB a step, waiting {waiting:.0%} of their time"
    for name, word in (("lost", "lost and replaced"), ("rebuilt", "rebuilt because they differed")):
        row += f"; {workers[name]} {word}" if workers[name] else ""
    return row
