"""From a configuration to a session that is ready for its next step: of a new run, or of one that is resumed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mezzo.config import RunConfig, flatten, from_mapping
from mezzo.engines.base import Engine, ReportingEngine, Workers
from mezzo.errors import ConfigError, JournalError
from mezzo.journal.atomic_files import remove_leftovers
from mezzo.journal.content import MAX_NOTES, read
from mezzo.journal.header import Header
from mezzo.journal.journal import Journal
from mezzo.method.method import Method
from mezzo.method.objectives import Objective
from mezzo.parallel.setup import open_workers
from mezzo.parallel.transports import torchrun
from mezzo.replay.prefix_start import prefix_start
from mezzo.replay.replay import bring_to, check_base
from mezzo.runs.budget import parse_budget
from mezzo.runs.data_summary import describe_data
from mezzo.runs.eps_test import EpsTest, find_eps
from mezzo.runs.events import Events, Observer
from mezzo.runs.folder import Folder, holds_run
from mezzo.runs.health import Health
from mezzo.runs.methods import make_method
from mezzo.runs.objectives import find_function
from mezzo.runs.range_test import RangeTest, find_rate
from mezzo.runs.recorded_evaluations import read_evaluations, read_zero_shot
from mezzo.runs.resolve import resolve_setup
from mezzo.runs.resume_checks import (
    CONTACTING,
    RESUMABLE,
    Function,
    check_named_again,
    check_same_counts,
    check_same_data,
    check_same_objective,
    describe_function,
    describe_jump,
    refuse_missing_data,
)
from mezzo.runs.session import Session
from mezzo.runs.setup import Setup
from mezzo.runs.trackers import Trackers, check_installed
from mezzo.runs.trainer import Limits, MeZOTrainer
from mezzo.tasks import get_task
from mezzo.types import StepRecord

# Example-forwards of training between two evaluations, by the number of dev examples.
EVALUATION_SHARE = 8
# Beside each evaluation there may be a mark, and half of the room is for others.
MAX_EVALUATIONS = MAX_NOTES // 4


class _Closeable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closeable)


def new_run(config: RunConfig, observe: Observer, function: Function | None = None) -> Session:
    """Check everything, then create the run folder."""
    config = config.replace(objective=describe_function(function)) if function else config
    check_installed(config.track)
    own = function or find_function(config.objective)
    setup = resolve_setup(config, function=own)
    if _was_restarted(setup.config):
        changes = {name: getattr(config, name) for name in RESUMABLE if getattr(config, name) is not None}
        changes |= {name: getattr(setup.config, name) for name in CONTACTING if getattr(config, name) is not None}
        return resume_run(
            str(config.out), observe, changes | ({} if function else {"objective": config.objective}), function
        )
    with _Opened() as opened:
        objective = _load(setup, observe, opened)
        engine = opened.add(_open_engine(setup))
        engine.check(setup.check_batch, setup.config.eps or 1e-3)
        found: RangeTest | EpsTest | None = None
        if setup.config.lr == "auto":
            found = find_rate(setup, engine, objective)
            setup = setup.with_found(lr=found.chosen)
        elif setup.config.method == "es" and config.eps is None:
            found = find_eps(setup, engine)
            setup = setup.with_found(eps=found.chosen, **({"lr": found.chosen} if config.lr is None else {}))
        if found:
            observe("range test", {"text": found.describe()})
        space = setup.config.space or ""
        folder = opened.add(Folder.create(config.out, f"{setup.task.name}-{space if space.isalnum() else 'pattern'}"))
        journal = opened.add(Journal.create(folder.path, make_header(setup, engine), prefix_start(engine)))
        remove_leftovers(folder.path)
        folder.write_config({**setup.config.to_dict(), "out": str(folder.path)})
        if found:
            folder.note("data", {"step": 0, "text": found.describe()})
        return opened.keep(_start(setup, engine, folder, journal, objective, observe))


def resume_run(
    path: str | Path, observe: Observer, changes: dict[str, Any], function: Function | None = None
) -> Session:
    """Continue a run where its journal ends; only what RESUMABLE names may change, and is stored in config.json."""
    with _Opened() as opened:
        folder = opened.add(Folder.open(path))
        journal = opened.add(Journal.resume(folder.path))
        content = journal.content
        header = content.header
        if not header.rebuilds:
            raise JournalError(
                "a gradient run cannot be resumed: its journal holds losses and no moves, and AdamW's moments are not kept; "
                "start it again. Its best and last weights can be evaluated and exported"
            )
        stored = {key: value for key, value in folder.read_config().items() if key in RESUMABLE}
        remembered = flatten({**header.config, **stored})  # no table hides an option from the checks
        check_same_objective(str(remembered.get("objective")), function, changes.pop("objective", None))
        check_named_again(remembered, changes)
        # A model's own code runs, and a server's weights change, only where the user asks for it, not because a file says so.
        again = {"remote_code": False, "exclusive_server": False}
        config = from_mapping({**remembered, **again, **changes, "out": str(folder.path)})
        check_installed(config.track)
        own = function or find_function(config.objective)
        setup = resolve_setup(config, get_task(dict(header.task)), own)
        refuse_missing_data(setup.config, folder)
        objective = _load(setup, observe, opened)
        check_same_data(header, setup)
        engine = opened.add(_open_engine(setup))
        engine.micro_batch = header.micro_batch
        check_base(engine, content)
        bring_to(engine, content, content.steps, folder.snapshots)
        with closing(folder.metrics()) as earlier:
            check_same_counts(earlier, setup, changes)
        if copy := journal.cut_tail():
            text = f"the last {content.torn} bytes of the journal were damaged and have been moved to {copy}"
            observe("warning", {"text": text})
        remove_leftovers(folder.path)
        folder.rewrite_metrics(content.steps, content.events)
        folder.write_config({**setup.config.to_dict(), "out": str(folder.path)})
        session = _start(setup, engine, folder, journal, objective, observe)
        if jump := describe_jump(setup.config, remembered.get("steps"), content.steps):
            session.events.warn(content.steps, jump)
        return opened.keep(session)


def make_header(setup: Setup, engine: Engine) -> Header:
    config = setup.config
    return Header(
        config=config.to_dict(),
        seed=config.seed,
        samples=config.samples or 1,
        base=engine.base_digest,
        family=setup.family,
        classes=setup.readout.classes,
        tensors=engine.trained,
        dtype=config.dtype,
        micro_batch=engine.micro_batch,
        data=setup.data_digest,
        engine=engine.describe(),
        task=setup.task.as_dict(),
    )


def _load(setup: Setup, observe: Observer, opened: _Opened) -> Objective:
    """Load and encode the data and find the objective: the last mistakes that can be found without the model's weights."""
    observe("encoding", {"examples": len(setup.splits.train)})
    _ = setup.train_prompts
    if setup.reward and setup.reward.workers:
        opened.add(setup.reward.workers).start()  # before this process has threads and a GPU
    objective = setup.objective
    make_method(setup, objective)
    observe("loading", {"model": setup.config.model, "task": setup.task.name})
    return objective


