"""Work units: a batch at some probes, split so that each unit gives the same scores whoever computes it, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from mezzo.errors import JournalError
from mezzo.types import Batch, MicroBatch, Probe, Scores, TrainedTensor


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Probes `probe_start` to `probe_stop` (exclusive) at one micro-batch of examples of similar length."""

    probe_start: int
    probe_stop: int
    example_indices: tuple[int, ...]


def split_into_units(batch: Batch, probe_count: int, micro_batch: MicroBatch) -> list[WorkUnit]:
    """Every unit of a batch. Units concatenated in this order are split into the same units again."""
    groups = group_by_length([prompt.ids for prompt in batch.prompts], micro_batch.rows)
    return [
        WorkUnit(start, min(start + micro_batch.members, probe_count), tuple(group))
        for start in range(0, probe_count, micro_batch.members)
        for group in groups
    ]


def group_by_length(sequences: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Indices of the sequences in groups of at most `size`, sorted by length, ties by index."""
    by_length = sorted(range(len(sequences)), key=lambda index: (len(sequences[index]), index))
    return [by_length[start : start + size] for start in range(0, len(by_length), size)]


def candidate_count(batch: Batch) -> int:
    """C: the largest number of candidates that an example has."""
    if batch.readout.kind == "candidates":
        return max(len(prompt.candidates) for prompt in batch.prompts)
    return len(batch.readout.words) or batch.readout.classes


def empty_scores(batch: Batch, probes: int) -> Scores:
    """scores[P, B, C] of −∞, the score of candidates that an example does not have."""
    return np.full((probes, len(batch), candidate_count(batch)), -np.inf, dtype=np.float32)


def check_state(trained: Sequence[TrainedTensor], tensors: Mapping[str, Any]) -> None:
    """Refuse tensors of another run, whose names and shapes are not those of the trained ones, and damaged ones."""
    if set(tensors) != {t.name for t in trained}:
        raise JournalError("the tensors do not belong to this run: their names differ")
    for t in trained:
        if tuple(tensors[t.name].shape) != t.shape:
            raise JournalError(f"{t.name} has shape {tensors[t.name].shape}, expected {t.shape}")
        if not np.isfinite(tensors[t.name]).all():
            raise JournalError(f"{t.name} holds values that are not finite numbers")


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What one call of an engine computes: the examples of some units that share their probes."""

    batch: Batch
    probes: tuple[Probe, ...]
    units: tuple[WorkUnit, ...]

    @property
    def token_count(self) -> int:
        """Approximate number of tokens in the forwards, which their time is proportional to."""
        tokens = sum(len(prompt.ids) + sum(map(len, prompt.candidates)) for prompt in self.batch.prompts)
        return len(self.probes) * tokens

    def split(self) -> Iterator[tuple[WorkUnit, Batch, slice]]:
        """Each unit with its examples and their rows in this call's batch."""
        start = 0
        for unit in self.units:
            rows = slice(start, start + len(unit.example_indices))
            yield unit, Batch(self.batch.prompts[rows], self.batch.readout), rows
            start = rows.stop


def group_calls(batch: Batch, probes: Sequence[Probe], units: Sequence[WorkUnit], merge: bool) -> list[EngineCall]:
    """Turn units into engine calls; `merge` puts consecutive units at the same probes into one call."""
    calls = []
    for _, group in groupby(units, key=lambda unit: unit.probe_start if merge else unit):
        same_probes = tuple(group)
        prompts = tuple(batch.prompts[index] for unit in same_probes for index in unit.example_indices)
        call_probes = tuple(probes[same_probes[0].probe_start : same_probes[0].probe_stop])
        calls.append(EngineCall(Batch(prompts, batch.readout), call_probes, same_probes))
    return calls
