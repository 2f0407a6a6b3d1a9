"""A simulated run with a thousand workers: who waits for whom, what fails, and how busy the driver is.

python benchmarks/workers_simulation.py [--workers 1000] [--unit-seconds 1.45] [--units 4] [--steps 200] [--seed 0]

Every worker computes units one after the other. Their times vary by a few per cent, a few units take many times longer, and
processes die. The driver has one thread: requests and replies take its time one after the other. Late units are offered to other
workers as in `mezzo.parallel.scheduler`, whose constants are used here.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass

from mezzo.parallel.scheduler import LATE_FACTOR

DAY = 86_400.0


@dataclass(frozen=True)
class Cluster:
    workers: int
    unit_seconds: float
    units_per_worker: int  # per step, on average
    message_seconds: float  # the driver's time for a request and its reply
    message_bytes: int
    latency: float = 0.5e-3
    spread: float = 0.03
    slow_share: float = 1e-4  # of units
    slow_factor: float = 10.0
    mean_lifetime: float = 5 * DAY  # of a worker
    restart_seconds: float = 300.0


@dataclass
class Totals:
    seconds: float = 0.0
    busy_seconds: float = 0.0
    driver_seconds: float = 0.0
    messages: int = 0
    late_units: int = 0
    lost_workers: int = 0


def simulate_step(cluster: Cluster, rng: random.Random, idle_since: list[float], totals: Totals) -> None:
    """One step: units wait in a queue, and every request and reply passes through the driver, until all are done."""
    driver_time = totals.seconds
    queued = pending = cluster.workers * cluster.units_per_worker
    running: dict[int, float] = {}  # worker: seconds of its unit
    events = [(max(moment, driver_time), worker) for worker, moment in enumerate(idle_since)]
    heapq.heapify(events)
    while pending:
        now, worker = heapq.heappop(events)
        if worker in running:  # a reply
            seconds = running.pop(worker)
            driver_time = max(driver_time, now + cluster.latency) + cluster.message_seconds / 2
            pending -= 1
            totals.busy_seconds += seconds
            if rng.random() < seconds / cluster.mean_lifetime:
                totals.lost_workers += 1
                idle_since[worker] = now + cluster.restart_seconds
                heapq.heappush(events, (idle_since[worker], worker))
                continue
        if not queued:
            idle_since[worker] = now
            continue
        queued -= 1
        driver_time = max(driver_time, now) + cluster.message_seconds / 2
        seconds = cluster.unit_seconds * max(0.5, rng.gauss(1, cluster.spread))
        if rng.random() < cluster.slow_share:
            seconds *= cluster.slow_factor
            totals.late_units += 1
            # After LATE_FACTOR times its usual time the unit goes to another worker, which starts when it is idle.
            seconds = min(seconds, cluster.unit_seconds * (LATE_FACTOR + 1))
        totals.messages += 1
        running[worker] = seconds
        heapq.heappush(events, (driver_time + cluster.latency + seconds, worker))
    totals.driver_seconds += cluster.workers * cluster.units_per_worker * cluster.message_seconds
    totals.seconds = driver_time


def simulate(cluster: Cluster, steps: int, seed: int) -> Totals:
    rng, totals = random.Random(seed), Totals()
    idle_since = [0.0] * cluster.workers
    for _ in range(steps):
        simulate_step(cluster, rng, idle_since, totals)
    return totals


def table_row(cluster: Cluster, steps: int, seed: int) -> str:
    totals = simulate(cluster, steps, seed)
    busy_share = totals.busy_seconds / (cluster.workers * totals.seconds)
    network = cluster.message_bytes * totals.messages / totals.seconds / 1e6
    step_bytes = cluster.message_bytes * cluster.workers * cluster.units_per_worker
    return (
        f"| {cluster.workers} | {cluster.units_per_worker} | {totals.seconds / steps:.2f} | {busy_share:.0%} | "
        f"{totals.driver_seconds / totals.seconds:.0%} | {step_bytes / 1e6:.1f} MB | {network:.2f} MB/s | "
        f"{totals.late_units / steps:.2f} | {totals.lost_workers * DAY / totals.seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 3000])
    parser.add_argument("--units", type=int, nargs="+", default=[1, 4], help="units per worker and step")
    parser.add_argument("--unit-seconds", type=float, default=1.45)
    parser.add_argument("--message-us", type=float, default=300.0, help="the driver's time for a request and its reply")
    parser.add_argument("--message-bytes", type=int, default=16_000, help="a request and its reply")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        "| workers | units each | s a step | computing | driver busy | bytes a step | network | late a step | lost a day |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for count in options.workers:
        for units in options.units:
            message_seconds = options.message_us * 1e-6
            cluster = Cluster(count, options.unit_seconds, units, message_seconds, options.message_bytes)
            print(table_row(cluster, options.steps, options.seed))


if __name__ == "__main__":
    main()
