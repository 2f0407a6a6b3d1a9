"""Which texts are shortened, and to what length, when a prompt is too long. The template never is."""

from __future__ import annotations

from collections.abc import Sequence


def fit(lengths: Sequence[int], ranks: Sequence[int], room: int) -> list[int]:
    """New lengths whose sum is at most `room`: the highest rank gives way first, and the longest within a rank.

    The query's texts have rank 0 and its demonstrations' 1, so the query is cut only when nothing is left of them.
    """
    kept = [0] * len(lengths)
    for rank in sorted(set(ranks)):
        members = [i for i, r in enumerate(ranks) if r == rank]
        for i, length in zip(members, _level([lengths[i] for i in members], room), strict=True):
            kept[i] = length
            room -= length
    return kept


def _level(lengths: Sequence[int], room: int) -> list[int]:
    """Cut the longest to a common level; what does not divide evenly goes to the first of them."""
    if sum(lengths) <= room:
        return list(lengths)
    left, level = max(room, 0), 0
    for rank, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - rank)
        if length > share:
            level = share
            break
        left -= length
    kept = [min(length, level) for length in lengths]
    spare = max(room, 0) - sum(kept)
    for i, length in enumerate(lengths):
        if spare and length > kept[i]:
            kept[i] += 1
            spare -= 1
    return kept
