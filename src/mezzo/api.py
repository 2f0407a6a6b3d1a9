"""What a Python user calls. Each function is a command of the command line with the same options, by keyword."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mezzo import reports
from mezzo.config import OPTIONS, RunConfig, from_file, from_mapping
from mezzo.engines.base import Engine
from mezzo.engines.hf_hub import family_of, load_config
from mezzo.errors import ConfigError, DataError, JournalError, LabelError, MezzoError, MezzoWarning, RunFailed
from mezzo.evaluation.evaluate import Evaluation, refuse_nan
from mezzo.evaluation.rewards import NO_REWARD, REWARDS, check_function, explain_no_reward, is_reward
from mezzo.journal.compact import export_compact
from mezzo.journal.content import NAME as JOURNAL
from mezzo.journal.journal import repair_journal
from mezzo.replay.prefix_start import read_start
from mezzo.replay.replay import Verified
from mezzo.replay.replay import verify as verify_content
from mezzo.runs import datasets
from mezzo.runs.build import new_run, resume_run
from mezzo.runs.defaults import SETTINGS, untrained_space, without_found
from mezzo.runs.events import Observer
from mezzo.runs.folder import Folder
from mezzo.runs.model_card import model_card
from mezzo.runs.objectives import find_function, find_reward
from mezzo.runs.predict import predict_rows
from mezzo.runs.recorded_evaluations import best_step
from mezzo.runs.reopen import open_base_engine, open_journal, open_run
from mezzo.runs.resolve import resolve_setup
from mezzo.runs.result import Run
from mezzo.runs.resume_checks import CONTACTING, RESUMABLE, Function
from mezzo.runs.session import Session
from mezzo.runs.setup import Setup
from mezzo.runs.suggestion import propose_task, task_options
from mezzo.tasks import Task, bundled_data
from mezzo.tasks.proposal import Proposal
from mezzo.types import StepRecord


def silent(event: str, values: dict[str, Any]) -> None:
    """Show nothing."""


def finetune(
    model: str | None = None,
    *,
    config: str | Path | None = None,
    resume: str | Path | None = None,
    objective: str | Function | None = None,
    task: str | Path | Mapping[str, Any] | Task | None = None,
    observe: Observer | None = None,
    **options: Any,
) -> Run:
    """Fine-tune a model with forward passes only (or, for comparison, `method="adam"`) and return the run.

    Without arguments, the bundled masked LM learns the bundled questions. `options` are those of `mezzo train --help`;
    `config` is a TOML file of them; `resume` continues a run folder. `task` may also be a dict or a Task, and `objective` a
    function of (scores[probes, examples, candidates], batch) that returns one loss per probe, or one with a parameter
    `completion` that rewards generated text. `train`, `dev` and `test` are
    files, lists of dicts or Hugging Face datasets. `observe` is called with every event of the run and may raise
    `StopTraining`; without it, a notebook shows the run while it trains.
    """
    observe = observe or reports.notebook_observer() or silent
    options |= {"config": config, "resume": resume, "objective": objective, "task": task, "observe": observe}
    return open_session(model, **options).train()


def open_session(
    model: str | None = None,
    *,
    config: str | Path | None = None,
    resume: str | Path | None = None,
    objective: str | Function | None = None,
    task: str | Path | Mapping[str, Any] | Task | None = None,
    observe: Observer = silent,
    **options: Any,
) -> Session:
    """As `finetune`, but hands out the run before it starts: iterate `records()`, then call `result()`."""
    given, function = merge_options(model, task, objective, options)
    if resume is not None:
        refuse_changes({**given, **({"task": task} if task is not None else {})}, config)
        return resume_run(resume, observe, given, function)
    return new_run(resolve(prepare_options(given, config, task, function, observe)), observe, function)


def merge_options(
    model: str | None, task: Any, objective: str | Function | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], Function | None]:
    """All options that are given as such, and the objective that is a function."""
    given = {**options, **({"model": model} if model is not None else {})}
    given |= {"task": str(task)} if isinstance(task, (str, Path)) else {}
    given |= {"objective": objective} if isinstance(objective, str) else {}
    return given, None if isinstance(objective, str) else objective


def prepare_options(
    given: dict[str, Any],
    config: str | Path | None,
    task: Any,
    function: Function | None,
    observe: Observer,
) -> dict[str, Any]:
    """The options of a new run as plain values: with those of the file, the task and the data that were given in Python."""
    rows = {name: given.pop(name) for name in ("train", "dev", "test") if not _is_path(given.get(name))}
    rows = {name: list(source) if isinstance(source, Iterator) else source for name, source in rows.items()}
    named = {*given, *(("objective",) if function else ())}
    values = {**(from_file(Path(config), named) if config else {}), **given}
    values |= {"task": _written_task(task, values)} if isinstance(task, (Mapping, Task)) else {}
    values = with_task(values, rows.get("train"), observe, function)
    found = datasets.splits_with_train(rows.get("train", values.get("train")), resolve(values))
    rows |= {split: part for split, part in found.items() if split not in rows and not _is_path(part)}
    files = {split: part for split, part in found.items() if split not in rows}
    if files:
        shown = " and ".join(f"{Path(file).name} as {split}" for split, file in files.items())
        observe("data", {"text": f"{values['train']} also has {shown}"})
    values |= files
    if rows:
        values |= datasets.save_rows(rows, resolve(values))
    return {name: value for name, value in values.items() if value is not None}


def _written_task(task: Mapping[str, Any] | Task, options: Mapping[str, Any], run: str | Path | None = None) -> str:
    """A task given in Python as the value of the option, for the family of the model or of the run."""
    model = resolve({name: options.get(name) for name in ("model", "remote_code")})
    family = open_journal(run).header.family if run else family_of(load_config(model.model, model.remote_code))
    return datasets.write_task(datasets.match_family(task, family, str(run or model.model)))


def _is_path(value: Any) -> bool:
    return value is None or isinstance(value, (str, Path))


def refuse_changes(given: Mapping[str, Any], config: str | Path | None) -> None:
    """A resumed run is the same run: only its limits and its machine may differ. What contacts other machines is compared
    with the journal."""
    refused = sorted(set(given) - {*RESUMABLE, *CONTACTING, "objective"}) + (["a config file"] if config else [])
    if refused:
        raise ConfigError(
            f"a resumed run keeps its settings; {', '.join(refused)} cannot change (only {', '.join(RESUMABLE)} can)"
        )


def resolve(values: Mapping[str, Any]) -> RunConfig:
    """Options to a checked RunConfig; None means not given."""
    return from_mapping({key: value for key, value in values.items() if value is not None})


def with_task(
    values: Mapping[str, Any], rows: Any = None, observe: Observer = silent, function: Function | None = None
) -> dict[str, Any]:
    """The options with a task: a proposed one for the user's own training data (`rows`, or a file) that comes without; for a
    reward, `prompts`."""
    source = rows if rows is not None else values.get("train")
    if values.get("task") or source is None:
        return dict(values)
    function = function or find_function(str(values.get("objective", "")))
    if function is not None:
        check_function(function)
    named = values.get("objective") if values.get("method") == "es" else None
    if is_reward(function) or named in REWARDS:
        return {**values, "task": datasets.REWARD_TASK}
    if values.get("method") == "es":
        raise ConfigError(NO_REWARD)
    try:
        proposal = propose_task(resolve(values), source)
    except LabelError as error:
        raise explain_no_reward(function, error) from None
    observe("proposal", {"text": str(proposal), **proposal.to_dict()})
    return {**values, **task_options(proposal)}


def rewards_text(config: RunConfig) -> bool:
    """Whether a run is trained on a reward of generated text, as far as that is known without its model."""
    function = find_function(config.objective)
    if function is not None:
        return is_reward(function)
    try:
        return find_reward(config.objective, datasets.find_task(config, "causal")) is not None
    except MezzoError:  # what is wrong with the task is said later
        return False


def suggest_task(data: str | Path | Sequence[Mapping[str, Any]], model: str | None = None, **options: Any) -> Proposal:
    """The task that a run on `data` would use if none is named, with its templates ranked by the untrained model."""
    return propose_task(resolve({**options, "model": model}), data)


def prepared_config(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The resolved configuration by group, as `mezzo train` would run it."""
    values = with_task(values)
    config = resolve(values | datasets.splits_with_train(values.get("train"), resolve(values)))
    resolved = without_found(resolve_setup(config, function=find_function(config.objective)).config, config).to_dict()
    grouped: dict[str, dict[str, Any]] = {}
    for name, option in OPTIONS.items():
        grouped.setdefault(option.group, {})[name] = resolved[name]
    return grouped


