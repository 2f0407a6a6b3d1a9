"""A batch as token sequences for a causal model: what each must compute, what they share, and where its score goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.types import Batch

SHARED = 16
"""Tokens that several sequences must have in common before computing them once is worth a forward of its own."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of one example. `start` ≥ 0: the log-probabilities of the tokens after it are read; −1: the last
    position's logits are, or in an encoder those at `position`. `prompt` tokens at the front belong to all candidates of
    the example."""

    ids: tuple[int, ...]
    start: int
    prompt: int
    where: tuple[int, int]
    position: int = -1

    @property
    def reusable(self) -> int:
        """Tokens whose key and value may come from elsewhere: all whose logits are not read."""
        return self.start if self.start >= 0 else len(self.ids) - 1


def rows_of(batch: Batch, causal: bool = True) -> list[Row]:
    """The sequences, short with short, candidates of a prompt side by side. Behind a causal mask nothing after the
    readout matters, so it is left out; an encoder sees all of it."""
    if not causal:
        rows = [Row(p.ids, -1, 0, (index, 0), p.position % len(p.ids)) for index, p in enumerate(batch.prompts)]
    elif batch.readout.kind == "candidates":
        rows = [
            Row(p.ids + candidate, len(p.ids) - 1, len(p.ids), (index, number))
            for index, p in enumerate(batch.prompts)
            for number, candidate in enumerate(p.candidates)
        ]
    else:
        rows = [Row(p.ids[: p.position % len(p.ids) + 1], -1, 0, (index, 0)) for index, p in enumerate(batch.prompts)]
    return sorted(rows, key=lambda row: (row.prompt or len(row.ids), row.where))


def common_prefix(rows: Sequence[Row]) -> tuple[int, ...]:
    """Tokens that all sequences begin with and may take from a cache; empty when too few to matter."""
    if len(rows) < 2:
        return ()
    low, high = min(row.ids for row in rows), max(row.ids for row in rows)  # what these two share, all between do
    alike = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    length = min(alike, *(row.reusable for row in rows))
    return low[:length] if length >= SHARED else ()


def shared_prompts(rows: Sequence[Row], known: int) -> list[tuple[int, ...]]:
    """Prompts of which several candidates are scored, as far as they can be shared, beyond `known` tokens."""
    seen: dict[int, list[Row]] = {}
    for row in rows:
        seen.setdefault(row.where[0], []).append(row)
    return [
        group[0].ids[: group[0].reusable]
        for group in seen.values()
        if len(group) > 1 and group[0].start >= 0 and group[0].reusable - known >= SHARED
    ]
