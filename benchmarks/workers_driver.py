"""What a unit of work costs the driver, by the number of workers: the real scheduling over workers that answer by themselves.

python benchmarks/workers_driver.py [--workers 10 100 1000] [--tokens 512] [--examples 8]

The workers here are stand-ins of this process that compute nothing: packing, scheduling, checking and unpacking are measured, not
models, and no socket. One answer arrives at a time (`singly`) or all that are due together (`at once`).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mezzo.engines.base import EngineSpec
from mezzo.method.space import Space
from mezzo.parallel.messages import Answer, Facts, Order, Post, packed, unpacked
from mezzo.parallel.pool import PoolEngine
from mezzo.parallel.transports.base import Link
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout, Update


class Standin:
    def __init__(self) -> None:
        self.reply = b""

    def send(self, data: bytes) -> None:
        global away
        began = time.perf_counter()
        asked = unpacked(data)
        value: Any = None
        if isinstance(asked, Post):
            value = Facts(MicroBatch(rows=8), (), "", {}, True, 0)
        elif isinstance(asked, Order) and asked.question == "score":
            pieces = asked.values[0]
            value = [np.zeros((len(p.probes), len(p.batch), 2), np.float32) for p in pieces]
        self.reply = packed(Answer(value, 1.0))
        away += time.perf_counter() - began

    def kill(self) -> None: ...

    def release(self) -> None: ...


away = 0.0
"""Seconds that the stand-ins took: not the driver's."""


class Standins:
    def __init__(self, together: bool) -> None:
        self.together = together

    def hire(self) -> Standin:
        return Standin()

    def wait(self, links: Sequence[Link], seconds: float) -> list[tuple[Link, bytes | None]]:
        return [(link, link.reply) for link in itertools.islice(links, None if self.together else 1)]  # type: ignore[attr-defined]

    def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--examples", type=int, default=8, help="in a unit")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print("| workers | µs a unit, answers singly | at once | bytes a unit |\n|---|---|---|---|")
    for count in options.workers:
        found = [measured(count, together, options) for together in (False, True)]
        print(f"| {count} | {found[0][0]:.0f} | {found[1][0]:.0f} | {found[0][1]:.0f} |", flush=True)


def measured(count: int, together: bool, options: argparse.Namespace) -> tuple[float, float]:
    """Microseconds and bytes, two units a worker and step."""
    global away
    post = Post("", EngineSpec("", "masked", Space("lora"), options.examples))
    engine = PoolEngine(Standins(together), post, count, check_every=0)
    engine.micro_batch = MicroBatch(rows=options.examples)
    rng = np.random.default_rng(0)
    shape = (options.examples * 2 * count, options.tokens)
    prompts = [Prompt(tuple(ids), 0, position=1) for ids in rng.integers(5, 100_000, shape).tolist()]
    batch = Batch(tuple(prompts), Readout("words", words=(1, 2)))
    probes = (Probe(((1, 1e-3),)), Probe(((1, -1e-3),)))
    while len(engine.crew.up()) < count:
        list(engine.crew.replies(0.0))
    before, away = engine.cost.bytes, 0.0
    began = time.perf_counter()
    for _ in range(options.steps):
        engine.score(batch, probes)
        engine.apply([Update(((1, 2.0**-20),))])
    units = 2 * count * options.steps
    return 1e6 * (time.perf_counter() - began - away) / units, (engine.cost.bytes - before) / units


if __name__ == "__main__":
    main()
