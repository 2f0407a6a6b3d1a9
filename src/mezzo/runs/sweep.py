"""Several runs from one set of options: every combination of a small grid, side by side in one folder, resumable."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo.config import OPTIONS, convert, flatten, from_mapping, unnamed_options
from mezzo.config.reading import known_name
from mezzo.errors import ConfigError, JournalError, RunFailed
from mezzo.journal.atomic_files import explain_os_errors, refuse_links, write_atomically
from mezzo.journal.content import read
from mezzo.runs.build import new_run, resume_run
from mezzo.runs.events import Observer
from mezzo.runs.folder import MAX_LINE, MAX_NAME, Folder, free_path, holds_run
from mezzo.runs.resume_checks import Function
from mezzo.runs.session import Session
from mezzo.untrusted import parse_json, read_bytes

NAME = "sweep.json"
# Where runs lie that had to start again; hidden, so that no comparison counts them.
UNFINISHED = ".unfinished"
# Runs of a sweep at most.
MAX_RUNS = 10_000
Point = dict[str, Any]
Grid = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Sweep:
    """The runs of a grid. Its file has the options and the grid; which runs are finished is in their own folders."""

    path: Path
    options: Mapping[str, Any]
    """Those of every run."""
    grid: Grid
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What is given anew when it goes on: limits and machine."""
    function: Function | None = None

    @property
    def points(self) -> list[Point]:
        """Every combination; the option named last, the seed, changes fastest."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]

    def unfinished(self) -> Iterator[tuple[int, Point]]:
        """The runs that are left, numbered from 1."""
        return ((n, point) for n, point in enumerate(self.points, 1) if not is_finished(self.folder_of(point)))

    def folder_of(self, point: Point) -> Path:
        text = describe_point(point)
        name = re.sub(r"[^\w.,=+-]+", "-", text.replace(", ", ",")).strip("-")
        if name != text.replace(", ", ",") or len(name) > MAX_NAME:
            name = f"{name[:MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
        return self.path / name

    def open(self, point: Point, observe: Observer) -> Session:
        """A new run, or the one that was begun, ready for its next step."""
        path, is_new = self.folder_of(point), not (self.path / NAME).exists()
        if holds_run(path):
            if read(path).header.rebuilds:
                return resume_run(path, observe, dict(self.changes), self.function)
            self._put_aside(path, observe)
        self._write()
        try:
            values = {**self.options, **self.changes, **point, "out": str(path)}
            return new_run(from_mapping(values), observe, self.function)
        except BaseException:
            if is_new:  # a mistake in the options leaves nothing behind
                (self.path / NAME).unlink()
                with contextlib.suppress(OSError):
                    self.path.rmdir()
            raise

    def train(self, point: Point, observe: Observer, command: Sequence[str] = ()) -> str:
        """Train one run to its end; why it stopped. One that fails is reported and does not end the sweep."""
        session = self.open(point, observe)
        if command:
            session.note_command(list(command))
        try:
            return session.train().stopped
        except RunFailed as error:
            observe("warning", {"text": f"{describe_point(point)}: {error}"})
            return "failed"

    def _put_aside(self, path: Path, observe: Observer) -> None:
        """Make room for a gradient run, which cannot be resumed, to start again. What it has done is kept."""
        aside = free_path(self.path / UNFINISHED, path.name)
        with explain_os_errors(aside):
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
        observe(
            "warning", {"text": f"a gradient run cannot be resumed and starts again; what it had done is in {aside}"}
        )

    def _write(self) -> None:
        with explain_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_links(self.path, (NAME,))
        write_atomically(self.path / NAME, _to_json(self.options, self.grid).encode())


def parse_grid(seeds: str | Sequence[int] | None, axes: Sequence[str] | Mapping[str, Sequence[Any]]) -> Grid:
    """The values by option, from `name=value,value` texts or a mapping; seeds come last."""
    named = dict(axes) if isinstance(axes, Mapping) else {}
    for text in () if isinstance(axes, Mapping) else axes:
        name, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise ConfigError(f"--sweep is an option with its values, such as lr=1e-6,1e-5, not {text!r}")
        if name.strip() in named:
            raise ConfigError(f"--sweep names {name.strip()} twice: give all its values at once")
        # A template may hold commas, and so may the value of an option that is a list.
        named[name.strip()] = values.split(";" if ";" in values else ",")
    if seeds:
        if "seed" in named:
            raise ConfigError("the seeds are given twice, by --seeds and by --sweep seed=…")
        named["seed"] = seeds.split(",") if isinstance(seeds, str) else list(seeds)
    if "seed" in named:
        named["seed"] = named.pop("seed")
    _check_size({name: values for name, values in named.items() if isinstance(values, Sized)})
    return {known_name(name): _axis(known_name(name), values) for name, values in named.items()}


def _check_size(grid: Mapping[str, Sized]) -> None:
    if (runs := math.prod(max(1, len(values)) for values in grid.values())) > MAX_RUNS:
        count = f"{runs:,}" if runs < 10**15 else "far too many"
        raise ConfigError(f"the sweep has {count} runs, and {MAX_RUNS:,} are allowed: name fewer values")


def _axis(name: str, values: Sequence[Any]) -> list[Any]:
    if name == "out":
        raise ConfigError("every run of a sweep has a folder of its own in --out; leave --sweep out=… away")
    if isinstance(values, str) or not values:
        raise ConfigError(f"{name} needs a list of values to sweep over, not {values!r}")
    found = [convert(name, value.strip() if isinstance(value, str) else value) for value in values]
    for number, value in enumerate(found):
        OPTIONS[name].check(value)
        if value in found[:number]:
            raise ConfigError(f"{OPTIONS[name].flag} has the value {value} twice in the sweep")
    return found


def new_sweep(
    out: str | None, stem: str, options: Mapping[str, Any], grid: Grid, function: Function | None = None
) -> Sweep:
    """A sweep with all its configurations checked; in a folder that has one already, that one, perhaps with more values."""
    path = Path(out) if out else free_path(Path("runs"), f"{stem}-sweep")
    if (path / NAME).exists():
        stored, earlier = _read(path)
        if stored != _plain(options) or set(earlier) != set(grid):
            raise ConfigError(f"{path} holds a sweep with other options; choose another --out, or go on with --resume")
        grid = {name: list(dict.fromkeys([*earlier[name], *grid[name]])) for name in grid}
        _check_size(grid)
    elif path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"--out {path} is not empty and holds no sweep; choose a new folder")
    sweep = Sweep(path, options, grid, function=function)
    for point in sweep.points:
        from_mapping({**options, **point})
    return sweep


def continue_sweep(path: str | Path, changes: Mapping[str, Any], function: Function | None = None) -> Sweep:
    """The sweep of a folder, to go on with. The file may come from a stranger: what contacts other machines or runs code has
    to be named again."""
    options, grid = _read(Path(path))
    sweep = Sweep(Path(path), options, grid, dict(changes), function)
    for option in (each for point in sweep.points for each in unnamed_options({**options, **point}, changes)):
        raise ConfigError(
            f"{sweep.path / NAME}: {option.name} is not taken from a file, which may come from a stranger: "
            f"give {f'{option.flag} {option.placeholder}'.strip()} beside it if you trust it"
        )
    return sweep


def holds_sweep(path: str | Path) -> bool:
    return (Path(path) / NAME).is_file()


def is_finished(path: Path) -> bool:
    """Whether a run has ended by itself."""
    if not holds_run(path):
        return False
    last: dict[str, Any] = {}
    for event in Folder.open(path).metrics():
        last = event if event.get("event") in ("result", "step") else last
    return last.get("event") == "result" and last.get("stopped") != "interrupted"


def describe_point(point: Point) -> str:
    return ", ".join(f"{name}={_text(value)}" for name, value in point.items())


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else ",".join(value) if isinstance(value, tuple) else str(value)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    file = path / NAME
    try:
        with explain_os_errors(file):
            found = parse_json(read_bytes(file, MAX_LINE))
        options, grid = flatten(found["options"]), {str(name): list(values) for name, values in found["grid"].items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise JournalError(f"{file} is damaged: start the sweep again with the same options in a new --out") from None
    return options, {name: list(values) for name, values in parse_grid(None, grid).items()}


def _to_json(options: Mapping[str, Any], grid: Grid) -> str:
    return json.dumps({"options": dict(options), "grid": dict(grid)}, indent=2) + "\n"


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they are read back."""
    return flatten(json.loads(json.dumps(dict(options))))
