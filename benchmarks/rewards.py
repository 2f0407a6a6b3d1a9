"""Texts per second of a population, compared with bare SGLang that serves the same prompts under one adapter.

python benchmarks/rewards.py --model DIR --dtype bfloat16 --chat --samples 16 --prompts 16 --max-new-tokens 32,256 [--no-graphs]
python benchmarks/rewards.py --model mezzo/llama-mini --samples 2 --prompts 4 --max-new-tokens 8 --rounds 1    # a CPU

Prompts are those of `countdown`; texts are greedy. A round has directions × 2 × prompts texts of prompts that were not used
before. Every contender runs in a process of its own, one after the other or, with --together, all at once: they then take turns,
round by round, and memory is not measured.

mezzo      mezzo's engine on SGLang: an adapter for each member, written from its seed; what prompts share is sent first
same       bare SGLang, the same options, one adapter: the same prompts as often, so that it computes each of them once. A
           member of a population has other weights and has to compute its own prompts: the longer the texts, the less it costs
different  the same with as many prompts that all differ, of which its prefix cache finds the common beginning
torch      mezzo's torch engine

Texts end where the model ends them, so that rates are of the tokens that were generated; an end token counts. Memory is that of
the whole GPU, less what was used before; SGLang reserves most of it at its start. Where both of mezzo's engines
run, the texts of the first round are compared up to their eighth token.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

CONTENDERS = ("mezzo", "same", "different", "torch")
POLL_SECONDS = 0.5
# Tokens of a text that are compared: later ones of 16-bit engines differ by rounding alone.
COMPARED = 8
WITHOUT_GRAPHS = {"disable_cuda_graph": True, "disable_overlap_schedule": True}
# The texts of a round, by its number and the most tokens of a text.
Round = Callable[[int, int], list[Any]]


def make_setup(options: argparse.Namespace, engine: str) -> Any:
    """A run on countdown, up to its engine."""
    from mezzo.config import RunConfig
    from mezzo.runs.resolve import resolve_setup

    config = RunConfig(
        model=options.model,
        engine=engine,
        task="countdown",
        objective="countdown",
        method="es",
        space="lora",
        dtype=options.dtype,
        device=options.device,
        chat=options.chat,
        template=options.template,
        samples=options.samples,
        batch_size=options.prompts,
        max_new_tokens=max(options.max_new_tokens),
        stop=("",),
        eps=options.eps,
    )
    return resolve_setup(config)


def members_of(setup: Any, number: int) -> list[Any]:
    """Both signs of each direction of a round."""
    from mezzo.types import Probe

    count, eps = setup.config.samples, setup.config.eps
    return [Probe(((number * count + index, sign * eps),)) for index in range(count) for sign in (1, -1)]


def prompts_of(setup: Any, number: int, count: int) -> tuple[Any, ...]:
    """The prompts of a round; they come again when all have been used."""
    known = setup.train_prompts
    return tuple(known[(number * count + index) % len(known)] for index in range(count))


def open_population(options: argparse.Namespace, engine_name: str) -> tuple[Round, Callable[[], None]]:
    """mezzo's own engine."""
    from mezzo.engines import open_engine
    from mezzo.types import Batch

    setup = make_setup(options, engine_name)
    engine: Any = open_engine(engine_name, setup.engine_spec)
    if engine_name == "sglang" and not engine.uses_internals:
        engine.close()
        raise SystemExit("mezzo reaches SGLang by its public interface only, as said above: not measured")

    def generate(number: int, length: int) -> list[Any]:
        batch = Batch(prompts_of(setup, number, options.prompts), setup.readout)
        generation = replace(setup.generation, max_new_tokens=length)
        found = engine.generate(batch, members_of(setup, number), generation)
        return [text for member in found for drawn in member for text in drawn]

    return generate, engine.close


