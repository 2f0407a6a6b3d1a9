"""Two workers pinned to one core each against one, interleaved in one process; and what a message costs the driver.

python benchmarks/workers.py [--model mezzo/roberta-mini] [--space lora full] [--batch 64] [--steps 10] [--rounds 5]

The machine should be idle. `--check 1.6` exits 1 if the ratio is smaller. The ratio by processor time is twice one worker's time
over the sum of two: below 2 by the work that both workers do. It is meaningful on a busy machine too.
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
from mezzo.parallel.messages import ReplayRange, Reply, Request, WorkerSpec, deserialize, serialize
from mezzo.parallel.pool_engine import PoolEngine
from mezzo.parallel.transports.processes import ProcessConnection, ProcessTransport
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout, Update


def make_batch(count: int, vocabulary: int, step: int) -> Batch:
    """Sentences of 12 to 40 tokens."""
    rng = np.random.default_rng(step)
    prompts = []
    for _ in range(count):
        length = int(rng.integers(12, 40))
        prompts.append(Prompt(tuple(rng.integers(5, vocabulary, size=length).tolist()), 0, position=length - 2))
    return Batch(tuple(prompts), Readout("words", words=(7, 9)))


def open_engine(model: str, space: str, cores: list[int], rows: int) -> PoolEngine:
    """An engine with one worker pinned to each core."""
    family = family_of(load_config(model))
    spec = EngineSpec(model, family, Space(space), rows, device="cpu", threads=1, pad_id=1)
    engine = PoolEngine(
        ProcessTransport(), WorkerSpec(ENGINES["torch"], spec), len(cores), timeout=None, check_every=100
    )
    while engine.ready_count < len(cores):
        engine.score(make_batch(2, 1000, 0), [Probe()])
    for pid, core in zip(worker_pids(engine), cores, strict=True):
        os.sched_setaffinity(pid, {core})
    return engine


def worker_pids(engine: PoolEngine) -> list[int]:
    return [w.connection.pid for w in engine.supervisor.workers if isinstance(w.connection, ProcessConnection)]


def processor_seconds(engine: PoolEngine) -> list[float]:
    """Processor time that each worker has used so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in worker_pids(engine)]
    return [(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") for fields in stats]


def time_steps(engine: PoolEngine, count: int, batch: int, vocabulary: int) -> float:
    """Seconds for training steps as the trainer takes them: score a pair of probes, apply an update."""
    start = time.perf_counter()
    for step in range(count):
        probes = (Probe(((step, 1e-3),)), Probe(((step, -1e-3),)))
        engine.score(make_batch(batch, vocabulary, step), probes)
        engine.apply([Update(((step, 2.0**-20),))])
    return time.perf_counter() - start


def message_cost(batch: int, vocabulary: int) -> tuple[float, int]:
    """Seconds and bytes that one unit costs the driver: a serialized request and a deserialized reply."""
    examples, micro_batch = make_batch(batch, vocabulary, 0), MicroBatch(rows=batch)
    probes = (Probe(((1, 1e-3),)), Probe(((1, -1e-3),)))
    calls = group_calls(examples, probes, split_into_units(examples, 2, micro_batch), merge=False)
    request = Request(ReplayRange(1000, (Update(((1, 2.0**-20),)),)), "score", (calls, micro_batch))
    reply = serialize(Reply([np.zeros((2, batch, 2), np.float32)], 0.1))
    start = time.perf_counter()
    for _ in range(1000):
        serialize(request)
        deserialize(reply)
    return (time.perf_counter() - start) / 1000, len(serialize(request)) + len(reply)


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
        engines = {count: open_engine(options.model, space, cores[:count], options.micro_batch) for count in (1, 2)}
        times: dict[int, list[float]] = {1: [], 2: []}
        before: dict[int, list[float]] = {}
        for number in range(options.rounds + 1):
            for count, engine in engines.items():
                seconds = time_steps(engine, options.steps, options.batch, vocabulary)
                times[count] += [seconds] if number else []  # the first round warms up
                if not number:
                    before[count] = processor_seconds(engine)
        one, two = (1e3 * statistics.median(times[count]) / options.steps for count in (1, 2))
        ratio = statistics.median(a / b for a, b in zip(times[1], times[2], strict=True))
        used_seconds = {
            count: sum(
                after - earlier for after, earlier in zip(processor_seconds(engines[count]), before[count], strict=True)
            )
            for count in (1, 2)
        }
        stats = engines[2].run_stats()
        by_processor = 2 * used_seconds[1] / used_seconds[2]
        row = (space, f"{one:.1f}", f"{two:.1f}", f"{ratio:.2f}", f"{by_processor:.2f}", str(stats["bytes_per_step"]))
        print(f"| {' | '.join(row)} |")
        worst = min(worst, ratio)
        for engine in engines.values():
            engine.close()
    seconds, size = message_cost(options.micro_batch, vocabulary)
    print(f"\na unit costs the driver {1e6 * seconds:.0f} µs and {size} bytes")
    return int(worst < options.check)


if __name__ == "__main__":
    sys.exit(main())
