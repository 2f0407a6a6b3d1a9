"""From a configuration to a session that is ready for its next step: of a new run, or of one that is resumed."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mezzo.config import OPTIONS, RunConfig, convert, flatten, from_mapping, option_names, unnamed_options
from mezzo.engines.base import Engine, Workers
from mezzo.errors import ConfigError, DataError, JournalError
from mezzo.evaluation.rewards import Reward
from mezzo.journal.atomic_files import remove_leftovers
from mezzo.journal.content import MAX_NOTES, read
from mezzo.journal.header import Header
from mezzo.journal.journal import Journal
from mezzo.method import noise, rounding
from mezzo.method.batches import ExampleStream, make_batches
from mezzo.method.estimators import Spsa
from mezzo.method.gradient import GradientMethod
from mezzo.method.method import EstimatorMethod, Method
from mezzo.method.objectives import Objective, ObjectiveFunction
from mezzo.method.optimizers import Sgd, schedule
from mezzo.method.solve import Solve
from mezzo.parallel.setup import open_workers
from mezzo.parallel.transports import torchrun
from mezzo.replay.prefix_start import prefix_start
from mezzo.replay.replay import bring_to, check_base
from mezzo.runs.budget import parse_budget
from mezzo.runs.data_summary import describe_data
from mezzo.runs.events import Events, Observer
from mezzo.runs.folder import Folder, holds_run
from mezzo.runs.health import Health
from mezzo.runs.recorded_evaluations import read_evaluations, read_zero_shot
from mezzo.runs.session import Session
from mezzo.runs.setup import Setup, resolve_setup
from mezzo.runs.trackers import Trackers, check_installed
from mezzo.runs.trainer import Limits, MeZOTrainer
from mezzo.tasks import get_task
from mezzo.types import Batch

# What may change when a run goes on: its limits and its machine.
RESUMABLE = option_names(resumable=True)
# Example-forwards of training between two evaluations, by the number of dev examples.
EVALUATION_SHARE = 8
# Share of the peak learning rate from which on a change of the schedule is announced.
SMALL_JUMP = 0.02
# What must be named again where it contacts other machines.
CONTACTING = tuple(name for name, option in OPTIONS.items() if option.contacts)
# Beside each evaluation there may be a mark.
MAX_EVALUATIONS = MAX_NOTES // 2
# The user's own objective, given in Python.
Function = ObjectiveFunction | Reward


class _Closeable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closeable)


def new_run(config: RunConfig, observe: Observer, function: Function | None = None) -> Session:
    """Check everything, then create the run folder."""
    config = config.replace(objective=_describe(function)) if function else config
    check_installed(config.track)
    setup = resolve_setup(config)
    if _was_restarted(setup.config):
        changes = {name: getattr(config, name) for name in RESUMABLE if getattr(config, name) is not None}
        changes |= {name: getattr(setup.config, name) for name in CONTACTING if getattr(config, name) is not None}
        return resume_run(
            str(config.out), observe, changes | ({} if function else {"objective": config.objective}), function
        )
    objective = _load(setup, observe, function)
    with _Opened() as opened:
        engine = opened.add(_open_engine(setup))
        engine.check(Batch(setup.train_prompts, setup.readout), setup.config.eps or 1e-3)
        space = setup.config.space or ""
        folder = opened.add(Folder.create(config.out, f"{setup.task.name}-{space if space.isalnum() else 'pattern'}"))
        journal = opened.add(Journal.create(folder.path, make_header(setup, engine), prefix_start(engine)))
        remove_leftovers(folder.path)
        folder.write_config({**setup.config.to_dict(), "out": str(folder.path)})
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
        _check_same_objective(str(remembered.get("objective")), function, changes.pop("objective", None))
        _check_named_again(remembered, changes)
        # A model's own code runs only where the user asks for it, not because a file says so.
        config = from_mapping({**remembered, "remote_code": False, **changes, "out": str(folder.path)})
        check_installed(config.track)
        setup = resolve_setup(config, get_task(dict(header.task)))
        _refuse_missing_data(setup.config, folder)
        objective = _load(setup, observe, function)
        _check_same_data(header, setup)
        engine = opened.add(_open_engine(setup))
        engine.micro_batch = header.micro_batch
        check_base(engine, content)
        bring_to(engine, content, content.steps, folder.snapshots)
        _check_same_counts(folder.metrics(), setup, changes)
        if copy := journal.cut_tail():
            text = f"the last {content.torn} bytes of the journal were damaged and have been moved to {copy}"
            observe("warning", {"text": text})
        remove_leftovers(folder.path)
        folder.rewrite_metrics(content.steps, content.events)
        folder.write_config({**setup.config.to_dict(), "out": str(folder.path)})
        session = _start(setup, engine, folder, journal, objective, observe)
        if jump := _describe_jump(setup.config, remembered.get("steps"), content.steps):
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


def make_method(setup: Setup, objective: Objective) -> Method:
    config = setup.config
    return METHODS[str(config.method)](setup, objective)


def _make_solve(setup: Setup, objective: Objective) -> Method:
    config = setup.config
    assert config.eps is not None
    judges = setup.judging_prompts
    return Solve(
        config.seed,
        config.eps,
        ExampleStream(setup.train_prompts, setup.readout, config.seed),
        ExampleStream(judges, setup.readout, config.seed) if judges else None,
        directions=config.samples or 0,
        examples=config.batch_size or 0,
        dtype=config.dtype,
    )


def _make_spsa(setup: Setup, objective: Objective) -> Method:
    config = setup.config
    assert config.lr is not None and config.eps is not None and config.steps is not None
    assert config.schedule is not None and config.batch_size is not None and config.samples is not None
    rate = schedule(config.schedule, config.lr, config.steps, config.warmup)
    return EstimatorMethod(
        objective,
        Spsa(config.seed, config.eps, config.samples),
        Sgd(rate, config.weight_decay or 0.0, config.clip),
        make_batches(setup.train_prompts, setup.readout, config.seed, config.batch_size),
    )


def _make_adam(setup: Setup, objective: Objective) -> Method:
    config = setup.config
    assert config.lr is not None and config.steps is not None
    assert config.schedule is not None and config.batch_size is not None
    return GradientMethod(
        schedule(config.schedule, config.lr, config.steps, config.warmup),
        make_batches(setup.train_prompts, setup.readout, config.seed, config.batch_size),
        config.weight_decay or 0.0,
    )


METHODS: dict[str, Callable[[Setup, Objective], Method]] = {
    "solve": _make_solve,
    "spsa": _make_spsa,
    "adam": _make_adam,
}


def _load(setup: Setup, observe: Observer, function: Function | None) -> Objective:
    """Load and encode the data and find the objective: the last mistakes that can be found without the model's weights."""
    observe("encoding", {"examples": len(setup.splits.train)})
    _ = setup.train_prompts
    objective = setup.objective(function)
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
    method, dev, spent = make_method(setup, objective), setup.splits.dev, 0
    for record in journal.content.records:
        method.observe(record)
        spent += method.cost(record)
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
    requeued = config.out and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    if not (requeued or torchrun.restarted_this_process()) or not holds_run(Path(str(config.out))):
        return False
    recorded = read(Path(str(config.out))).header.config
    fixed = {key: value for key, value in config.to_dict().items() if key not in (*RESUMABLE, "out")}
    if differing := sorted(key for key, value in fixed.items() if recorded.get(key) != value):
        raise JournalError(f"{config.out} holds another run ({', '.join(differing)} differs): choose another --out")
    return True


