"""How a run begins: everything is checked and put together here, for a new run and for one that goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from mezzo.config import OPTIONS, RunConfig, from_mapping, option_names
from mezzo.engines.base import Engine, Workers
from mezzo.errors import ConfigError, JournalError
from mezzo.evaluation.evaluate import Evaluation
from mezzo.evaluation.rewards import Reward, Rewarded, mean_reward, text_f1
from mezzo.journal.journal import Content, Journal, read
from mezzo.method.batches import batches_of
from mezzo.method.estimators import Spsa
from mezzo.method.objectives import OBJECTIVES, Objective, get_objective, imported
from mezzo.method.optimizers import Sgd, schedule
from mezzo.parallel.setup import open_workers
from mezzo.parallel.transports import torchrun
from mezzo.replay.replay import bring_to, check_base
from mezzo.runs import datasets, setup
from mezzo.runs.events import Events, Observer
from mezzo.runs.folder import Folder, holds_run
from mezzo.runs.health import Health
from mezzo.runs.session import Session
from mezzo.runs.trackers import Trackers, check_installed
from mezzo.runs.trainer import Limits, MeZOTrainer
from mezzo.tasks import Task, get_task
from mezzo.types import Batch, MicroBatch, Prompt

RESUMABLE = option_names(resumable=True)
"""What may change when a run goes on: its limits and its machine."""
LONGEST_PAD = 4096


def new(config: RunConfig, observe: Observer, objective: Objective | None = None, task: Task | None = None) -> Session:
    """Check everything, then create the run folder."""
    config = config.replace(objective=_named(objective)) if objective else config
    parts, splits = _prepared(config, task)
    if _was_begun(parts.config):
        changes = {name: value for name in RESUMABLE if (value := getattr(config, name)) is not None}
        again = changes | ({} if objective else {"objective": config.objective})
        return resume(str(config.out), observe, again, objective)
    train = _encoded(parts, splits, observe)
    method = _method(parts.config, objective)
    observe("loading", {"model": config.model, "task": parts.task.name})
    engine = _engine(parts)
    try:
        engine.check(Batch(train, parts.readout), parts.config.eps or 1e-3)
        folder = Folder.create(config.out, f"{parts.task.name}-{_word(parts.config.space or '')}")
        folder.write_config({**parts.config.to_dict(), "out": str(folder.path)})
        journal = Journal.create(folder.path, setup.header_of(parts, engine, train))
    except BaseException:
        engine.close()  # an engine may hold processes of its own
        raise
    return _begun(_joined(parts, splits, engine, folder, journal, method, train, observe), train)


def resume(path: str | Path, observe: Observer, changes: dict[str, Any], objective: Objective | None = None) -> Session:
    """Continue a run where its journal ends; only what RESUMABLE names may change, and is remembered in config.json."""
    folder = Folder.open(path)
    journal = Journal.resume(folder.path)
    header, engine = journal.content.header, None
    try:
        recorded, unit, task = _recorded(journal.content)
        _same_objective(str(recorded.get("objective")), objective, changes.pop("objective", None))
        limits = {key: value for key, value in folder.read_config().items() if key in RESUMABLE}
        # Code of a model runs only for who asks for it, not because a file says so.
        asked = {"remote_code": False, **changes, "out": str(folder.path)}
        remembered = {**recorded, **{k: v for k, v in limits.items() if k != "remote_code"}}
        _named_again(remembered, changes)
        config = from_mapping({**remembered, **asked})
        parts, splits = _prepared(config, task)
        train = _encoded(parts, splits, observe)
        setup.check_header(header, parts, train)
        method = _method(parts.config, objective)
        observe("loading", {"model": config.model, "task": parts.task.name})
        engine = _engine(parts)
        engine.micro_batch = unit
        check_base(engine, journal.content)
        if journal.content.torn:
            text = f"the last {journal.content.torn} bytes of the journal were torn and have been cut"
            observe("warning", {"text": text})
        bring_to(engine, journal.content, journal.content.steps, folder.snapshots)
        earlier = folder.rewind_metrics(journal.content.steps)
        folder.write_config({**parts.config.to_dict(), "out": str(folder.path)})
    except BaseException:
        journal.close()
        if engine is not None:
            engine.close()
        raise
    return _begun(_joined(parts, splits, engine, folder, journal, method, train, observe, earlier), train)


def _encoded(parts: setup.Parts, splits: datasets.Splits, observe: Observer) -> tuple[Prompt, ...]:
    observe("encoding", {"examples": len(splits.train)})
    return parts.encode(splits.train)


def _recorded(content: Content) -> tuple[dict[str, Any], MicroBatch, Task]:
    """What the header of a run to be continued says; it may be anybody's."""
    header = content.header
    try:
        sizes = {name: int(header["unit"][name]) for name in ("rows", "members", "pad_to")}
        unit = MicroBatch(**sizes, waste=float(header["unit"].get("waste", 1.0)))
        if min(unit.rows, unit.members, unit.pad_to) < 1 or unit.pad_to > LONGEST_PAD or not 0 <= unit.waste <= 1:
            raise ValueError(f"a unit of work of {unit}")
        return dict(header["config"]), unit, get_task(dict(header["task"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise JournalError(f"{content.path}: the header lacks what resuming needs: {error}") from None


def _was_begun(config: RunConfig) -> bool:
    """Whether torchrun has started this very run again after a failure: it then goes on where its journal ends."""
    if torchrun.may_restart() and not config.out:
        raise ConfigError(
            "torchrun --max-restarts starts a failed run again, which must then find its own folder: add --out DIR"
        )
    if not torchrun.restarted() or not holds_run(Path(str(config.out))):
        return False
    recorded = read(Path(str(config.out))).header.get("config", {})
    fixed = {key: value for key, value in config.to_dict().items() if key not in (*RESUMABLE, "out")}
    if differing := sorted(key for key, value in fixed.items() if recorded.get(key) != value):
        raise JournalError(f"{config.out} holds another run ({', '.join(differing)} differs): choose another --out")
    return True


def _begun(session: Session, train: Sequence[Prompt]) -> Session:
    try:
        session.begin(len(train))
    except BaseException:
        session.close()  # gives the lock back
        raise
    return session


def _engine(parts: setup.Parts) -> Engine:
    """The run's engine: made of workers where they are asked for."""
    of = (parts.config, parts.family, parts.classes, parts.padding_id)
    return open_workers(parts.config, setup.spec_of(*of)) or setup.engine_for(*of)


def _joined(
    parts: setup.Parts,
    splits: datasets.Splits,
    engine: Engine,
    folder: Folder,
    journal: Journal,
    method: tuple[Spsa, Sgd, str | Objective],
    train: tuple[Prompt, ...],
    observe: Observer,
    earlier: Sequence[dict[str, Any]] = (),
) -> Session:
    config = parts.config
    assert config.steps is not None and config.batch_size is not None

    events = Events(folder, observe, Health(config.objective), Trackers())
    events.remember(earlier)
    events.trackers.start(config.track, folder.path, config.to_dict())
    limits = Limits(
        steps=config.steps,
        eval_every=config.eval_every or 0,
        patience=config.patience,
        seconds=60 * config.time_limit if config.time_limit else float("inf"),
        snapshot_seconds=60 * config.snapshot_minutes,
    )
    estimator, optimizer, objective = method
    trainer = MeZOTrainer(
        _seen_by(parts, engine, objective),
        estimator,
        optimizer,
        mean_reward if _reads_texts(parts, objective) else get_objective(objective),
        batches_of(train, parts.readout, config.seed, config.batch_size),
        journal,
        limits,
        evaluate=(lambda: parts.evaluate(engine, splits.dev)) if splits.dev else None,
        snapshots=folder.snapshots,
        notify=events,
        start=journal.content.steps,
        history=[(_step(e), _evaluation(e)) for e in earlier if e.get("event") == "evaluation"],
    )
    if isinstance(engine, Workers):
        told = lambda text: events("worker", {"step": trainer.step, "text": text})  # noqa: E731
        folder.want_workers(None)  # what was asked of an earlier driver
        engine.join(str(folder.snapshots.folder), told, folder.wanted_workers)
    known = [e for e in earlier if e.get("event") == "zero-shot"]
    session = Session(parts, splits, engine, folder, journal, trainer, events, splits.test, list(earlier))
    session.zero_shot = _evaluation(known[-1]) if known else None
    return session


def _prepared(config: RunConfig, task: Task | None) -> tuple[setup.Parts, datasets.Splits]:
    check_installed(config.track)
    parts = setup.prepare(config, task)
    return parts, datasets.splits_of(parts.config, parts.task)


def _method(config: RunConfig, objective: Objective | None) -> tuple[Spsa, Sgd, str | Objective]:
    assert config.lr is not None and config.eps is not None and config.steps is not None
    name = "cross_entropy" if config.objective == "vocabulary_cross_entropy" else config.objective
    chosen = objective or (name if name in OBJECTIVES else imported(name))
    assert config.schedule is not None
    rate = schedule(config.schedule, config.lr, config.steps, config.warmup)
    return Spsa(config.seed, config.eps, config.samples), Sgd(rate, config.weight_decay or 0.0, config.clip), chosen


def _reads_texts(parts: setup.Parts, objective: str | Objective) -> bool:
    """F1 of a generation task, or a function marked with `over_texts`."""
    return (objective == "f1" and parts.task.kind == "generation") or getattr(objective, "over_texts", False)


def _seen_by(parts: setup.Parts, engine: Engine, objective: str | Objective) -> Engine:
    """The engine as the objective sees it: through its scores, or through the text it generates."""
    if not _reads_texts(parts, objective):
        return engine
    reward = text_f1 if isinstance(objective, str) else cast(Reward, objective)
    return cast(Engine, Rewarded(engine, parts.decode, reward, parts.config.max_new_tokens))


def _named(objective: Callable[..., Any]) -> str:
    """How a function given in Python is remembered: it cannot be found again by name."""
    return f"<function {getattr(objective, '__name__', type(objective).__name__)}>"


def _same_objective(recorded: str, objective: Objective | None, named: str | None) -> None:
    """Functions of one's own are given again: a stranger's journal must not choose what is imported and called."""
    given = _named(objective) if objective else named
    if recorded.startswith("<") and given != recorded:
        raise ConfigError(f"this run's objective was the Python {recorded[1:-1]}; pass it as objective= to resume")
    if given and given != recorded:
        raise ConfigError(f"this run's objective is {recorded!r}; a resumed run keeps it")
    if ":" in recorded and given is None:
        raise ConfigError(
            f"this run's objective is a function of your own; name it again to resume: --objective {recorded}"
        )


def _named_again(remembered: dict[str, Any], given: dict[str, Any]) -> None:
    """Whom a run talks to over the network is named again: a stranger's folder must not choose where prompts and weights go,
    nor whose Ray hands code to this machine."""
    for name, option in OPTIONS.items():
        value = remembered.get(name)
        if option.contacts and name not in given and option.contacts(value):
            raise ConfigError(
                f"this run used {option.flag} {value!r}; name it again, or another, to resume: "
                f"{option.flag} {option.placeholder}"
            )


def _evaluation(line: dict[str, Any]) -> Evaluation:
    try:
        figures = {name: float(line[name]) for name in ("value", "accuracy", "loss", "calibrated")}
        low, high = (float(end) for end in line["interval"])
        return Evaluation(metric=str(line["metric"]), interval=(low, high), n=int(line["n"]), **figures)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise JournalError(f"metrics.jsonl has an evaluation without {error}; delete the line and resume") from None


def _step(line: dict[str, Any]) -> int:
    if not isinstance(step := line.get("step"), int):
        raise JournalError("metrics.jsonl has an evaluation without 'step'; delete the line and resume")
    return step


def _word(space: str) -> str:
    return space if space.isalnum() else "pattern"
