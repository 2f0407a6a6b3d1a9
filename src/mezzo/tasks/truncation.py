"""Which texts are shortened, and to what length, when a prompt is too long. The template never is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def truncate_lengths(lengths: Sequence[int], ranks: Sequence[int], limit: int) -> list[int]:
    """New lengths whose sum is at most `limit`: the highest rank is cut first, and the longest within a rank.

    The texts of the query have rank 0, those of demonstrations 1: the query is cut only when nothing is left of them.
    """
    truncated = [0] * len(lengths)
    for rank in sorted(set(ranks)):
        members = [i for i, r in enumerate(ranks) if r == rank]
        for i, length in zip(members, _cut_longest([lengths[i] for i in members], limit), strict=True):
            truncated[i] = length
            limit -= length
    return truncated


def _cut_longest(lengths: Sequence[int], limit: int) -> list[int]:
    """Cut the longest to a common length; what does not divide evenly goes to the first of them."""
    if sum(lengths) <= limit:
        return list(lengths)
    limit = max(limit, 0)
    commons = range(max(lengths) + 1)
    common = bisect_right(commons, limit, key=lambda common: sum(min(length, common) for length in lengths)) - 1
    remainder = limit - sum(min(length, common) for length in lengths)
    truncated = []
    for length in lengths:
        extra = int(length > common and remainder > 0)
        truncated.append(min(length, common + extra))
        remainder -= extra
    return truncated