def _check_same_data(header: Header, setup: Setup) -> None:
    """A resumed run must see the same noise, rounding and data."""
    if header.noise != noise.VERSION:
        raise JournalError(f"the run uses noise {header.noise!r}; this mezzo makes {noise.VERSION!r}")
    if setup.config.dtype in rounding.DTYPES and header.rounding != rounding.VERSION:
        raise JournalError(f"the run rounds by {header.rounding!r}; this mezzo by {rounding.VERSION!r}")
    if header.data != setup.data_digest:
        raise JournalError("the training data has changed since the run began; restore it, or start a new run")


def _refuse_missing_data(config: RunConfig, folder: Folder) -> None:
    """Data that has moved can be named; its digest says whether it is the same."""
    for name in ("train", "dev", "test"):
        source = getattr(config, name)
        if source and not source.startswith("hub:") and not Path(source).exists():
            command = f"mezzo train --resume {shlex.quote(str(folder.path))} --{name} {OPTIONS[name].placeholder}"
            raise DataError(
                f"the {name} data of this run is not at {source} any more; where it has moved to: {command}"
            )


def _check_same_counts(earlier: Iterable[dict[str, Any]], setup: Setup, changes: dict[str, Any]) -> None:
    """Dev and test data from another place have no digest, but must at least have as many examples."""
    started = next((event for event in earlier if event.get("event") == "start"), {})
    splits = setup.splits
    for name, examples in (("dev", splits.dev), ("test", splits.test if splits.has_test else ())):
        before = started.get(name, len(examples))
        if name in changes and "eval_limit" not in changes and before != len(examples):
            raise JournalError(
                f"--{name} has {len(examples)} examples, and the run began with {before}: give the same data"
            )


