"""Units of work: a batch at some probes cut into pieces that give the same scores whoever computes them, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mezzo.types import Batch, MicroBatch, Probe


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """One unit: probes `first` to `last` at the examples in `places`, short with short."""

    first: int
    last: int
    places: tuple[int, ...]


def split_into_units(batch: Batch, probes: int, micro_batch: MicroBatch) -> list[WorkUnit]:
    """Every unit of a batch. Whole units side by side, in this order, are cut into the same units again."""
    groups = group_by_length([prompt.ids for prompt in batch.prompts], micro_batch.rows)
    starts = range(0, probes, micro_batch.members)
    return [
        WorkUnit(first, min(first + micro_batch.members, probes), tuple(group)) for first in starts for group in groups
    ]


def group_by_length(rows: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Indices of the rows in groups of at most `size`, sorted by length, ties by place."""
    ordered = sorted(range(len(rows)), key=lambda index: (len(rows[index]), index))
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]


def candidate_count(batch: Batch) -> int:
    """C: how many candidates the examples have at most."""
    if batch.readout.kind == "candidates":
        return max(len(p.candidates) for p in batch.prompts)
    return len(batch.readout.words) or batch.readout.classes


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What one call of an engine computes: the examples of some units that share their probes."""

    batch: Batch
    probes: tuple[Probe, ...]
    units: tuple[WorkUnit, ...]

    @property
    def cost(self) -> int:
        """Tokens that the forwards see, about: what their time grows with."""
        tokens = sum(len(p.ids) + sum(len(c) for c in p.candidates) for p in self.batch.prompts)
        return len(self.probes) * tokens

    def parts(self) -> Iterator[tuple[WorkUnit, Batch, slice]]:
        """Each unit, its examples, and their rows in this piece."""
        start = 0
        for work in self.units:
            rows = slice(start, start + len(work.places))
            yield work, Batch(self.batch.prompts[rows], self.batch.readout), rows
            start = rows.stop


def group_calls(batch: Batch, probes: Sequence[Probe], works: Sequence[WorkUnit], joined: bool) -> list[EngineCall]:
    """Units as calls of an engine; `joined` puts those at the same probes into one call."""
    groups: list[list[WorkUnit]] = []
    for work in works:
        if joined and groups and groups[-1][0].first == work.first:
            groups[-1].append(work)
        else:
            groups.append([work])
    found = []
    for group in groups:
        prompts = tuple(batch.prompts[place] for work in group for place in work.places)
        chosen = tuple(probes[group[0].first : group[0].last])
        found.append(EngineCall(Batch(prompts, batch.readout), chosen, tuple(group)))
    return found
