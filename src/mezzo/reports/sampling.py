"""Evenly spread samples of streams too long to keep: a report of a long run takes no more memory than one of a short run."""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

T = TypeVar("T")
# Items that are kept at least, of a stream that has as many; it may be twice as many.
SIZE = 10_000


class Sample(Generic[T]):
    """Every item of a short stream; of a long one each n-th, n growing with it."""

    def __init__(self, size: int = SIZE) -> None:
        self.items: list[T] = []
        self.count = 0
        self._size, self._every = size, 1

    def add(self, item: T) -> None:
        if self.count % self._every == 0:
            self.items.append(item)
            if len(self.items) > 2 * self._size:
                self.items, self._every = self.items[::2], 2 * self._every
        self.count += 1


class Totals:
    """A growing total, known at some positions and interpolated between them."""

    def __init__(self, known: dict[int, float]) -> None:
        self._known = sorted(known.items()) if any(known.values()) else []

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(self, position: int) -> float | None:
        """The total at a position; None where nothing is known at all."""
        if not self._known:
            return None
        place = bisect_right(self._known, position, key=lambda each: each[0])
        (before, low), (after, high) = self._known[max(0, place - 1)], self._known[min(place, len(self._known) - 1)]
        share = (position - before) / (after - before) if before <= position < after else 0.0
        return low + share * (high - low)
