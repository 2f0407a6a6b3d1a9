"""Results on real tasks: every (task, k, seed, method) as a run of its own, several at a time; one JSON line each.

python benchmarks/results.py --data DIR --tasks sst-2,trec --k 16,512 --seeds 13,21,42 --methods full,lora,accuracy,adam
python benchmarks/results.py --table results.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = {
    "sst-2": ("SST-2/train.tsv", "SST-2/dev.tsv"),
    "sst-5": ("SST-5/train.txt", "SST-5/test.txt"),
    "mr": ("MR/all.txt", "MR/all.txt"),  # one file: `held_out` makes two of it
    "trec": ("TREC/train.txt", "TREC/test.txt"),
    "rte": ("RTE/train.tsv", "RTE/dev.tsv"),
}
Job = dict[str, Any]
METHODS: dict[str, dict[str, Any]] = {
    "solve": {"method": "solve", "space": "lora", "steps": None, "batch_size": None},
    "full": {"method": "spsa", "space": "full"},
    "lora": {"method": "spsa", "space": "lora"},
    "head": {"method": "spsa", "space": "head"},
    "prefix": {"method": "spsa", "space": "prefix"},
    "adam": {"method": "adam", "space": "full", "batch_size": 16},
    "accuracy": {"method": "spsa", "space": "full", "objective": "accuracy", "eps": 1e-2, "lr": 3e-5},
}


def one(job: dict[str, Any]) -> dict[str, Any]:
    """One run in this process, through the public interface."""
    began = time.monotonic()
    import mezzo

    with tempfile.TemporaryDirectory() as out:
        run = mezzo.finetune(**job["options"], out=out)
        events = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
        dev = max(event["value"] for event in events if event["event"] == "evaluation")
    found = {**run.to_dict(), "dev": dev}
    keys = (
        "value",
        "dev",
        "interval",
        "zero_shot",
        "zero_shot_calibrated",
        "best_step",
        "steps",
        "zero_slope_share",
        "example_forwards",
        "digest",
    )
    return {**job["key"], **{k: found[k] for k in keys if k in found}, "seconds": round(time.monotonic() - began, 1)}


def held_out(path: Path, folder: Path) -> tuple[str, str]:
    """A file without a test part of its own, split: every fifth line is test."""
    lines = path.read_bytes().splitlines(keepends=True)
    parts = {"train": [line for n, line in enumerate(lines) if n % 5], "test": lines[::5]}
    for name, kept in parts.items():
        (folder / f"{path.parent.name}-{name}.txt").write_bytes(b"".join(kept))
    return str(folder / f"{path.parent.name}-train.txt"), str(folder / f"{path.parent.name}-test.txt")


def data_options(task: str, data: Path, folder: Path) -> dict[str, str]:
    """The options that name a task's files under `data` and say how to read them; `folder` takes files that must be made."""
    train, test = (str(data / name) for name in FILES[task])
    if task == "mr":
        train, test = held_out(data / FILES[task][0], folder)
    chosen = {"train": train, "test": test}
    if task in ("trec", "mr"):
        chosen["encoding"] = "latin-1"
    if task == "trec":
        chosen["id_order"] = "lm-bff"
    return chosen


def jobs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The grid, longest first, so that the last to finish are short."""
    jobs = []
    grid = itertools.product(
        options.methods.split(","), options.k.split(","), options.tasks.split(","), options.seeds.split(",")
    )
    for method, k, task, seed in grid:
        name, _, changes = method.partition("@")
        chosen: dict[str, Any] = {
            **data_options(task, options.data, options.out.parent),
            "model": options.model,
            "task": task,
            "k": int(k),
            "seed": int(seed),
            "data_seed": int(seed),
            "eval_limit": 1000,
            "device": options.device,
            "threads": 1,
        }
        job = {"key": {"task": task, "k": int(k), "seed": int(seed), "method": method}, "options": chosen}
        extra = dict(pair.split("=") for pair in changes.split(":")) if changes else {}
        chosen.update({"steps": options.steps, "batch_size": 64, **METHODS[name], **extra})
        jobs.append(job)
    return jobs


def attempted(job: Job) -> dict[str, Any]:
    try:
        return one(job)
    except Exception as error:  # one bad run must not end the others
        return {**job["key"], "error": f"{type(error).__name__}: {error}"[-800:]}


def run_all(
    jobs: list[Job],
    at_once: int,
    out: Path,
    limit: float,
    run: Callable[[Job], dict[str, Any]] = attempted,
    shown: int | None = None,
) -> None:
    """Processes that take one job after the other: starting one for each would cost more than a short run. Each result is a line
    of `out`, whose first `shown` characters are printed, errors whole."""
    began, left = time.monotonic(), len(jobs)
    torn = out.exists() and out.read_bytes()[-1:] not in (b"", b"\n")
    with multiprocessing.get_context("spawn").Pool(at_once) as pool, out.open("a") as file:
        file.write("\n" if torn else "")  # a line that a kill cut off must not take the next one with it
        found = pool.imap_unordered(run, jobs)
        try:
            while left:
                row = found.next(timeout=max(0.0, limit - (time.monotonic() - began)))
                line = json.dumps(row)
                left -= 1
                file.write(line + "\n")
                file.flush()
                print(line if "error" in row else line[:shown], flush=True)
        except multiprocessing.TimeoutError:
            print(f"time is up: {left} of {len(jobs)} not finished", flush=True)


def table(path: Path) -> None:
    """Mean ± standard deviation over seeds, in percent."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            groups.setdefault((row["task"], row["k"], row["method"]), []).append(row)
    print(
        "| task | k | method | zero-shot | calibrated | result | seeds | example-forwards |\n|---|---|---|---|---|---|---|---|"
    )
    for (task, k, method), found in sorted(groups.items()):
        keys = ("zero_shot", "zero_shot_calibrated")  # candidates have no calibrated figure
        zero, calibrated = ("–" if found[0][key] is None else f"{100 * found[0][key]:.1f}" for key in keys)
        values = [100 * row["value"] for row in found]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        forwards = found[0].get("example_forwards", "–")
        result = f"{statistics.mean(values):.1f}{spread}"
        print(f"| {task} | {k} | {method} | {zero} | {calibrated} | {result} | {len(values)} | {forwards} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    parser.add_argument("--model", default="mezzo/roberta-mini")
    parser.add_argument("--data", type=Path, help="folder with the data sets, laid out as GLUE and LM-BFF have them")
    parser.add_argument("--tasks", default="sst-2")
    parser.add_argument("--k", default="16,512")
    parser.add_argument("--seeds", default="13,21,42")
    parser.add_argument(
        "--methods", default="full,lora,accuracy,adam", help="with changes as full@lr=1e-5:schedule=linear"
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--at-once", type=int, default=8, help="runs that share the device")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    options = parser.parse_args()
    if options.table:
        table(options.table)
    else:
        run_all(jobs_of(options), options.at_once, options.out, options.limit)
        table(options.out)


if __name__ == "__main__":
    main()
