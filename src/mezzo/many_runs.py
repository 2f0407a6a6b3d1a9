"""Training several times, over seeds and the values of options, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mezzo import api, reports
from mezzo.config import flatten
from mezzo.errors import ConfigError
from mezzo.runs.events import Observer
from mezzo.runs.resolve import resolve_setup
from mezzo.runs.sweep import Sweep, continue_sweep, new_sweep, parse_grid
from mezzo.tasks import Task


def sweep(
    model: str | None = None,
    *,
    seeds: Sequence[int] = (),
    grid: Mapping[str, Sequence[Any]] | None = None,
    resume: str | Path | None = None,
    observe: Observer | None = None,
    **options: Any,
) -> reports.Comparison:
    """Train once for every combination of `seeds` and `grid`, such as `{"lr": [1e-6, 1e-5]}`, and compare the runs.

    The other arguments are those of `finetune`; `out` is the folder of all runs. A sweep that was interrupted goes on with the
    same call, or with `resume`; finished runs are not repeated.
    """
    found = open_sweep(model, seeds=seeds, grid=grid or {}, resume=resume, **options)
    for _, point in found.unfinished():
        if found.train(point, observe or reports.notebook_observer() or api.silent) == "interrupted":
            break
    return reports.compare([found.path])


def open_sweep(
    model: str | None = None,
    *,
    seeds: str | Sequence[int] | None = None,
    grid: Sequence[str] | Mapping[str, Sequence[Any]] = (),
    config: str | Path | None = None,
    resume: str | Path | None = None,
    objective: Any = None,
    task: str | Path | Mapping[str, Any] | Task | None = None,
    observe: Observer = api.silent,
    **options: Any,
) -> Sweep:
    """As `sweep`, but hands it out before its first run."""
    given, function = api.merge_options(model, task, objective, options)
    if resume is not None:
        if seeds or grid:
            raise ConfigError(
                f"the sweep in {resume} has its seeds and values already: leave them out to go on with it"
            )
        api.refuse_changes(given, config)
        return continue_sweep(resume, given, function)
    axes = parse_grid(seeds, grid)
    if not axes:
        raise ConfigError("a sweep needs values to go through: seeds, or options with their values")
    if both := sorted(set(given) & set(axes)):
        raise ConfigError(f"{both[0]} is given twice: once for all runs, and once in the sweep")
    first = {name: values[0] for name, values in axes.items()}
    values = api.prepare_options({**given, **first}, config, task, function, observe)
    setup = resolve_setup(api.resolve(values))  # mistakes of the model, the task and the options are found here
    shared = flatten({name: value for name, value in values.items() if name not in (*axes, "out")})
    return new_sweep(values.get("out"), f"{setup.task.name}-{setup.config.space}", shared, axes, function)
