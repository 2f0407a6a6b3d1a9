"""Commands about several runs: a sweep, a list, and reports that compare."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from mezzo import reports
from mezzo.cli.parser import given_options
from mezzo.cli.progress import say, show_progress, show_result
from mezzo.errors import ConfigError, MezzoError
from mezzo.evaluation.figures import format_figure
from mezzo.many_runs import open_sweep
from mezzo.parallel.transports import torchrun
from mezzo.runs.sweep import describe_point, holds_sweep

RUNS = "runs"
COLUMNS = ("run", "task", "space", "verdict", "figure", "zero-shot", "steps", "last written")


def is_sweep(options: Namespace) -> bool:
    return bool(options.seeds or options.sweep or (options.resume and holds_sweep(options.resume)))


def train_sweep(options: Namespace) -> Any:
    """Train the runs that are left, then compare all of them."""
    if torchrun.launched_this_process():
        raise ConfigError("--seeds and --sweep train one run after the other: start them without torchrun")
    with show_progress(plain=options.json) as observe:
        given = {"config": options.config, "resume": options.resume, **given_options(options)}
        sweep = open_sweep(seeds=options.seeds, grid=options.sweep or (), observe=observe, **given)
    count, ends = len(sweep.points), []
    for number, point in sweep.unfinished():
        say(f"run {number} of {count}: {describe_point(point)}", sys.stderr)
        with show_progress(plain=options.json) as observe:
            ends.append(sweep.train(point, observe, ["mezzo", *options.arguments]))
        if ends[-1] == "interrupted":
            say(f"stopped; continue with: mezzo train --resume {shlex.quote(str(sweep.path))}", sys.stderr)
            break
    path, found = reports.write_page([sweep.path])
    show_result(options, f"{found}\nwrote {path}, with the figures as .csv and .json")
    result = {"out": str(sweep.path), "report": str(path), **found.to_dict()}
    return result, 130 if "interrupted" in ends else 1 if "failed" in ends else 0


def runs(options: Namespace) -> Any:
    """List the runs in folders."""
    if not options.folders and not Path(RUNS).is_dir():
        show_result(options, f"there is no folder {RUNS} here; 'mezzo train' makes one")
        return []
    rows = [_row(path) for path in reports.find_runs(options.folders or [RUNS])]
    table = [COLUMNS, *([str(row[name]) for name in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in table)
    show_result(options, "\n".join(line.rstrip() for line in lines))
    return rows


def _row(path: Path) -> dict[str, Any]:
    try:
        run = reports.read_run(path)
    except (MezzoError, OSError) as error:  # one damaged folder must not hide the others
        return {**dict.fromkeys(COLUMNS, ""), "run": str(path), "verdict": f"unreadable: {error}"}
    metrics = run.metrics
    shown = metrics.final or run.best
    texts = (
        str(path),
        str(run.header.task.get("name", "")),
        str(run.config.get("space", "")),
        run.verdict.word,
        f"{shown.split} {shown.metric} {format_figure(shown.value, shown.metric)}" if shown else "–",
        format_figure(metrics.zero_shot.value, metrics.zero_shot.metric) if metrics.zero_shot else "–",
        run.steps,
        _last_written(run.path),
    )
    return dict(zip(COLUMNS, texts, strict=True))


def _last_written(folder: Path) -> str:
    """The time of its newest file, of those that have one that can be told."""
    return max(filter(None, map(_time_written, folder.glob("*.jsonl"))), default="–")


def _time_written(file: Path) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))
    except (OSError, OverflowError, ValueError):  # a link to nothing, or a time that no calendar has
        return ""


def report(options: Namespace) -> Any:
    if options.watch:
        return _watch(options)
    path, found = reports.write_page(options.runs, options.out)
    words = [f"{run.name}: {run.verdict.word}: {run.verdict.reason}" for run in found.runs]
    several = len(words) > 1
    table = ["", str(found), ""] if several else []
    show_result(options, "\n".join([*words, *table, f"wrote {path}{', with the figures as .csv and .json' * several}"]))
    plots = reports.write_plots(found.runs, Path(options.plots)) if options.plots else []
    if plots:
        missing = "" if reports.has_matplotlib() else "; PNG needs matplotlib: pip install 'mezzo[plots]'"
        show_result(options, f"wrote {len(plots)} plots to {options.plots}{missing}")
    verdicts = [{"run": str(r.path), "verdict": r.verdict.word, "reason": r.verdict.reason} for r in found.runs]
    return {"out": str(path), "plots": [str(plot) for plot in plots], "runs": verdicts}


def _watch(options: Namespace) -> Any:
    """Serve until Ctrl-C."""
    reports.compare(options.runs)  # a mistake is told here, not in the browser
    with reports.make_server(options.runs, options.port) as server, contextlib.suppress(KeyboardInterrupt):
        # `say` would take the token out of the address.
        print(f"the report is at {server.url} (Ctrl-C ends it)", file=sys.stderr, flush=True)
        server.serve_forever()
    return {"url": server.url}
