"""Progress on standard error: a live line in a terminal, a plain line per evaluation elsewhere. Colour marks problems only."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mezzo.untrusted import printable, without_credentials

Observer = Callable[[str, dict[str, Any]], None]
# All other verdicts are red.
VERDICT_COLOURS = {"worked": "green", "unclear": "yellow", "not tested": "yellow"}
EVENT_LINES = {
    "encoding": "encoding {examples:,} training examples (--train-limit N takes fewer)",
    "zero-shot": "zero-shot {metric} {value:.1%}, calibrated {calibrated:.1%} (n={n})",
    "evaluation": "step {step:>6}  dev {metric} {value:.1%}  dev loss {loss:.4f}",
    "worker": "{text}",
    "warning": "warning: {text}",
}
# Columns of a terminal from which on there is room for a bar.
BAR_COLUMNS = 105
# Examples from which on encoding takes so long that it is announced.
ANNOUNCED_EXAMPLES = 100_000


def show_progress(plain: bool = False) -> contextlib.AbstractContextManager[Observer]:
    """An observer of a run's events; the terminal is tidy again when the context ends."""
    live = sys.stderr.isatty() and not plain
    return _live_line() if live else contextlib.nullcontext(_plain_lines())


def show_summary(run: Any) -> None:
    """The final table, with a coloured verdict in a terminal."""
    if not sys.stdout.isatty():
        print(printable(str(run)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in run.table():
        style = VERDICT_COLOURS.get(run.verdict.split(":")[0], "red") if name == "verdict" else ""
        table.add_row(name, printable(value), style=style)
    Console(highlight=False, markup=False).print(table)


def event_line(event: str, values: dict[str, Any]) -> str:
    """One plain line about an event; empty for those that are not shown."""
    if event == "start":
        return printable(_start_line(values))
    if event == "encoding" and values["examples"] < ANNOUNCED_EXAMPLES:
        return ""
    return printable(without_credentials(EVENT_LINES.get(event, "").format(**values)))


def _start_line(values: dict[str, Any]) -> str:
    trained, total = values["trained_parameters"], values["parameters"]
    where = f"on {values['device']}"
    where += f" ({_count(values['threads'], 'thread')})" if values["device"] == "cpu" else ""
    where += f", {_count(values['workers'], 'worker')}" if values.get("workers") else ""
    return (
        f"training {values['space']}: {trained:,} values of a {total:,}-parameter model, {values['train']} examples, "
        f"lr {values['lr']:g}, eps {values['eps']:g}, {where}; writing {values['out']}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


@dataclass
class RunStats:
    """Figures of the run so far: speed, time left, loss, share of zero slopes, memory."""

    total_steps: int = 0
    step: int = 0
    seen_steps: int = 0
    zero_slopes: int = 0
    loss: float | None = None
    memory_mib: int = 0
    started: float = field(default_factory=time.monotonic)

    def update(self, event: str, values: dict[str, Any]) -> None:
        if event == "start":
            self.total_steps, self.step = int(values["steps"]), int(values["step"])
        elif event == "step":
            if not self.seen_steps:
                self.started = time.monotonic()  # after the first step, which loads and warms up
            self.seen_steps += 1
            self.zero_slopes += all(slope == 0 for slope in values["slopes"])
            self.loss = values["loss"] if self.loss is None else 0.98 * self.loss + 0.02 * values["loss"]
            self.memory_mib, self.step = int(values.get("memory_mib", 0)), int(values["step"]) + 1

    @property
    def steps_per_second(self) -> float:
        return (self.seen_steps - 1) / max(1e-9, time.monotonic() - self.started) if self.seen_steps > 1 else 0.0

    @property
    def speed(self) -> str:
        return f"{self.steps_per_second:.1f} steps/s" if self.steps_per_second else ""

    @property
    def time_left(self) -> str:
        if not self.steps_per_second or self.step >= self.total_steps:
            return ""
        seconds = (self.total_steps - self.step) / self.steps_per_second
        return f"{seconds:.0f} s left" if seconds < 90 else f"{seconds / 60:.0f} min left"

    @property
    def zero_slope_share(self) -> str:
        return f"zero slopes {self.zero_slopes / self.seen_steps:.0%}" if self.seen_steps else "zero slopes …"

    @property
    def memory(self) -> str:
        return f"{self.memory_mib:,} MiB"

    def __str__(self) -> str:
        """What follows a plain evaluation line."""
        if self.loss is None:
            return ""
        parts = (f"loss {self.loss:.4f}", self.zero_slope_share, self.speed, self.time_left, self.memory)
        return "".join(f"  {part}" for part in parts if part)


def _plain_lines() -> Observer:
    """A line per event, evaluations with the figures so far."""
    stats = RunStats()

    def observe(event: str, values: dict[str, Any]) -> None:
        stats.update(event, values)
        if text := event_line(event, values):
            print(text + (str(stats) if event == "evaluation" else ""), file=sys.stderr, flush=True)

    return observe


@contextlib.contextmanager
def _live_line() -> Iterator[Observer]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False)
    bar = (BarColumn(bar_width=16),) if console.width >= BAR_COLUMNS else ()  # the figures say more than the bar
    with Progress(
        *bar, TextColumn("{task.fields[figures]}", markup=False), console=console, transient=True
    ) as progress:
        stats, dev = RunStats(), "…"
        line = progress.add_task("", total=None, figures="loading")

        def observe(event: str, values: dict[str, Any]) -> None:
            nonlocal dev
            stats.update(event, values)
            if event == "start":
                progress.update(line, total=values["steps"], completed=values["step"], figures="")
            elif event == "evaluation":
                dev = f"{values['value']:.1%}"
            elif event == "step":
                place, loss = f"{stats.step}/{stats.total_steps}", f"loss {stats.loss:.4f}"
                parts = (place, stats.speed, stats.time_left, loss, f"dev {dev}", stats.zero_slope_share, stats.memory)
                progress.update(line, completed=stats.step, figures="  ".join(filter(None, parts)))
            if text := event_line(event, values):
                console.print(text, markup=False, style="yellow" if event == "warning" else None)

        yield observe
