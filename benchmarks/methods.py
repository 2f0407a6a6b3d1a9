"""Training methods at equal example-forwards (forward passes × examples): a run for each model, task, space, k, seed, method, lr.

python benchmarks/methods.py --data DIR --tasks trec,sst-5 --k all --spaces full,lora --processes 16 --limit 1500 --out runs.jsonl
python benchmarks/methods.py --table runs.jsonl --picture runs.svg

A finished run is one JSON line; a repeated command runs what is missing. Test and dev examples are scored at checkpoints, which
does not count. Learning rates and batch sizes are chosen by dev loss at the end, never by test.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import curves
from baselines import BASELINES, FACTORS, make_baseline
from results import FILES, Job, data_options, run_all

from mezzo.config import from_mapping
from mezzo.engines.base import Engine
from mezzo.errors import MezzoError
from mezzo.evaluation.evaluate import score_prompts
from mezzo.method.gradient import PASSES
from mezzo.method.method import Method, answer_questions
from mezzo.method.objectives import accuracy_of, cross_entropy
from mezzo.method.space import SPACES
from mezzo.runs.budget import parse_budget
from mezzo.runs.methods import make_method
from mezzo.runs.resolve import resolve_setup
from mezzo.runs.setup import Setup
from mezzo.runs.trainer import MAX_SKIPS
from mezzo.tasks import get_task
from mezzo.types import Batch, GradientStep, Prompt, Question, StepRecord

METHODS = ("solve", *(name + shape for name in BASELINES for shape in ("", "-linear")), "adam")
ADAM_RATE = 3e-5
# Checkpoints: the budget and what is left of it after each division by √2, as far as a 32nd.
HALVINGS = 5
Figures = dict[str, float]


def checkpoints_of(budget: int) -> list[int]:
    return [0, *(round(budget * 2 ** (-half / 2)) for half in range(2 * HALVINGS, -1, -1))]


def train(engine: Engine, method: Method, checkpoints: list[int], test: Batch, dev: Batch) -> list[Figures]:
    """Train to the last checkpoint. The figures at each one are those of the last weights that cost no more."""
    curve: list[Figures] = []
    spent = step = skips = 0
    while True:
        record = None if method.finished or skips == MAX_SKIPS else ask(engine, method, step)
        cost = math.inf if record is None else method.cost(record)
        if due := [at for at in checkpoints[len(curve) :] if spent + cost > at]:
            figures = {"spent": spent, "steps": step, **evaluate(engine, test, "test"), **evaluate(engine, dev, "dev")}
            curve += [{"at": at, **figures} for at in due]
        if record is None or len(curve) == len(checkpoints):
            return curve
        engine.apply([record.update])
        method.observe(record)
        skips = skips + 1 if record.skipped else 0
        spent += method.cost(record)
        step += 1


def ask(engine: Engine, method: Method, step: int) -> StepRecord:
    questions = method.step(step)

    def answer(asked: Question | GradientStep) -> Any:
        if isinstance(asked, GradientStep):
            return engine.descend(asked)  # type: ignore[attr-defined]
        return engine.score(asked.batch, asked.probes)

    return answer_questions(questions, next(questions), answer)


def evaluate(engine: Engine, batch: Batch, name: str) -> Figures:
    scores = score_prompts(engine, batch.prompts, batch.readout)
    return {
        f"{name}_loss": float(cross_entropy(scores[None].astype("float32"), batch)[0]),
        f"{name}_accuracy": accuracy_of(scores.argmax(axis=1), batch.labels),
    }


def run(job: Job) -> dict[str, Any]:
    """One run in this process. A failed one has an `error` instead of a curve, and is tried again by the next command."""
    key, began = job["key"], time.monotonic()
    try:
        curve = run_method(job)
    except Exception as error:  # one bad run must not end the others
        return {**key, "error": f"{type(error).__name__}: {error}"[-800:]}
    return {**key, "curve": curve, "seconds": round(time.monotonic() - began, 1)}


def run_method(job: Job) -> list[Figures]:
    key, options = job["key"], job["options"]
    own: dict[str, Any] = {"method": "spsa"}
    if key["method"] == "solve":
        own = {"method": "solve", "budget": str(key["budget"])}
    if key["method"] == "adam":  # a ceiling: all parameters, whatever the space of the others
        steps = max(1, key["budget"] // (PASSES * key["batch"]))
        own = {"method": "adam", "space": "full", "lr": key["lr"], "batch_size": key["batch"], "steps": steps}
    baseline = BASELINES.get(key["method"].partition("-")[0])
    setup = resolve_setup(from_mapping({**options, **own, **(baseline.options if baseline else {})}))
    examples = encode(json.dumps(options))
    setup.__dict__.update(splits=examples.splits, train_prompts=examples.train_prompts)  # as if it had encoded them
    if baseline:
        method: Method = make_baseline(key["method"], setup, key["lr"], key["batch"], key["budget"])
    else:
        method = make_method(setup, setup.objective)
    test, dev = (Batch(encode_part(json.dumps(options), part), setup.readout) for part in ("test", "dev"))
    engine = setup.open_engine()
    try:
        return train(engine, method, checkpoints_of(key["budget"]), test, dev)
    finally:
        engine.close()


@lru_cache(maxsize=1)
def encode(options: str) -> Setup:
    """The examples of a cell and seed, which its next run in this process uses again."""
    setup = resolve_setup(from_mapping(json.loads(options)))
    _ = setup.train_prompts
    return setup


@lru_cache(maxsize=2)
def encode_part(options: str, part: str) -> tuple[Prompt, ...]:
    setup = encode(options)
    return setup.encode(getattr(setup.splits, part))


def settings_of(method: str, space: str, batch_sizes: list[int]) -> list[dict[str, float]]:
    """The grid of a method, or the one learning rate after an @; nothing where it does not apply to the space."""
    name, _, rate = method.partition("@")
    if name == "solve":
        return [{"lr": 0.0, "batch": 0}]
    if name == "adam":
        return [{"lr": float(rate or factor * ADAM_RATE), "batch": 16} for factor in ((1,) if rate else FACTORS)]
    middle = BASELINES[name.partition("-")[0]].rates.get(space)
    rates = [float(rate)] if rate else [float(f"{factor * middle:.3g}") for factor in FACTORS] if middle else []
    return [{"lr": lr, "batch": batch} for lr in rates for batch in batch_sizes]


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Cell by cell, so that whole cells are finished early; within a cell seed by seed, whose runs share their examples."""
    budget = int(parse_budget(options.budget).forwards)
    jobs = []
    for model, task, space, k, seed in itertools.product(
        options.models, options.tasks, options.spaces, options.k, options.seeds
    ):
        chosen: dict[str, Any] = {
            **(data_options(task, options.data, options.out.parent) if task in FILES else {}),
            "model": model,
            "task": task,
            "space": space,
            "k": None if k == "all" else int(k),
            "seed": int(seed),
            "data_seed": int(seed),
            "eval_limit": options.eval_limit,
            "device": options.device,
            "threads": 1,
            **dict(options.options),
        }
        chosen = {name: value for name, value in chosen.items() if value is not None}
        cell = {"model": model, "task": task, "space": space, "k": k, "budget": budget, "seed": int(seed)}
        for method in options.methods:
            for setting in settings_of(method, space, options.batch_sizes):
                key = {**cell, "method": method.partition("@")[0], **setting}
                jobs.append({"key": key, "options": chosen})
    return jobs


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def words(text: str) -> list[str]:
        return text.split(",")

    default = "solve,spsa,spsa-linear,fzoo-linear,meazo-linear,lozo-linear,adam"
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table of a results file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves as .svg or .png")
    parser.add_argument("--models", type=words, default=["mezzo/roberta-mini"], help="bundled names or folders")
    parser.add_argument("--data", type=Path, metavar="DIR", help="data sets, laid out as GLUE and LM-BFF have them")
    parser.add_argument("--tasks", type=words, default=["trec"], help=f"{', '.join(FILES)}, or one with bundled data")
    parser.add_argument("--spaces", type=words, default=["full"])
    parser.add_argument("--k", type=words, default=["all"], help="examples per label, such as 16,512,all")
    parser.add_argument("--seeds", type=words, default=["13", "21", "42"])
    parser.add_argument(
        "--methods", type=words, default=words(default), help=f"of {', '.join(METHODS)}; NAME@LR: no grid"
    )
    parser.add_argument("--batch-sizes", type=lambda text: [int(size) for size in text.split(",")], default=[16, 64])
    parser.add_argument("--budget", default="320k", help="example-forwards of every run")
    parser.add_argument("--eval-limit", type=int, help="dev and test examples at most [all]")
    parser.add_argument(
        "--options",
        type=lambda text: [word.split("=", 1) for word in words(text)],
        default=[],
        metavar="NAME=VALUE,…",
        help="other options of every run, such as factors=both; results need a file of their own",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=8, help="runs that share the device")
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds after which to stop; nothing finished is lost"
    )
    parser.add_argument("--out", type=Path, default=Path("methods.jsonl"))
    options = parser.parse_args(arguments)
    try:
        check(options)
    except MezzoError as error:
        parser.error(str(error))
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse what would fail in every run."""
    for name, known in (("methods", METHODS), ("spaces", SPACES)):
        for value in getattr(options, name):
            if value.partition("@")[0] not in known:
                raise MezzoError(f"--{name} has no {value!r}, only {', '.join(known)}")
    if options.picture and options.picture.suffix not in (".svg", ".png"):
        raise MezzoError(f"--picture draws .svg or .png, not {options.picture.name!r}")
    if options.table:
        if not curves.read(options.table):
            raise MezzoError(f"there are no finished runs in {str(options.table)!r}")
        return
    for task in options.tasks:
        get_task(task)
        for file in FILES.get(task, ()):
            if options.data is None or not (options.data / file).is_file():
                raise MezzoError(f"task {task!r} needs {file} in --data DIR")
    if parse_budget(options.budget).forwards == math.inf:
        raise MezzoError(f"--budget counts example-forwards, such as 320k, not {options.budget!r}")


def main() -> None:
    options = parse()
    if not options.table:
        os.environ["OMP_NUM_THREADS"] = "1"  # the processes share the cores
        done = [curves.key_of(row) for row in curves.read(options.out)]
        jobs = [job for job in jobs_of(options) if curves.key_of(job["key"]) not in done]
        run_all(jobs, options.processes, options.out, options.limit, run, shown=200)
    rows = curves.read(options.table or options.out)
    print(curves.table(rows))
    if options.picture and rows:
        curves.draw(rows, options.picture)


if __name__ == "__main__":
    main()