def open_bare(options: argparse.Namespace, different: bool) -> tuple[Round, Callable[[], None]]:
    """SGLang alone, started with the options that mezzo gives it, but for the number of adapters."""
    from mezzo.engines.sglang.adapters import adapter_shape
    from mezzo.engines.sglang.inprocess import launch
    from mezzo.engines.sglang.model_facts import read_model_facts
    from mezzo.engines.sglang.requests import generation_body
    from mezzo.types import Probe

    setup = make_setup(options, "sglang")
    spec, facts = setup.engine_spec, read_model_facts(setup.engine_spec)
    shape = adapter_shape(spec.space, facts.trained)
    assert shape is not None
    engine, processes = launch.start(spec, shape, max_loras_per_batch=2)
    launch.load_zero_adapters(engine, shape, facts, ["one"])

    def generate(number: int, length: int) -> list[Any]:
        members, count = 2 * options.samples, options.prompts
        if different:
            prompts = prompts_of(setup, number, members * count)
        else:
            prompts = prompts_of(setup, number, count) * members
        generation = replace(setup.generation, max_new_tokens=length)
        answers = engine.generate(**generation_body(prompts, [Probe()], generation, ["one"]))
        engine.flush_cache()
        return [answer["output_ids"] for answer in answers]

    return generate, lambda: launch.stop(engine, processes)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """In a process of its own: the rates of one contender, for each length of texts."""
    began, name = time.perf_counter(), options.contender
    if name in ("mezzo", "torch"):
        generate, close = open_population(options, "sglang" if name == "mezzo" else "torch")
    else:
        generate, close = open_bare(options, name == "different")
    try:
        start = {"contender": name, "start_seconds": round(time.perf_counter() - began, 1)}
        if options.turns:
            wait_for_others(options, name)
        return [
            start | measure_length(name, length, options.rounds, generate, options.turns)
            for length in options.max_new_tokens
        ]
    finally:
        close()


def wait_for_others(options: argparse.Namespace, name: str) -> None:
    """Until every contender has started, or ended."""
    (options.turns / f"{name}.ready").touch()
    names = options.contenders.split(",")
    while not all(any((options.turns / f"{each}.{state}").exists() for state in ("ready", "done")) for each in names):
        time.sleep(0.1)


@contextlib.contextmanager
def take_turn(turns: Path | None) -> Iterator[None]:
    """The machine for one contender alone; afterwards the others have time to take it."""
    if turns is None:
        yield
        return
    with (turns / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.05)


def measure_length(name: str, length: int, count: int, generate: Round, turns: Path | None) -> dict[str, Any]:
    with take_turn(turns):
        generate(0, length)  # kernels are compiled, and chosen, by the first
    rounds, starts = [], list[list[int]]()
    for number in range(1, count + 1):
        with take_turn(turns):
            start = time.perf_counter()
            texts = generate(number, length)
            seconds = time.perf_counter() - start
        tokens = sum(map(len, texts))
        rounds.append({"texts": len(texts), "tokens": tokens, "seconds": round(seconds, 3)})
        starts = starts or [list(text[:COMPARED]) for text in texts]
        print(f"{name}: {len(texts)} texts, {tokens} tokens in {seconds:.2f} s", file=sys.stderr, flush=True)
    return {
        "max_new_tokens": length,
        "tokens_per_text": round(sum(each["tokens"] for each in rounds) / sum(each["texts"] for each in rounds), 1),
        "texts_per_s": round(statistics.median(each["texts"] / each["seconds"] for each in rounds), 2),
        "tokens_per_s": round(statistics.median(each["tokens"] / each["seconds"] for each in rounds), 1),
        "rounds": rounds,
        "starts": starts,
    }


