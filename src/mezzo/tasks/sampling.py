"""k-shot sampling by the published rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mezzo.errors import DataError
from mezzo.types import Example


def k_shot(
    examples: Sequence[Example], k: int, seed: int, *, labels: Sequence[str]
) -> tuple[list[Example], list[Example]]:
    """Shuffle with `numpy.random.RandomState(seed)`; per label the first k are train, the next k dev.

    Labels are in the order of their first appearance in the shuffled rows. On the original train files this gives the rows of
    the published k-shot files, in the same order.
    """
    if k < 1:
        raise DataError(f"k is {k}; give at least 1 example per label")
    by_label: dict[int, list[Example]] = {}
    for i in np.random.RandomState(seed).permutation(len(examples)):
        by_label.setdefault(examples[i].label, []).append(examples[i])
    for index, label in enumerate(labels):
        count = len(by_label.get(index, ()))
        if count < 2 * k:
            raise DataError(
                f"label {label!r} has {count} rows, but k={k} needs {2 * k} ({k} train, {k} dev);"
                f" give more data, or k={count // 2}"
            )
    groups = [rows for label, rows in by_label.items() if label >= 0]
    return [row for rows in groups for row in rows[:k]], [row for rows in groups for row in rows[k : 2 * k]]
