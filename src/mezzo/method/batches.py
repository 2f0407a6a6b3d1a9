"""Which examples a step sees: a pure function of (seed, step), so that a resumed run sees the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mezzo.method import noise
from mezzo.types import Batch, Prompt, Readout

Batches = Callable[[int], Batch]


def batch_indices(seed: int, step: int, count: int, size: int) -> list[int]:
    """`size` consecutive places in an endless row of shuffled epochs; every epoch shows each example once."""
    return take_indices(seed, step * size, count, size)


def take_indices(seed: int, start: int, count: int, size: int) -> list[int]:
    """The `size` places of that row from `start` on."""
    return [int(_epoch(seed, place // count, count)[place % count]) for place in range(start, start + size)]


def make_batches(prompts: Sequence[Prompt], readout: Readout, seed: int, size: int) -> Batches:
    """The training batches of a run; a set smaller than a batch is used whole at every step."""
    if size >= len(prompts):
        whole = Batch(tuple(prompts), readout)  # one and the same object: what an engine made of it may be kept
        return lambda step: whole

    def batch(step: int) -> Batch:
        return Batch(tuple(prompts[index] for index in batch_indices(seed, step, len(prompts), size)), readout)

    return batch


@dataclass(frozen=True)
class ExampleStream:
    """The same row of shuffled epochs for batches whose size changes: `take` is a function of the place where it starts."""

    prompts: tuple[Prompt, ...]
    readout: Readout
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, start: int, size: int) -> Batch:
        """All prompts where `size` is as many, so that none occurs twice."""
        if size >= len(self):
            return Batch(self.prompts, self.readout)
        indices = take_indices(self.seed, start, len(self), size)
        return Batch(tuple(self.prompts[index] for index in indices), self.readout)


@lru_cache(maxsize=8)
def _epoch(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return noise.order(noise.step_seed(seed, epoch, 0), "batches", count)