# ---- runs and journals


def verify(path: str | Path, model: str | None = None, device: str | None = None, repair: bool = False) -> Verified:
    """Rebuild a run from its base model and journal and compare digests.

    With `repair`, a damaged journal is first cut before the damage, and what was cut is kept in a file of its own.
    """
    copy = repair_journal(path) if repair else None
    content = open_journal(path)
    engine, _ = open_base_engine(content, model=model, device=device)
    try:
        kept = Folder(Path(path)).snapshots if Path(path).is_dir() else None
        return dataclasses.replace(verify_content(engine, content, kept), copy=copy)
    except JournalError as error:
        raise (JournalError(f"{error}; what was damaged is now in {copy}") if copy else error) from None
    finally:
        engine.close()


def report(*runs: str | Path, out: str | Path | None = None, plots: str | Path | None = None) -> Path:
    """Write what became of runs as one HTML page and return its path; `plots` is a folder for the charts as files.

    A folder stands for all runs in it. The figures of several runs are also written as CSV and JSON beside the page.
    """
    if not runs:
        raise ConfigError("name at least one run folder to report on")
    path, found = reports.write_page(runs, out)
    if plots is not None:
        reports.write_plots(found.runs, Path(plots))
    return path


def export(
    path: str | Path,
    kind: str,
    out: str | Path | None = None,
    at: int | None = None,
    model: str | None = None,
    device: str | None = None,
) -> Path:
    """Write a run as a PEFT `adapter`, a Hugging Face `model` or a compact `journal`."""
    from mezzo.runs.export import EXPORTS

    if kind not in EXPORTS and kind != "journal":
        raise ConfigError(f"a run is exported as adapter, model or journal, not {kind!r}")
    content = open_journal(path)
    if out is None and not Path(path).is_dir():
        raise ConfigError(f"{path} is a file: say where to export to with --out")
    if kind == "journal":
        target = Path(out) if out else Path(path) / "journal.mezzo"
        if at is not None:
            raise ConfigError("a compact journal holds the whole run; --at goes with adapter and model")
        if target.is_dir():
            raise ConfigError(f"--out {target} is a folder; name a file")
        start = read_start(content) if content.header.start else b""
        export_compact(content, target, best_step(content), start)
        return target
    target = Path(out) if out else Path(path) / kind
    position = best_step(content) if at is None else at
    engine, setup = open_run(path, position, model=model, device=device)
    noted = Folder(Path(path)).metrics() if Path(path).is_dir() else ()
    events = [*content.events, *(event for event in noted if event.get("event") == "result")]
    try:
        EXPORTS[kind](engine, setup, target, model_card(kind, content.header, events, position, content.steps))
    finally:
        engine.close()
    return target


