"""Can an answer be true, and do workers agree? Pure functions over what came back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from mezzo.engines.microbatch import EngineCall, candidate_count
from mezzo.types import Batch

Name = TypeVar("Name")
TOLERANCE = 1e-3
"""Largest difference of one unit's scores between two workers, relative to their size; equal machines differ by nothing."""


def well_formed(found: Any, piece: EngineCall) -> bool:
    """Whether this is an array of scores for that piece at all."""
    return (
        isinstance(found, np.ndarray)
        and found.dtype == np.float32
        and found.shape == (len(piece.probes), len(piece.batch), candidate_count(piece.batch))
    )


def are_numbers(found: np.ndarray[Any, Any], batch: Batch) -> bool:
    """Finite wherever an example has a candidate; where it has none, minus infinity stands."""
    if np.isfinite(found).all():
        return True
    if batch.readout.kind != "candidates":
        return False
    counts = np.array([len(prompt.candidates) for prompt in batch.prompts])
    real = np.arange(found.shape[2])[None, :] < counts[:, None]
    return bool(np.isfinite(found[:, real]).all())


def alike(a: Any, b: Any) -> bool:
    """Whether two workers computed the same: bit for bit on equal machines, and closely on others."""
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return False
    scale = float(np.abs(a[finite]).max(initial=1.0))
    return bool(np.abs(a[finite] - b[finite]).max(initial=0.0) <= TOLERANCE * scale)


def dissenters(answers: Mapping[Name, Any], same: Callable[[Any, Any], bool]) -> list[Name]:
    """Those who differ from the majority; everyone where there is none, for then nobody can be believed."""
    for candidate in answers.values():
        differ = [name for name, answer in answers.items() if not same(answer, candidate)]
        if 2 * len(differ) < len(answers):
            return differ
    return list(answers)