def _describe_jump(config: RunConfig, planned: Any, step: int) -> str:
    """What is said of a learning rate that another number of steps changes in mid-run; empty if it stays."""
    if config.method != "spsa" or not step or planned == config.steps:
        return ""
    assert config.schedule and config.lr is not None and config.steps
    before, now = (
        schedule(config.schedule, config.lr, steps, config.warmup)(step) for steps in (planned, config.steps)
    )
    if abs(now - before) <= SMALL_JUMP * config.lr:
        return ""
    return (
        f"--steps {config.steps} instead of {planned} stretches the {config.schedule} schedule: from here on the learning rate "
        f"is {now:.3g}, where it would have been {before:.3g}"
    )


def _describe(function: Callable[..., Any]) -> str:
    """How a Python function is recorded: it cannot be found again by name."""
    return f"<function {getattr(function, '__name__', type(function).__name__)}>"


def _check_same_objective(recorded: str, function: Function | None, name: str | None) -> None:
    """The user's own function must be given again: a journal, which may be anybody's, must not choose what is imported."""
    given = _describe(function) if function else name
    if recorded.startswith("<") and given != recorded:
        raise ConfigError(f"this run's objective was the Python {recorded[1:-1]}; pass it as objective= to resume")
    if given and given != recorded:
        raise ConfigError(f"this run's objective is {recorded!r}; a resumed run keeps it")
    if ":" in recorded and given is None:
        raise ConfigError(
            f"this run's objective is a function of your own; name it again to resume: --objective {recorded}"
        )


def _check_named_again(remembered: dict[str, Any], given: dict[str, Any]) -> None:
    """What contacts other machines must be named again: a run folder, which may be anybody's, must not choose where prompts,
    weights and figures go, what is asked of the hub, nor whose Ray cluster sends code to this machine."""
    for option in unnamed_options(remembered, given):
        if option.contacts:
            again = "name it again, or another, to resume" if option.resumable else "name it again to resume"
            used = f"{option.flag} {remembered[option.name]!r}"
            raise ConfigError(f"this run used {used}; {again}: {option.flag} {option.placeholder}")
    for name, value in given.items():
        fixed = name not in RESUMABLE or str(value).startswith("hub:")  # files move; a data set of the hub does not
        if fixed and convert(name, value) != remembered.get(name):
            raise ConfigError(f"a resumed run keeps its settings; {name} cannot change")