def push_to_hub(
    run: str | Path,
    name: str,
    kind: str = "model",
    *,
    at: int | None = None,
    model: str | None = None,
    device: str | None = None,
    private: bool = False,
) -> str:
    """Export a run and upload it to the Hugging Face Hub as `name`; the card's metadata has the figures. Returns its address."""
    from huggingface_hub import HfApi

    if kind not in ("model", "adapter"):
        raise ConfigError(f"a model or an adapter can be pushed, not {kind!r}")
    with tempfile.TemporaryDirectory() as folder:
        exported = export(run, kind, Path(folder) / kind, at, model, device)
        try:
            hub = HfApi()
            address = hub.create_repo(name, private=private, exist_ok=True)
            hub.upload_folder(repo_id=name, folder_path=exported, commit_message=f"mezzo export {kind}")
        except (OSError, ValueError, RuntimeError) as error:  # no token, no network, a name that is none
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RunFailed(f"{name} was not pushed: {reason[:300]}; the run itself is as it was") from None
    return str(address)


# ---- using a model


def evaluate(
    run: str | Path | None = None,
    *,
    data: str | Path | Sequence[Mapping[str, Any]] | None = None,
    at: int | None = None,
    split: str = "test",
    linear_probe: bool = False,
    **options: Any,
) -> Evaluation:
    """Evaluate a run's best checkpoint, or (with `model=`) a model as it is: the zero-shot figure.

    With `linear_probe`, a new linear head is first fitted to the examples of `train`, on features of the frozen model.
    """
    engine, setup = _open(run, at, options)
    if setup.config.method == "es" and setup.reward is None:
        engine.close()
        raise ConfigError(
            "this run was trained on a reward of your own; name it again to evaluate: --objective MODULE:FUNCTION "
            "(in Python, objective= takes the function)"
        )
    source = data if data is not None else bundled_data(setup.task.name, split)
    if source is None:
        raise DataError(f"task {setup.task.name!r} has no bundled data: pass --data FILE")
    config = setup.config
    found, _ = datasets.load_labelled(source, setup.task, split, config, data is not None, not setup.needs_labels)
    try:
        measure = setup.evaluate_linear_probe if linear_probe else setup.evaluate_in_detail
        detail = measure(engine, datasets.take_some(found, config.eval_limit))
        refuse_nan(np.array(detail.evaluation.loss) if detail.scores is None else detail.scores)
        for kind, text in (setup.reward.messages if setup.reward else {}).items():
            warnings.warn(f"a call of the reward failed ({kind}): {text}", MezzoWarning, stacklevel=2)
        return detail.evaluation
    finally:
        engine.close()
        if setup.reward:
            setup.reward.close()


