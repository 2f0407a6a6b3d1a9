"""Two workers pinned to one core each against one, in one process and interleaved; and what a message costs the driver.

python benchmarks/workers.py [--model mezzo/roberta-mini] [--space lora full] [--batch 64] [--steps 10] [--rounds 5]

The machine should have nothing else to do. `--check 1.6` exits 1 where the ratio is smaller. The ratio by processor time, twice
one worker's against the sum of two, is what doing some work twice leaves of 2; it means something beside other programs too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from mezzo.engines import ENGINES
from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import family_of, load_config
from mezzo.engines.microbatch import group_calls, split_into_units
from mezzo.method.space import Space
from mezzo.parallel.messages import Answer, Order, Post, Route, packed, unpacked
from mezzo.parallel.pool import PoolEngine
from mezzo.parallel.transports.processes import Processes, ProcessLink
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout, Update


def batch_of(count: int, vocabulary: int, step: int) -> Batch:
    """Sentences of 12 to 40 tokens."""
    rng = np.random.default_rng(step)
    prompts = []
    for _ in range(count):
        length = int(rng.integers(12, 40))
        prompts.append(Prompt(tuple(rng.integers(5, vocabulary, size=length).tolist()), 0, position=length - 2))
    return Batch(tuple(prompts), Readout("words", words=(7, 9)))


def opened(model: str, space: str, cores: list[int], rows: int) -> PoolEngine:
    """Workers pinned to one core each."""
    family = family_of(load_config(model))
    spec = EngineSpec(model, family, Space(space), rows, device="cpu", threads=1, pad_id=1)
    engine = PoolEngine(Processes(), Post(ENGINES["torch"].factory, spec), len(cores))
    while len(engine.crew.up()) < len(cores):
        engine.score(batch_of(2, 1000, 0), [Probe()])
    for pid, core in zip(pids(engine), cores, strict=True):
        os.sched_setaffinity(pid, {core})
    return engine


def pids(engine: PoolEngine) -> list[int]:
    return [member.link.pid for member in engine.crew.members if isinstance(member.link, ProcessLink)]


def processor_seconds(engine: PoolEngine) -> list[float]:
    """What each worker has used of its core so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids(engine)]
    return [(int(each[11]) + int(each[12])) / os.sysconf("SC_CLK_TCK") for each in fields]


def steps(engine: PoolEngine, count: int, batch: int, vocabulary: int) -> float:
    """Seconds for training steps as the trainer takes them: score a pair of probes, apply an update."""
    began = time.perf_counter()
    for step in range(count):
        probes = (Probe(((step, 1e-3),)), Probe(((step, -1e-3),)))
        engine.score(batch_of(batch, vocabulary, step), probes)
        engine.apply([Update(((step, 2.0**-20),))])
    return time.perf_counter() - began


def message_cost(batch: int, vocabulary: int) -> tuple[float, int]:
    """Seconds and bytes that one unit costs the driver: its order packed, its answer unpacked."""
    work = batch_of(batch, vocabulary, 0)
    probes = (Probe(((1, 1e-3),)), Probe(((1, -1e-3),)))
    piece = group_calls(work, probes, split_into_units(work, 2, choose_micro_batch(batch)), joined=False)
    order = Order(Route(1000, (Update(((1, 2.0**-20),)),)), "score", (piece, choose_micro_batch(batch)))
    answer = packed(Answer([np.zeros((2, batch, 2), np.float32)], 0.1))
    began = time.perf_counter()
    for _ in range(1000):
        packed(order)
        unpacked(answer)
    return (time.perf_counter() - began) / 1000, len(packed(order)) + len(answer)


def choose_micro_batch(rows: int) -> MicroBatch:
    return MicroBatch(rows=rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mezzo/roberta-mini")
    parser.add_argument("--space", nargs="+", default=["lora", "full"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", type=float, default=0.0, help="smallest ratio that passes")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("two cores are needed")
    vocabulary = load_config(options.model).vocab_size
    print("| space | one worker, ms a step | two workers | ratio | by processor time | bytes a step |")
    print("|---|---|---|---|---|---|")
    worst = float("inf")
    for space in options.space:
        crews = {count: opened(options.model, space, cores[:count], options.micro_batch) for count in (1, 2)}
        times: dict[int, list[float]] = {1: [], 2: []}
        before: dict[int, list[float]] = {}
        for number in range(options.rounds + 1):
            for count, engine in crews.items():
                took = steps(engine, options.steps, options.batch, vocabulary)
                times[count] += [took] if number else []  # the first round warms up
                if not number:
                    before[count] = processor_seconds(engine)
        one, two = (1e3 * statistics.median(times[count]) / options.steps for count in (1, 2))
        ratio = statistics.median(a / b for a, b in zip(times[1], times[2], strict=True))
        used = {
            count: sum(now - then for now, then in zip(processor_seconds(crews[count]), before[count], strict=True))
            for count in (1, 2)
        }
        cost = crews[2].total_cost()
        shared = 2 * used[1] / used[2]
        row = (space, f"{one:.1f}", f"{two:.1f}", f"{ratio:.2f}", f"{shared:.2f}", str(cost["bytes_per_step"]))
        print(f"| {' | '.join(row)} |")
        worst = min(worst, ratio)
        for engine in crews.values():
            engine.close()
    seconds, size = message_cost(options.micro_batch, vocabulary)
    print(f"\na unit costs the driver {1e6 * seconds:.0f} µs and {size} bytes")
    return int(worst < options.check)


if __name__ == "__main__":
    sys.exit(main())
