"""Timing that survives a busy machine: contenders take turns in every round, and the spread is reported."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mezzo.bench.contenders import Step
from mezzo.bench.memory import Memory

WARM_UP = {"cpu": 3, "cuda": 6}
"""Steps until everything is compiled and captured, an update together with the forward behind it last of all."""
SAMPLE_SECONDS = 0.05
MOST_STEPS = 20


@dataclass
class Timed:
    """One contender: its step and what was seen of it."""

    step: Step
    peak_mib: float
    each: int
    number: int
    ms: list[float] = field(default_factory=list)

    def run(self, device: torch.device) -> None:
        began = now(device)
        for _ in range(self.each):
            self.step(self.number)
            self.number += 1
        self.ms.append(1e3 * (now(device) - began) / self.each)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def iqr(self) -> float:
        low, _, high = statistics.quantiles(self.ms, n=4)
        return high - low


def now(device: torch.device) -> float:
    """Seconds on a clock that waits for what the device still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def interleaved(makers: Mapping[str, Callable[[], Step]], device: torch.device, rounds: int) -> dict[str, Timed]:
    """Every contender made and warmed up, then timed in turns; each round begins with another one."""
    timed = {name: _warm(make, device) for name, make in makers.items()}
    names = list(timed)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            timed[name].run(device)
    return timed


def _warm(make: Callable[[], Step], device: torch.device) -> Timed:
    """The contender after its first steps, the most memory it held by then, and how many steps make a sample."""
    with Memory(device) as weights:
        step = make()
    with Memory(device) as steps:
        for number in range(WARM_UP[device.type]):
            began = now(device)
            step(number)
            took = now(device) - began
    each = 1 if device.type == "cpu" else max(1, min(MOST_STEPS, math.ceil(SAMPLE_SECONDS / took)))
    return Timed(step, (weights.kept + steps.peak) / 2**20, each, WARM_UP[device.type])