def predict(
    rows: str | Path | TextIO | Iterable[Mapping[str, Any] | str],
    run: str | Path | None = None,
    *,
    at: int | None = None,
    batch: int = 256,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Every row with all its columns, its `prediction` and the `probabilities` of the labels.

    `rows` are a data file, an open file, texts, or mappings with the task's columns. A generation task has no probabilities.
    """
    engine, setup = _open(run, at, options)
    try:
        yield from predict_rows(engine, setup, rows, batch)
    finally:
        engine.close()


def assumed_task(run: str | Path | None, options: dict[str, Any]) -> str:
    """What is said about the task where neither a run nor an option names it; empty where one does."""
    run, options = _name_model(run, options)
    if run is not None or options.get("task"):
        return ""
    return datasets.describe_assumed_task(resolve(options), is_reward(find_function(options.get("objective") or "")))


def _name_model(run: str | Path | None, options: dict[str, Any]) -> tuple[str | Path | None, dict[str, Any]]:
    """A folder of `mezzo export RUN model` is a model, although it is named where a run is."""
    if run is None or not (Path(run) / SETTINGS).is_file() or (Path(run) / JOURNAL).is_file():
        return run, options
    return None, {**options, "model": str(run)}


def _open(run: str | Path | None, at: int | None, options: dict[str, Any]) -> tuple[Engine, Setup]:
    run, options = _name_model(run, options)
    if isinstance(task := options.get("task"), (Mapping, Task)):
        options = {**options, "task": _written_task(task, options, run)}
    objective = options.get("objective")
    function = objective if callable(objective) else find_function(objective or "")
    options = {name: value for name, value in options.items() if not (name == "objective" and function is objective)}
    if run is None and is_reward(function) and not options.get("task"):
        options |= datasets.assume_prompts(resolve(options))
    if run is not None:
        return open_run(run, at, function, **options)
    # Demonstrations are drawn from all of --train: nothing is held out of it, since nothing is trained.
    whole = {"dev": options.get("train")} if options.get("demonstrations") and not options.get("k") else {}
    config = resolve({**whole, **options})
    config = config.replace(space=config.space or untrained_space(config))
    setup = resolve_setup(config, function=function, trained=False)
    return setup.open_engine(), setup


def records(path: str | Path) -> Sequence[StepRecord]:
    """The steps of a run."""
    return open_journal(path).records


def config_of(path: str | Path) -> dict[str, Any]:
    """The resolved configuration of a run folder."""
    return Folder.open(path).read_config()