def _open_engine(setup: Setup) -> Engine:
    if setup.config.method == "adam" and torchrun.RankGroup.current is not None:
        raise ConfigError("--method adam runs in one process: start it without torchrun")
    return open_workers(setup.config, setup.engine_spec) or setup.open_engine()


def _start(
    setup: Setup, engine: Engine, folder: Folder, journal: Journal, objective: Objective, observe: Observer
) -> Session:
    """The session around an open engine and journal, its zero-shot evaluation done."""
    config, content = setup.config, journal.content
    events = Events(folder, observe, Health(config.objective, str(config.method)), Trackers())
    seconds = events.remember(folder.metrics())
    events.trackers.start(config.track, folder.path, config.to_dict())
    try:
        if config.train and not content.events and not content.steps:
            for line in describe_data(setup):
                events("data", {"step": 0, "text": line})
        trainer = _make_trainer(setup, engine, folder, journal, objective, events)
        if isinstance(engine, Workers):
            folder.want_workers(None)  # what was asked of an earlier driver
            engine.attach_run(
                str(folder.snapshots.folder),
                lambda text: events("worker", {"step": trainer.step, "text": text}),
                folder.wanted_workers,
            )
        elif isinstance(engine, ReportingEngine):
            engine.report = lambda text: events("worker", {"step": trainer.step, "text": text})
        session = Session(setup, engine, folder, journal, trainer, events, seconds)
        session.untrained = read_zero_shot(content, setup.splits.test, setup.task)
        session.begin()
    except BaseException:
        events.trackers.close()
        raise
    return session


