"""Progress on standard error: a live line in a terminal, a plain line per evaluation elsewhere, nothing when told so."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Observer = Callable[[str, dict[str, Any]], None]


@contextlib.contextmanager
def display(quiet: bool = False) -> Iterator[Observer]:
    """An observer of a run's events; the terminal is tidy again when the context ends."""
    if sys.stderr.isatty() and not quiet:
        with _live() as observe:
            yield observe
    else:
        yield _Plain()


def headline(values: dict[str, Any]) -> str:
    """What is about to happen."""
    trained, total = values["trained_parameters"], values["parameters"]
    where = f"on {values['device']}" + (
        f" ({values['threads']} thread{'s' * (values['threads'] > 1)})" if values["device"] == "cpu" else ""
    )
    where += f", {values['workers']} workers" if values.get("workers") else ""
    return (
        f"training {values['space']}: {trained:,} values of a {total:,}-parameter model, {values['train']} examples, "
        f"lr {values['lr']:g}, eps {values['eps']:g}, {where}; writing {values['out']}"
    )


def sentence(event: str, values: dict[str, Any]) -> str:
    """One plain line for events worth one."""
    match event:
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


class _Plain:
    """A line per evaluation, with the rate of steps."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first: int | None = None
        self.last = 0

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        if event == "step":
            if self.first is None:
                self.first, self.began = values["step"], time.monotonic()
            self.last = values["step"]
        elif text := sentence(event, values):
            rate = ""
            if event == "evaluation" and self.first is not None and self.last > self.first:
                rate = f"  {(self.last - self.first) / (time.monotonic() - self.began):.1f} steps/s"
            print(text + rate, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _live() -> Iterator[Observer]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]}  dev {task.fields[dev]}  zero slopes {task.fields[zero]}"),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        state: dict[str, Any] = {"bar": None, "loss": None, "zero": 0, "seen": 0, "began": time.monotonic()}

        def observe(event: str, values: dict[str, Any]) -> None:
            if event == "start":
                state["bar"] = bars.add_task(
                    "", total=values["steps"], completed=values["step"], rate="", loss="…", dev="…", zero="…"
                )
                state["began"] = time.monotonic()
            if event == "step" and state["bar"] is not None:
                _advance(bars, state, values)
            if event == "evaluation" and state["bar"] is not None:
                bars.update(state["bar"], dev=f"{values['value']:.1%}")
            if text := sentence(event, values):
                console.print(text, markup=False)

        yield observe


def _advance(bars: Any, state: dict[str, Any], values: dict[str, Any]) -> None:
    state["seen"] += 1
    state["zero"] += all(slope == 0 for slope in values["slopes"])
    loss = values["loss"]
    state["loss"] = loss if state["loss"] is None else 0.98 * state["loss"] + 0.02 * loss
    rate = state["seen"] / max(1e-9, time.monotonic() - state["began"])
    bars.update(
        state["bar"],
        completed=values["step"] + 1,
        rate=f"{rate:.1f} steps/s",
        loss=f"{state['loss']:.4f}",
        zero=f"{state['zero'] / state['seen']:.0%}",
    )
