"""Do workers agree? Pure functions over their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

WorkerId = TypeVar("WorkerId")
# Largest difference between two workers' scores of one unit, relative to their size; identical machines do not
# differ.
TOLERANCE = 1e-3


def scores_agree(values_a: Any, values_b: Any) -> bool:
    """Whether two workers returned the same scores for one engine call, up to the tolerance that different machines need."""
    if not all(isinstance(values, list) and values for values in (values_a, values_b)):
        return False
    a, b = values_a[0], values_b[0]
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return False
    scale = float(np.abs(a[finite]).max(initial=1.0))
    return bool(np.abs(a[finite] - b[finite]).max(initial=0.0) <= TOLERANCE * scale)


def find_outliers(values: Mapping[WorkerId, Any], agree: Callable[[Any, Any], bool]) -> list[WorkerId]:
    """Workers whose value differs from the majority's; all workers if there is no majority."""
    for candidate in values.values():
        outliers = [worker for worker, value in values.items() if not agree(value, candidate)]
        if 2 * len(outliers) < len(values):
            return outliers
    return list(values)
