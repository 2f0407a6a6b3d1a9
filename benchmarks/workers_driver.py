"""What a work unit costs the driver, by the number of workers: the real scheduler with mock workers.

python benchmarks/workers_driver.py [--workers 10 100 1000] [--tokens 512] [--examples 8]

The mock workers run in this process and compute nothing: serializing, scheduling and checking are measured, not models and not
sockets. Replies arrive one at a time (`singly`) or all together (`at once`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mezzo.engines.base import EngineSpec
from mezzo.engines.registry import EngineInfo
from mezzo.method.space import Space
from mezzo.parallel.messages import Reply, Request, WorkerFacts, WorkerSpec, deserialize, serialize
from mezzo.parallel.pool_engine import PoolEngine
from mezzo.parallel.transports.base import WorkerConnection
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout, Update


class MockConnection:
    """A worker that replies at once with scores of zero."""

    mock_seconds = 0.0
    """Time spent in all mock workers, which is not the driver's."""

    def __init__(self) -> None:
        self.reply = b""

    def send(self, data: bytes) -> None:
        start = time.perf_counter()
        message = deserialize(data)
        value: Any = None
        if isinstance(message, WorkerSpec):
            value = WorkerFacts(MicroBatch(rows=8), (), "", {}, merges_units=True, pid=0)
        elif isinstance(message, Request) and message.kind == "score":
            value = [np.zeros((len(call.probes), len(call.batch), 2), np.float32) for call in message.arguments[0]]
        self.reply = serialize(Reply(value, 1.0))
        MockConnection.mock_seconds += time.perf_counter() - start

    def kill(self) -> None: ...

    def stop(self) -> None: ...


class MockTransport:
    def __init__(self, all_at_once: bool) -> None:
        self.max_replies = None if all_at_once else 1

    def start_worker(self) -> MockConnection:
        return MockConnection()

    def wait_for_replies(
        self, connections: Sequence[WorkerConnection], seconds: float
    ) -> list[tuple[WorkerConnection, bytes | None]]:
        mocks = cast("Sequence[MockConnection]", connections)
        return [(mock, mock.reply) for mock in mocks[: self.max_replies]]

    def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--examples", type=int, default=8, help="in a unit")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print("| workers | µs a unit, replies singly | at once | bytes a unit |\n|---|---|---|---|")
    for count in options.workers:
        singly, size = measure(count, False, options)
        at_once, _ = measure(count, True, options)
        print(f"| {count} | {singly:.0f} | {at_once:.0f} | {size:.0f} |", flush=True)


def measure(worker_count: int, all_at_once: bool, options: argparse.Namespace) -> tuple[float, float]:
    """Microseconds and bytes per unit, with two units per worker and step."""
    spec = WorkerSpec(EngineInfo(factory=""), EngineSpec("", "masked", Space("lora"), options.examples))
    engine = PoolEngine(MockTransport(all_at_once), spec, worker_count, timeout=None, check_every=0)
    engine.micro_batch = MicroBatch(rows=options.examples)
    rng = np.random.default_rng(0)
    shape = (options.examples * 2 * worker_count, options.tokens)
    prompts = [Prompt(tuple(ids), 0, position=1) for ids in rng.integers(5, 100_000, shape).tolist()]
    batch = Batch(tuple(prompts), Readout("words", words=(1, 2)))
    probes = (Probe(((1, 1e-3),)), Probe(((1, -1e-3),)))
    while engine.ready_count < worker_count:
        list(engine.supervisor.receive_replies(0.0))
    bytes_before, MockConnection.mock_seconds = engine.stats.training_bytes, 0.0
    start = time.perf_counter()
    for _ in range(options.steps):
        engine.score(batch, probes)
        engine.apply([Update(((1, 2.0**-20),))])
    driver_seconds = time.perf_counter() - start - MockConnection.mock_seconds
    units = 2 * worker_count * options.steps
    return 1e6 * driver_seconds / units, (engine.stats.training_bytes - bytes_before) / units


if __name__ == "__main__":
    main()
