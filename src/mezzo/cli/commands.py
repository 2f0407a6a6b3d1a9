"""One function per command: call the API, show the result, return what `--json` prints. Those about several runs are in
`many_runs`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mezzo import api
from mezzo.cli.many_runs import is_sweep, train_sweep
from mezzo.cli.many_runs import report as report
from mezzo.cli.many_runs import runs as runs
from mezzo.cli.parser import given_options
from mezzo.cli.progress import say, show_progress, show_result
from mezzo.cli.rows import write_rows
from mezzo.cli.summary import show_summary
from mezzo.config import OPTIONS, from_file
from mezzo.drawing.text import shows_unicode
from mezzo.errors import ConfigError, join_names
from mezzo.evaluation.figures import describe_loss
from mezzo.journal.atomic_files import write_atomically
from mezzo.parallel.transports import torchrun
from mezzo.runs.datasets import DEFAULT_TASK
from mezzo.runs.defaults import choose_method
from mezzo.runs.folder import Folder
from mezzo.signal import measure
from mezzo.tasks import get_task, list_tasks
from mezzo.tasks.proposal import one_line
from mezzo.tasks.task_file import to_toml
from mezzo.untrusted import printable


def train(options: Namespace) -> Any:
    if options.print_config:
        if options.resume:
            raise ConfigError(f"a run's configuration is in {options.resume}/config.json")
        text = _toml(api.prepared_config(_all_options(options)))
        file = sys.stderr if options.json else sys.stdout
        known = text if shows_unicode(getattr(file, "encoding", None)) else _escape(text)
        print(known, end="", file=file)
        return {"config": text}
    if is_sweep(options):
        _announce(options)
        with _end_as_by_ctrl_c():
            return train_sweep(options)
    if torchrun.launched_this_process():
        with torchrun.join_ranks(str(_all_options(options).get("backend", OPTIONS["backend"].default))) as driver:
            return _train(options) if driver else (None, 0)  # one process prints
    with _end_as_by_ctrl_c():
        return _train(options)


def _all_options(options: Namespace) -> dict[str, Any]:
    """The options of the configuration file and of the command line, which takes precedence."""
    given = given_options(options)
    return {**(from_file(Path(options.config), given) if options.config else {}), **given}


def _train(options: Namespace) -> Any:
    _announce(options)
    with show_progress(plain=options.json) as observe:
        source = {"config": options.config, "resume": options.resume}
        session = api.open_session(observe=observe, **source, **given_options(options))
        session.note_command(["mezzo", *options.arguments])
        for _ in session.records():
            pass
        run = session.result()
    if run.stopped == "interrupted":
        again = f"; continue with: mezzo train --resume {shlex.quote(run.out)}"
        say(f"stopped at step {run.steps}" + again * (session.setup.config.method != "adam"), sys.stderr)
    if options.json:
        say(str(run), sys.stderr)
    else:
        show_summary(run)
    return run.to_dict(), (130 if run.stopped == "interrupted" else 0)


METHOD_WORDS = {
    "solve": "solving for each move",
    "spsa": "by slopes along random directions",
    "es": "by rewards of generated text",
    "adam": "with gradients, as a baseline",
}


def _announce(options: Namespace) -> None:
    """Say what is going to happen before torch is imported, which takes seconds; once it is, the next line comes at once."""
    if "torch" in sys.modules:
        return
    if options.resume:
        say(f"continuing {options.resume}; loading …", sys.stderr)
        return
    config = api.resolve(_all_options(options))
    words = METHOD_WORDS[choose_method(config, rewards=api.rewards_text(config))]
    say(f"fine-tuning {config.model} on {config.task or config.train or DEFAULT_TASK}, {words}; loading …", sys.stderr)


def evaluate(options: Namespace) -> Any:
    _say_assumed_task(options)
    chosen = {"data": options.data, "at": options.at, "linear_probe": options.linear_probe, **given_options(options)}
    evaluation = api.evaluate(options.run, **chosen)
    calibrated = evaluation.calibrated
    shown = "" if calibrated is None else f", calibrated {evaluation.metric} {calibrated:.1%}"
    show_result(options, f"{evaluation}\n{describe_loss(evaluation.loss, evaluation.metric)}{shown}")
    return evaluation.to_dict()


def predict(options: Namespace) -> Any:
    if options.file and options.data:
        raise ConfigError(f"two data files are named, {options.file} and {options.data}: leave one out")
    source = options.file or options.data
    typed = not source and sys.stdin is not None and sys.stdin.isatty()
    if not source and sys.stdin is None:
        raise ConfigError("there is no standard input: name a file, as in mezzo predict RUN FILE")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # some locales let bytes through that are no text
    if typed:
        say("type texts, one per line; Ctrl-D ends (mezzo predict RUN FILE reads a file)", sys.stderr)
    _say_assumed_task(options)
    rows = api.predict(
        source or sys.stdin, options.run, at=options.at, batch=1 if typed else 256, **given_options(options)
    )
    count = write_rows(rows, options.format, sys.stdout)
    if not count:
        say("standard input is empty: pipe lines into it, or name a file: mezzo predict RUN FILE", sys.stderr)
    return {"n": count}


def _say_assumed_task(options: Namespace) -> None:
    """A model without a run does not say what it is asked, unless it was exported."""
    if assumed := api.assumed_task(options.run, given_options(options)):
        say(assumed, sys.stderr)


def export(options: Namespace) -> Any:
    if options.push:
        if options.out:
            raise ConfigError("--push uploads and --out writes: leave one out")
        settings = {"at": options.at, "model": options.model, "device": options.device, "private": options.private}
        address = api.push_to_hub(options.run, options.push, options.kind, **settings)
        show_result(options, f"pushed to {address}")
        return {"address": address, "kind": options.kind}
    path = api.export(options.run, options.kind, options.out, options.at, options.model, options.device)
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size
    show_result(options, f"wrote {path} ({size:,} bytes)")
    return {"out": str(path), "kind": options.kind, "bytes": size}


def verify(options: Namespace) -> Any:
    verified = api.verify(options.run, options.model, options.device, options.repair)
    show_result(options, str(verified))
    result = {name: getattr(verified, name) for name in ("digest", "recorded", "ok", "steps", "unchecked", "torn")}
    return result | ({"copy": str(verified.copy)} if verified.copy else {}), 0 if verified.ok else 1


def workers(options: Namespace) -> Any:
    folder = Folder.open(options.run)
    configured = folder.read_config().get("workers")
    if not configured:
        raise ConfigError(
            f"{folder.path} runs without workers; mezzo train --resume {shlex.quote(str(folder.path))} --workers N adds some"
        )
    if options.count is not None:
        if options.count < 1:
            raise ConfigError(f"a run needs at least one worker, not {options.count}")
        folder.want_workers(options.count)
    count = folder.wanted_workers() or configured
    show_result(options, f"{folder.path} wants {count} workers")
    return {"run": str(folder.path), "workers": count}


def tasks(options: Namespace) -> Any:
    actions = {"show": _show_task, "suggest": _suggest_task, "new": _new_task}
    first, *names = options.name or ["list"]
    if first not in (*actions, "list"):
        first, names = "show", options.name
    wanted = "task" if first in ("show", "list") else "data file"
    command = "mezzo tasks" if wanted == "task" else f"mezzo tasks {first}"
    if len(names) > 1:
        raise ConfigError(f"one {wanted} at a time: {command} {names[0]}")
    if names:
        return actions.get(first, _show_task)(options, names[0])
    if first != "list":
        example = "NAME ('mezzo tasks' lists them)" if wanted == "task" else "FILE"
        raise ConfigError(f"name the {wanted} to {first}: {command} {example}")
    every = [task.describe() for task in list_tasks() if options.family in (None, task.family)]
    lines = [
        f"{t['name']:<9} {t['family']:<7} {t['metric']:<9} {join_names(t['words'].values()) or t['kind']}"
        for t in every
    ]
    show_result(options, "\n".join(lines))
    return every


def _show_task(options: Namespace, name: str) -> Any:
    task = get_task(name, options.family)
    shown = task.describe()
    lines = [f"{key:<11} {_one_line(value)}" for key, value in shown.items()]
    others = [t.family for t in list_tasks() if t.name == task.name and t.family != task.family]
    if others and not options.family:
        lines.append(f"also        for {others[0]} models: mezzo tasks {task.name} --family {others[0]}")
    show_result(options, "\n".join(lines))
    return shown


def _suggest_task(options: Namespace, data: str) -> Any:
    proposal = api.suggest_task(data, **given_options(options))
    lines = [f"  {bits:>5.3f} bits  {one_line(template)}" for template, bits in proposal.ranking]
    head = ["templates, by what a text tells about the untrained model's answer:"] if lines else []
    show_result(options, "\n".join([str(proposal), *head, *lines]))
    return proposal.to_dict()


def _new_task(options: Namespace, data: str) -> Any:
    out = Path(options.out or f"{Path(data).stem}.toml")
    if out.suffix != ".toml":
        raise ConfigError(f"a task file ends in .toml; {out} does not")
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another --out, or delete it")
    proposal = api.suggest_task(data, **given_options(options))
    use = f"mezzo train --task {shlex.quote(str(out))} --train {shlex.quote(data)}"
    use += " --readout head" if proposal.head else ""
    others = [template for template, _ in proposal.ranking[1:]]
    write_atomically(out, to_toml(proposal.task, [f"Train with: {use}"], others).encode())
    show_result(options, f"{proposal}\nwrote {out}; edit it, then: {use}")
    return {"out": str(out), **proposal.to_dict()}


def signal(options: Namespace) -> Any:
    measured = measure(given_options(options), options.directions, options.batches, options.objectives)
    show_result(options, str(measured))
    return measured.to_list()


def bench(options: Namespace) -> Any:
    from mezzo.bench import bench as compare

    if options.plan:
        return _forward_plans(options)
    with _exit_on_signals():
        comparison = compare(
            given_options(options),
            options.length,
            options.spread,
            options.rounds,
            options.sweep,
            log=lambda text: say(text, sys.stderr),
            show=lambda table: show_result(options, f"{table}\n"),
            published=not options.no_published,
        )
    return comparison.to_list()


def _forward_plans(options: Namespace) -> list[dict[str, Any]]:
    from mezzo.bench.plans import forward_plans

    plans = []
    for plan in forward_plans(given_options(options)):
        show_result(options, f"{plan}\n")
        plans.append(plan.to_dict())
    return plans


@contextlib.contextmanager
def _end_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM is Ctrl-C also while a model is loaded or tested; during steps the trainer handles both."""
    import signal

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Terminated(BaseException):
    """A signal ended the program; the argument is its number."""


