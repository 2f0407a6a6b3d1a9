"""Progress on standard error: a live line in a terminal, plain lines elsewhere. Colour marks problems only."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from mezzo.drawing.text import fit_encoding
from mezzo.evaluation.figures import describe_failed, describe_loss, format_figure
from mezzo.runs.progress import RunProgress
from mezzo.untrusted import printable, without_credentials

Observer = Callable[[str, dict[str, Any]], None]
EVENT_LINES = {
    "proposal": "{text}",
    "data": "data: {text}",
    "range test": "{text}",
    "encoding": "encoding {examples:,} training examples (--train-limit N takes fewer)",
    "worker": "{text}",
    "warning": "warning: {text}",
}
# What a live line says until the next event; while steps are taken, it has figures.
DOING = {
    "start": "testing the untrained model",
    "zero-shot": "taking the first step",
    "step": "",
    "stopped": "testing the best checkpoint",
}
# Columns of a terminal from which on there is room for a bar.
BAR_COLUMNS = 105
# Examples from which on encoding takes so long that it is announced.
ANNOUNCED_EXAMPLES = 100_000
# Seconds after which a log gets a line even if nothing has happened.
QUIET_SECONDS = 60.0


def say(text: str, file: TextIO | None = None, colour: int | None = None) -> None:
    """Print for people: no passwords, nothing that a terminal obeys, only characters that the output can show."""
    file = file or sys.stdout
    shown = fit_encoding(_harmless(text), getattr(file, "encoding", None))
    print(shown if colour is None else f"\x1b[{colour}m{shown}\x1b[0m", file=file, flush=True)


def show_result(options: Namespace, text: str) -> None:
    """Print a result to standard output, or to standard error where a program reads the JSON."""
    say(text, sys.stderr if options.json else sys.stdout)


def _harmless(text: str) -> str:
    return printable(without_credentials(text))


def show_progress(plain: bool = False) -> contextlib.AbstractContextManager[Observer]:
    """An observer of a run's events; the terminal is tidy again when the context ends."""
    live = is_capable_terminal(sys.stderr) and not plain
    return _live_line() if live else contextlib.nullcontext(_plain_lines())


def is_capable_terminal(file: TextIO) -> bool:
    """Whether it is a terminal in which lines can be rewritten and coloured."""
    return file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def event_line(event: str, values: dict[str, Any]) -> str:
    """One plain line about an event; empty for those that are not shown."""
    if event == "start":
        return _harmless(_start_line(values))
    if event == "zero-shot":
        calibrated = "" if values["calibrated"] is None else f", calibrated {values['calibrated']:.1%}"
        figure, failed = format_figure(values["value"], values["metric"]), describe_failed(values.get("failed", 0))
        return f"zero-shot {values['metric']} {figure}{calibrated} (n={values['n']}{failed})"
    if event == "evaluation":
        step, metric, value, loss = (values[name] for name in ("step", "metric", "value", "loss"))
        figure = f"{format_figure(value, metric)}{describe_failed(values.get('failed', 0))}"
        return f"step {step:>6}  dev {metric} {figure}  {describe_loss(loss, metric, 'dev ')}"
    if event == "encoding" and values["examples"] < ANNOUNCED_EXAMPLES:
        return ""
    return _harmless(EVENT_LINES.get(event, "").format(**values))


def _start_line(values: dict[str, Any]) -> str:
    trained, total = values["trained_parameters"], values["parameters"]
    where = f"on {values['device']}"
    where += f" ({_count(values['threads'], 'thread')})" if values["device"] == "cpu" else ""
    where += f", {_count(values['workers'], 'worker')}" if values.get("workers") else ""
    return (
        f"training {values['space']}: {trained:,} values of a {total:,}-parameter model, {values['train']} examples, "
        f"{_method_words(values)}, {where}; writing {values['out']}"
    )


def _method_words(values: dict[str, Any]) -> str:
    if values["method"] == "adam":
        return f"AdamW with gradients, lr {values['lr']:g}"
    if values["method"] in ("spsa", "es"):
        return f"lr {values['lr']:g}, eps {values['eps']:g}"
    budget = f"{values['budget']:,.0f} example-forwards" if values["budget"] else "until moves stop helping"
    return f"solving for each move, {budget}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _plain_lines() -> Observer:
    """A line per event: of solve for every step, of other methods with the figures at evaluations, and at least one a minute."""
    progress, printed = RunProgress(), time.monotonic()

    def observe(event: str, values: dict[str, Any]) -> None:
        nonlocal printed
        progress(event, values)
        text = event_line(event, values)
        if event == "evaluation" and progress.method != "solve" and progress.seen_steps:
            text += f"  {progress.figures()}"
        elif event == "step" and (progress.method == "solve" or time.monotonic() - printed > QUIET_SECONDS):
            text = f"step {progress.step:>6}  {progress.place}  {progress.figures()}"
        if text:
            printed = time.monotonic()
            say(text, sys.stderr)

    return observe


@contextlib.contextmanager
def _live_line() -> Iterator[Observer]:
    """A spinner, a bar and figures, drawn anew ten times a second: a step may take long, and time left counts down."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    progress = RunProgress()

    class Figures(ProgressColumn):
        def render(self, task: Task) -> Text:
            figures = (progress.place, progress.dev_figure, progress.figures())
            text = fit_encoding(task.description or "  ".join(filter(None, figures)), console.encoding)
            return Text(text, no_wrap=True, overflow="crop")  # what matters most is on the left

    spinner = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line")
    bar = (BarColumn(bar_width=16),) if console.width >= BAR_COLUMNS else ()  # the figures say more than the bar
    with Progress(spinner, *bar, Figures(), console=console, transient=True) as live:
        line = live.add_task("loading", total=1.0)

        def observe(event: str, values: dict[str, Any]) -> None:
            progress(event, values)
            live.update(line, completed=progress.share, description=DOING.get(event))
            if text := event_line(event, values):
                console.print(
                    fit_encoding(text, console.encoding), markup=False, style="yellow" if event == "warning" else None
                )

        yield observe
