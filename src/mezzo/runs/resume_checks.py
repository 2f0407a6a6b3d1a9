"""What a resumed run must have in common with its beginning."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mezzo.config import OPTIONS, RunConfig, convert, option_names, unnamed_options
from mezzo.errors import ConfigError, DataError, JournalError
from mezzo.evaluation.rewards import Reward
from mezzo.journal.header import Header
from mezzo.method import noise, rounding
from mezzo.method.objectives import ObjectiveFunction
from mezzo.method.optimizers import schedule
from mezzo.runs.folder import Folder
from mezzo.runs.setup import Setup
from mezzo.untrusted import without_credentials

# What may change when a run goes on: its limits and its machine.
RESUMABLE = option_names(resumable=True)
# What must be named again where it contacts other machines.
CONTACTING = tuple(name for name, option in OPTIONS.items() if option.contacts)
# Share of the peak learning rate from which on a change of the schedule is announced.
SMALL_JUMP = 0.02
# The user's own objective, given in Python.
Function = ObjectiveFunction | Reward


def check_same_data(header: Header, setup: Setup) -> None:
    """A resumed run must have the same rate, and see the same noise, rounding and data."""
    if setup.config.lr == "auto":  # a run records the rate that it found
        raise JournalError("the journal does not say the learning rate: the run can be verified, but not continued")
    if header.noise != noise.VERSION:
        raise JournalError(f"the run uses noise {header.noise!r}; this mezzo makes {noise.VERSION!r}")
    if setup.config.dtype in rounding.DTYPES and header.rounding != rounding.VERSION:
        raise JournalError(f"the run rounds by {header.rounding!r}; this mezzo by {rounding.VERSION!r}")
    if header.data != setup.data_digest:
        raise JournalError("the training data has changed since the run began; restore it, or start a new run")


def refuse_missing_data(config: RunConfig, folder: Folder) -> None:
    """Data that has moved can be named; its digest says whether it is the same."""
    for name in ("train", "dev", "test"):
        source = getattr(config, name)
        if source and not source.startswith("hub:") and not Path(source).exists():
            command = f"mezzo train --resume {shlex.quote(str(folder.path))} --{name} {OPTIONS[name].placeholder}"
            raise DataError(
                f"the {name} data of this run is not at {source} any more; where it has moved to: {command}"
            )


def check_same_counts(earlier: Iterable[dict[str, Any]], setup: Setup, changes: dict[str, Any]) -> None:
    """Dev and test data from another place have no digest, but must at least have as many examples."""
    started = next((event for event in earlier if event.get("event") == "start"), {})
    splits = setup.splits
    for name, examples in (("dev", splits.dev), ("test", splits.test if splits.has_test else ())):
        before = started.get(name, len(examples))
        if name in changes and "eval_limit" not in changes and before != len(examples):
            raise JournalError(
                f"--{name} has {len(examples)} examples, and the run began with {before}: give the same data"
            )


def describe_jump(config: RunConfig, planned: Any, step: int) -> str:
    """What is said of a learning rate that another number of steps changes in mid-run; empty if it stays."""
    if config.method not in ("spsa", "es") or not step or planned == config.steps:
        return ""
    assert config.schedule and config.lr is not None and config.steps
    rate = float(config.lr)
    before, now = (schedule(config.schedule, rate, steps, config.warmup)(step) for steps in (planned, config.steps))
    if abs(now - before) <= SMALL_JUMP * rate:
        return ""
    return (
        f"--steps {config.steps} instead of {planned} stretches the {config.schedule} schedule: from here on the learning rate "
        f"is {now:.3g}, where it would have been {before:.3g}"
    )


def describe_function(function: Callable[..., Any]) -> str:
    """How a Python function is recorded: it cannot be found again by name."""
    return f"<function {getattr(function, '__name__', type(function).__name__)}>"


def check_same_objective(recorded: str, function: Function | None, name: str | None) -> None:
    """The user's own function must be given again: a journal, which may be anybody's, must not choose what is imported."""
    given = describe_function(function) if function else name
    if recorded.startswith("<") and given != recorded:
        raise ConfigError(f"this run's objective was the Python {recorded[1:-1]}; pass it as objective= to resume")
    if given and given != recorded:
        raise ConfigError(f"this run's objective is {recorded!r}; a resumed run keeps it")
    if ":" in recorded and given is None:
        raise ConfigError(
            f"this run's objective is a function of your own; name it again to resume: --objective {recorded}"
        )


def check_named_again(remembered: dict[str, Any], given: dict[str, Any]) -> None:
    """What contacts other machines must be named again: a run folder, which may be anybody's, must not choose where prompts,
    weights and figures go, what is asked of the hub, nor whose Ray cluster sends code to this machine. Nor does it choose
    to start more processes than this machine has cores."""
    for option in unnamed_options(remembered, given):
        if option.contacts or option.exhausts:
            again = "name it again, or another, to resume" if option.resumable else "name it again to resume"
            used = without_credentials(f"{option.flag} {remembered[option.name]!r}")
            raise ConfigError(f"this run used {used}; {again}: {option.flag} {option.placeholder}")
    for name, value in given.items():
        fixed = name not in RESUMABLE or str(value).startswith("hub:")  # files move; a data set of the hub does not
        if fixed and convert(name, value) != remembered.get(name):
            raise ConfigError(f"a resumed run keeps its settings; {name} cannot change")
