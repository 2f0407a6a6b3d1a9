"""Progress on standard error: a live line in a terminal, a plain line per evaluation elsewhere. Colour marks trouble only."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Observer = Callable[[str, dict[str, Any]], None]
TONES = {"worked": "green", "unclear": "yellow", "not tested": "yellow"}
"""Colours of verdicts; all others are red."""


WIDE = 105
"""Columns of a terminal from which on there is room for a bar."""
MANY = 100_000
"""Examples whose encoding takes so long that it is announced."""


@contextlib.contextmanager
def display(quiet: bool = False) -> Iterator[Observer]:
    """An observer of a run's events; the terminal is tidy again when the context ends."""
    if sys.stderr.isatty() and not quiet:
        with _live() as observe:
            yield observe
    else:
        yield _Plain()


def show_summary(run: Any) -> None:
    """The final table, its verdict in colour where there is a terminal."""
    if not sys.stdout.isatty():
        print(run)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in run.table():
        style = TONES.get(run.verdict.split(":")[0], "red") if name == "verdict" else ""
        table.add_row(name, value, style=style)
    Console(highlight=False, markup=False).print(table)


def headline(values: dict[str, Any]) -> str:
    """What is about to happen."""
    trained, total = values["trained_parameters"], values["parameters"]
    where = f"on {values['device']}" + (
        f" ({values['threads']} thread{'s' * (values['threads'] > 1)})" if values["device"] == "cpu" else ""
    )
    where += f", {count} worker{'s' * (count > 1)}" if (count := values.get("workers")) else ""
    return (
        f"training {values['space']}: {trained:,} values of a {total:,}-parameter model, {values['train']} examples, "
        f"lr {values['lr']:g}, eps {values['eps']:g}, {where}; writing {values['out']}"
    )


def sentence(event: str, values: dict[str, Any]) -> str:
    """One plain line for events worth one."""
    match event:
        case "encoding" if values["examples"] >= MANY:
            return f"encoding {values['examples']:,} training examples (--train-limit N takes fewer)"
        case "start":
            return headline(values)
        case "zero-shot":
            return f"zero-shot {values['metric']} {values['value']:.1%}, calibrated {values['calibrated']:.1%} (n={values['n']})"
        case "evaluation":
            return (
                f"step {values['step']:>6}  dev {values['metric']} {values['value']:.1%}  dev loss {values['loss']:.4f}"
            )
        case "worker":
            return values["text"]
        case "warning":
            return f"warning: {values['text']}"
    return ""


@dataclass
class Pace:
    """What is known of the run so far: how fast it is, how long it will take, how the loss and the slopes are."""

    total: int = 0
    seen: int = 0
    zero: int = 0
    loss: float | None = None
    memory: int = 0
    last: int = 0
    began: float = field(default_factory=time.monotonic)

    def see(self, event: str, values: dict[str, Any]) -> None:
        if event == "start":
            self.total, self.last = int(values["steps"]), int(values["step"])
        elif event == "step":
            if not self.seen:
                self.began = time.monotonic()  # of the end of the first step, which loads and warms
            self.seen += 1
            self.zero += all(slope == 0 for slope in values["slopes"])
            self.loss = values["loss"] if self.loss is None else 0.98 * self.loss + 0.02 * values["loss"]
            self.memory, self.last = int(values.get("memory_mib", 0)), int(values["step"]) + 1

    @property
    def rate(self) -> float:
        return (self.seen - 1) / max(1e-9, time.monotonic() - self.began) if self.seen > 1 else 0.0

    @property
    def left(self) -> str:
        if not self.rate or self.last >= self.total:
            return ""
        seconds = (self.total - self.last) / self.rate
        return f"{seconds:.0f} s left" if seconds < 90 else f"{seconds / 60:.0f} min left"

    @property
    def speed(self) -> str:
        return f"{self.rate:.1f} steps/s" if self.rate else ""

    @property
    def zero_share(self) -> str:
        return f"{self.zero / self.seen:.0%}" if self.seen else "…"

    def __str__(self) -> str:
        """Behind a plain evaluation line."""
        if self.loss is None:
            return ""
        parts = [
            f"loss {self.loss:.4f}",
            f"zero slopes {self.zero_share}",
            self.speed,
            self.left,
            f"{self.memory:,} MiB",
        ]
        return "".join(f"  {part}" for part in parts if part)


class _Plain:
    """A line per evaluation, with the pace."""

    def __init__(self) -> None:
        self.pace = Pace()

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        self.pace.see(event, values)
        if text := sentence(event, values):
            print(text + (str(self.pace) if event == "evaluation" else ""), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _live() -> Iterator[Observer]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False)
    bar_if_wide = (BarColumn(bar_width=16),) if console.width >= WIDE else ()  # the figures say more than the bar
    columns = (*bar_if_wide, TextColumn("{task.fields[now]}", markup=False))
    with Progress(*columns, console=console, transient=True) as bars:
        pace, dev = Pace(), ["…"]
        bar = bars.add_task("", total=None, now="loading")

        def observe(event: str, values: dict[str, Any]) -> None:
            pace.see(event, values)
            if event == "start":
                bars.update(bar, total=values["steps"], completed=values["step"], now="")
            if event == "evaluation":
                dev[0] = f"{values['value']:.1%}"
            if event == "step":
                loss = "…" if pace.loss is None else f"{pace.loss:.4f}"
                place = f"{pace.last}/{pace.total}"
                facts = (
                    place,
                    pace.speed,
                    pace.left,
                    f"loss {loss}",
                    f"dev {dev[0]}",
                    f"zero slopes {pace.zero_share}",
                )
                bars.update(bar, completed=pace.last, now="  ".join(filter(None, (*facts, f"{pace.memory:,} MiB"))))
            if text := sentence(event, values):
                console.print(text, markup=False, style="yellow" if event == "warning" else None)

        yield observe
