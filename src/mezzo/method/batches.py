"""Which examples a step sees: a pure function of (seed, step), so that a resumed run sees the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from mezzo.method import noise
from mezzo.types import Batch, Prompt, Readout

Batches = Callable[[int], Batch]


def take_indices(seed: int, start: int, count: int, size: int) -> list[int]:
    """`size` places, from `start` on, in an endless row of shuffled epochs; every epoch shows each example once."""
    return [int(_epoch(seed, place // count, count)[place % count]) for place in range(start, start + size)]


@dataclass(frozen=True)
class ExampleStream:
    """That row of examples: `take` is a function of the place where it starts."""

    prompts: tuple[Prompt, ...]
    readout: Readout
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, start: int, size: int) -> Batch:
        """All prompts where `size` is as many, so that none occurs twice."""
        if size >= len(self):
            return self._whole
        indices = take_indices(self.seed, start, len(self), size)
        return Batch(tuple(self.prompts[index] for index in indices), self.readout)

    @cached_property
    def _whole(self) -> Batch:
        """One and the same object: what an engine made of it may be kept."""
        return Batch(self.prompts, self.readout)


def make_batches(prompts: Sequence[Prompt], readout: Readout, seed: int, size: int) -> Batches:
    """Batches of one size; a set smaller than that is used whole at every step."""
    stream = ExampleStream(tuple(prompts), readout, seed)
    return lambda step: stream.take(step * size, size)


@lru_cache(maxsize=8)
def _epoch(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return noise.order(noise.step_seed(seed, epoch, 0), "batches", count)