def _make_trainer(
    setup: Setup,
    engine: Engine,
    folder: Folder,
    journal: Journal,
    objective: Objective,
    events: Events,
) -> MeZOTrainer:
    """A trainer where the journal ends, its method's memory rebuilt from the records."""
    method, dev = make_method(setup, objective), setup.splits.dev
    spent = _remember(method, journal.content.records)
    return MeZOTrainer(
        engine,
        method,
        journal,
        _make_limits(setup),
        evaluate=(lambda: setup.evaluate(engine, dev)) if dev else None,
        snapshots=folder.snapshots,
        notify=events,
        stop_reason=lambda: events.stop_reason,
        spent=spent,
        start=journal.content.steps,
        history=read_evaluations(journal.content),
    )


def _remember(method: Method, records: Iterable[StepRecord]) -> int:
    """Rebuild a method's memory; return what the steps cost."""
    spent = 0
    for record in records:
        try:
            method.observe(record)
            spent += method.cost(record)
        except (LookupError, ValueError, OverflowError) as error:  # notes of another version, or of a file from anybody
            raise JournalError(
                f"step {record.step} of the journal lacks what its method has to remember ({error}): the run cannot be "
                "continued, but it can be verified and exported"
            ) from None
    return spent


def _make_limits(setup: Setup) -> Limits:
    config, budget = setup.config, parse_budget(setup.config.budget)
    looks = (config.steps or math.inf) / config.eval_every if config.eval_every else 0
    if math.isfinite(looks) and looks > MAX_EVALUATIONS:
        raise ConfigError(
            f"--eval-every {config.eval_every} would evaluate {looks:,.0f} times, and a journal holds {MAX_EVALUATIONS:,}: "
            "evaluate less often"
        )
    return Limits(
        steps=config.steps or math.inf,
        forwards=budget.forwards,
        eval_every=config.eval_every or 0,
        eval_forwards=EVALUATION_SHARE * len(setup.splits.dev),
        patience=config.patience,
        seconds=min(budget.seconds, 60 * config.time_limit if config.time_limit else math.inf),
        snapshot_seconds=60 * config.snapshot_minutes,
    )


class _Opened(ExitStack):
    """Closes what was opened if a run cannot begin: its folder's lock, and processes that an engine may hold."""

    def add(self, opened: T) -> T:
        self.callback(opened.close)
        return opened

    def keep(self, session: Session) -> Session:
        self.pop_all()
        return session


def _was_restarted(config: RunConfig) -> bool:
    """Whether torchrun or Slurm has started this very run again: it then continues where its journal ends."""
    if torchrun.may_restart_this_process() and not config.out:
        raise ConfigError(
            "torchrun --max-restarts starts a failed run again, which must then find its own folder: add --out DIR"
        )
    requeued = config.out and os.environ.get("SLURM_RESTART_COUNT", "0").strip("0").isdigit()
    if not (requeued or torchrun.restarted_this_process()) or not holds_run(Path(str(config.out))):
        return False
    recorded = read(Path(str(config.out))).header.config
    fixed = {key: value for key, value in config.to_dict().items() if key not in (*RESUMABLE, "out")}
    if differing := sorted(key for key, value in fixed.items() if recorded.get(key) != value):
        raise JournalError(f"{config.out} holds another run ({', '.join(differing)} differs): choose another --out")
    return True
