"""A run with a thousand workers, simulated: who waits for whom, what fails, what one driver has to carry.

python benchmarks/workers_simulation.py [--workers 1000] [--unit-seconds 1.45] [--units 4] [--steps 200] [--seed 0]

Every worker computes units one after the other. Their times vary by a few per cent, now and then one is many times
slower, and processes die. The driver is one thread: each order and each answer takes its time, in turn. Late units are offered
to others by the rules of `mezzo.parallel.scheduler`, whose constants are used here.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass, field

from mezzo.parallel.scheduler import LATE

DAY = 86_400.0


@dataclass
class World:
    workers: int
    unit_seconds: float
    units: int  # a worker and step, on average
    message_seconds: float  # the driver's time for an order and its answer
    message_bytes: int
    latency: float = 0.5e-3
    spread: float = 0.03
    slow_share: float = 1e-4  # of units
    slow_factor: float = 10.0
    mean_life: float = 5 * DAY  # of a worker
    catch_up: float = 300.0


@dataclass
class Totals:
    seconds: float = 0.0
    busy: float = 0.0
    driver: float = 0.0
    messages: int = 0
    late: int = 0
    lost: int = 0
    down: float = 0.0
    longest: list[float] = field(default_factory=list)


def step(world: World, rng: random.Random, ready: list[float], totals: Totals) -> None:
    """One step from the moment it begins: units in a queue, the driver in between, until all answers are in."""
    now = driver = totals.seconds
    waiting = world.workers * world.units
    started: dict[int, float] = {}  # worker: how long its unit takes
    events = [(max(at, now), worker) for worker, at in enumerate(ready)]
    heapq.heapify(events)
    left = waiting
    while left:
        at, worker = heapq.heappop(events)
        if worker in started:  # an answer
            took = started.pop(worker)
            driver = max(driver, at + world.latency) + world.message_seconds / 2
            left -= 1
            totals.busy += took
            if rng.random() < took / world.mean_life:
                totals.lost += 1
                ready[worker] = at + world.catch_up
                totals.down += world.catch_up
                heapq.heappush(events, (ready[worker], worker))
                continue
        if not waiting:
            ready[worker] = at
            continue
        waiting -= 1
        driver = max(driver, at) + world.message_seconds / 2
        took = world.unit_seconds * max(0.5, rng.gauss(1, world.spread))
        if rng.random() < world.slow_share:
            took *= world.slow_factor
            totals.late += 1
            # After LATE times its usual time the unit goes to another worker, who starts when it is free.
            took = min(took, world.unit_seconds * (LATE + 1))
        totals.messages += 1
        started[worker] = took
        heapq.heappush(events, (driver + world.latency + took, worker))
    totals.driver += world.workers * world.units * world.message_seconds
    totals.longest.append(driver - now)
    totals.seconds = driver


def simulate(world: World, steps: int, seed: int) -> Totals:
    rng, totals = random.Random(seed), Totals()
    ready = [0.0] * world.workers
    for _ in range(steps):
        step(world, rng, ready, totals)
    return totals


def row(world: World, steps: int, seed: int) -> str:
    totals = simulate(world, steps, seed)
    each = totals.seconds / steps
    computed = totals.busy / (world.workers * totals.seconds)
    rate = world.message_bytes * totals.messages / totals.seconds / 1e6
    return (
        f"| {world.workers} | {world.units} | {each:.2f} | {computed:.0%} | {totals.driver / totals.seconds:.0%} | "
        f"{world.message_bytes * world.workers * world.units / 1e6:.1f} MB | {rate:.2f} MB/s | "
        f"{totals.late / steps:.2f} | {totals.lost * DAY / totals.seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 3000])
    parser.add_argument("--units", type=int, nargs="+", default=[1, 4], help="units a worker and step")
    parser.add_argument("--unit-seconds", type=float, default=1.45)
    parser.add_argument("--message-us", type=float, default=300.0, help="the driver's time for an order and its answer")
    parser.add_argument("--message-bytes", type=int, default=16_000, help="an order and its answer")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        "| workers | units each | s a step | computing | driver busy | a step carries | network | late a step | lost a day |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for count in options.workers:
        for units in options.units:
            world = World(count, options.unit_seconds, units, options.message_us * 1e-6, options.message_bytes)
            print(row(world, options.steps, options.seed))


if __name__ == "__main__":
    main()
