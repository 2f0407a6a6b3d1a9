"""Timing that is robust on a busy machine: contenders take turns in every round, and the spread is reported."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mezzo.bench.contenders import Step
from mezzo.bench.memory import TensorMemory

# Steps until everything is compiled and captured; the graph of an update with the following forward comes last.
WARM_UP = {"cpu": 3, "cuda": 6}
SAMPLE_SECONDS = 0.05
MAX_STEPS_PER_SAMPLE = 20


@dataclass
class TimedContender:
    """A contender's step and its measurements."""

    step: Step
    peak_mib: float
    steps_per_sample: int
    next_step: int
    ms: list[float] = field(default_factory=list)
    """Milliseconds per step, one figure per round."""

    def take_sample(self, device: torch.device) -> None:
        began = synchronized_time(device)
        for _ in range(self.steps_per_sample):
            self.step(self.next_step)
            self.next_step += 1
        self.ms.append(1e3 * (synchronized_time(device) - began) / self.steps_per_sample)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def iqr(self) -> float:
        low, _, high = statistics.quantiles(self.ms, n=4)
        return high - low


def synchronized_time(device: torch.device) -> float:
    """Seconds on a clock, read after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_in_turns(
    factories: Mapping[str, Callable[[], Step]], device: torch.device, rounds: int
) -> dict[str, TimedContender]:
    """Build and warm up every contender, then time them in turns; each round begins with another one."""
    contenders = {name: _warm_up(factory, device) for name, factory in factories.items()}
    names = list(contenders)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            contenders[name].take_sample(device)
    return contenders


def _warm_up(factory: Callable[[], Step], device: torch.device) -> TimedContender:
    """Build a contender and run its first steps; measure its peak memory and how many steps make a sample."""
    with TensorMemory(device) as weights:
        step = factory()
    with TensorMemory(device) as steps:
        for number in range(WARM_UP[device.type]):
            began = synchronized_time(device)
            step(number)
            seconds = synchronized_time(device) - began
    on_cpu = device.type == "cpu"
    per_sample = 1 if on_cpu else max(1, min(MAX_STEPS_PER_SAMPLE, math.ceil(SAMPLE_SECONDS / seconds)))
    return TimedContender(step, (weights.allocated + steps.peak) / 2**20, per_sample, WARM_UP[device.type])