def _raise_terminated(number: int, _: Any) -> None:
    raise _Terminated(number)


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Leave the block when a job scheduler or a closed terminal ends the program, so that temporary folders are removed.

    Then end at once: Python's own exit frees the libraries one by one, which a signal in the middle of a forward may have left in
    a state that crashes.
    """
    import signal

    signals = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    handled = [each for each in signals if signal.getsignal(each) == signal.SIG_DFL]
    for each in handled:
        signal.signal(each, _raise_terminated)
    try:
        yield
    except _Terminated as end:
        for file in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                file.flush()
        os._exit(128 + end.args[0])
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)


def _one_line(value: Any) -> str:
    return ", ".join(f"{key} → {word}" for key, word in value.items()) if isinstance(value, dict) else str(value)


def _escape(text: str) -> str:
    """TOML in ASCII: all other characters are in strings."""
    return "".join(sign if sign.isascii() else f"\\U{ord(sign):08x}" for sign in text)


def _toml(config: dict[str, dict[str, Any]]) -> str:
    """The configuration as TOML tables; options that are not set are comments."""
    lines = []
    for group, values in config.items():
        lines.append(f"[{group}]")
        texts = {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}
        lines += [f"# {key} =" if values[key] is None else f"{key} = {text}" for key, text in texts.items()]
        lines.append("")
    return printable("\n".join(lines))
