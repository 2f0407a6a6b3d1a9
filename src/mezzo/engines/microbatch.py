"""Units of work: a batch at some probes cut into pieces that give the same scores whoever computes them, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mezzo.engines.base import Unit
from mezzo.types import Batch, Probe


@dataclass(frozen=True, slots=True)
class Work:
    """One unit: probes `first` to `last` at the examples in `places`, short with short."""

    first: int
    last: int
    places: tuple[int, ...]


def units_of(batch: Batch, probes: int, unit: Unit) -> list[Work]:
    """Every unit of a batch. Whole units side by side, in this order, are cut into the same units again."""
    groups = by_length([prompt.ids for prompt in batch.prompts], unit.rows)
    starts = range(0, probes, unit.members)
    return [Work(first, min(first + unit.members, probes), tuple(group)) for first in starts for group in groups]


def by_length(rows: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Indices of the rows in groups of at most `size`, sorted by length, ties by place."""
    ordered = sorted(range(len(rows)), key=lambda index: (len(rows[index]), index))
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]


def width_of(batch: Batch) -> int:
    """C: how many candidates the examples have at most."""
    if batch.readout.kind == "candidates":
        return max(len(p.candidates) for p in batch.prompts)
    return len(batch.readout.words) or batch.readout.classes


@dataclass(frozen=True, slots=True)
class Piece:
    """What one call of an engine computes: the examples of some units that share their probes."""

    batch: Batch
    probes: tuple[Probe, ...]
    units: tuple[Work, ...]

    @property
    def cost(self) -> int:
        """Tokens that the forwards see, about: what their time grows with."""
        tokens = sum(len(p.ids) + sum(len(c) for c in p.candidates) for p in self.batch.prompts)
        return len(self.probes) * tokens

    def parts(self) -> Iterator[tuple[Work, Batch, slice]]:
        """Each unit, its examples, and their rows in this piece."""
        start = 0
        for work in self.units:
            rows = slice(start, start + len(work.places))
            yield work, Batch(self.batch.prompts[rows], self.batch.readout), rows
            start = rows.stop


def pieces_of(batch: Batch, probes: Sequence[Probe], works: Sequence[Work], joined: bool) -> list[Piece]:
    """Units as calls of an engine; `joined` puts those at the same probes into one call."""
    groups: list[list[Work]] = []
    for work in works:
        if joined and groups and groups[-1][0].first == work.first:
            groups[-1].append(work)
        else:
            groups.append([work])
    found = []
    for group in groups:
        prompts = tuple(batch.prompts[place] for work in group for place in work.places)
        chosen = tuple(probes[group[0].first : group[0].last])
        found.append(Piece(Batch(prompts, batch.readout), chosen, tuple(group)))
    return found