def used_memory() -> float | None:
    """MiB that are in use on the GPU, by nvidia-smi or, where that is missing, by CUDA; None without a GPU."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        found = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        return float(found) if found.isdecimal() else None
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**20


def run_contender(name: str, arguments: Sequence[str], limit: float, turns: Path | None = None) -> list[dict[str, Any]]:
    """The rows of a contender, measured in a process of its own; its peak of memory is watched from here, if it runs alone."""
    before, peaks, done = None if turns else used_memory(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            peaks.append((used_memory() or 0.0) - (before or 0.0))

    watcher = threading.Thread(target=watch) if before is not None else None
    with tempfile.TemporaryDirectory() as folder:
        row = Path(folder) / "row.json"
        command = [sys.executable, __file__, *arguments, "--contender", name, "--row", str(row)]
        command += ["--turns", str(turns)] if turns else []
        process = subprocess.Popen(command, start_new_session=True)
        if watcher:
            watcher.start()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return [{"contender": name, "error": f"not done after {limit:.0f} s"}]
        finally:
            done.set()
            if turns:
                (turns / f"{name}.done").touch()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not row.exists():
            return [{"contender": name, "error": f"its process ended with {process.returncode}"}]
        peak = {"peak_mib": round(max(peaks))} if watcher else {}
        return [each | peak for each in json.loads(row.read_text())]


def run_together(names: Sequence[str], arguments: Sequence[str], limit: float) -> list[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: run_contender(name, arguments, limit, Path(folder)), names))


def agreement(rows: Sequence[dict[str, Any]]) -> str:
    """How many texts of both of mezzo's engines begin alike."""
    starts: dict[str, list[list[int]]] = {}
    for row in rows:
        starts.setdefault(row["contender"], []).extend(row.pop("starts", []))
    pairs = list(zip(starts.get("mezzo", []), starts.get("torch", []), strict=False))
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)} texts begin as the torch engine's" if pairs else ""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rates, and those of mezzo as a share of each contender's at the same length."""
    found = [row for row in rows if "error" not in row]
    ours = {row["max_new_tokens"]: row for row in found if row["contender"] == "mezzo"}
    lines = [
        "| contender | tokens at most | tokens | texts/s | tokens/s | mezzo's tokens/s | peak MiB | mezzo's peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(found, key=lambda row: int(row["max_new_tokens"])):
        own, peak = ours.get(row["max_new_tokens"]), row.get("peak_mib")
        share = f"{own['tokens_per_s'] / row['tokens_per_s']:.2f}×" if own and row["tokens_per_s"] else "–"
        memory = f"{own['peak_mib'] / peak:.2f}×" if own and peak else "–"
        rates = f"{row['texts_per_s']:.1f} | {row['tokens_per_s']:.0f}"
        lengths = f"{row['max_new_tokens']} | {row['tokens_per_text']:.0f}"
        lines.append(f"| {row['contender']} | {lengths} | {rates} | {share} | {peak or '–'} | {memory} |")
    lines += [f"{row['contender']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument(
        "--template", help="another prompt, with {numbers} and {target}; one that asks for reasoning gives long texts"
    )
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument(
        "--max-new-tokens", type=lambda text: [int(word) for word in text.split(",")], default=[256], metavar="N,…"
    )
    parser.add_argument("--eps", type=float, help="[that of a run]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-graphs", action="store_true", help="SGLang without CUDA graphs and overlap")
    parser.add_argument("--sglang", default="{}", help='other options of SGLang, as {"lora_backend": "csgmv"}')
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--together", action="store_true", help="start all contenders at once; they take turns")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each contender")
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        options.row.write_text(json.dumps(measure(options)))
        return
    rows, hidden = [], ("contender", "row", "contenders", "out", "limit", "turns")
    said = {name: value for name, value in vars(options).items() if name not in hidden}
    changes = json.loads(options.sglang) | (WITHOUT_GRAPHS if options.no_graphs else {})
    os.environ["MEZZO_SGLANG_OPTIONS"] = json.dumps(changes)
    names = options.contenders.split(",")
    if options.together:
        results = iter(run_together(names, sys.argv[1:], options.limit))
    else:
        results = (run_contender(name, sys.argv[1:], options.limit) for name in names)
    for each in results:
        found = [row | {"options": said} for row in each]
        rows += found
        if options.out:
            with options.out.open("a") as file:
                for row in found:
                    file.write(json.dumps({key: value for key, value in row.items() if key != "starts"}) + "\n")
    print(agreement(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
