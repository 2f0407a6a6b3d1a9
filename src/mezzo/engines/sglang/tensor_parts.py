"""Trained tensors on their way between the ranks and the driver: the parts that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mezzo.engines.arrays import Array
from mezzo.types import TrainedTensor


@dataclass(frozen=True)
class TensorPart:
    """One rank's values of a trained tensor: its rows and columns [start, stop)."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    values: Array


def assemble_tensors(trained: Sequence[TrainedTensor], ranks: Iterable[Sequence[TensorPart]]) -> dict[str, Array]:
    """Complete tensors from the parts of all ranks; a part that several ranks hold is written more than once."""
    tensors: dict[str, Array] = {t.name: np.full(t.shape, np.nan, dtype=np.float32) for t in trained}
    for parts in ranks:
        for part in parts:
            tensors[part.name][slice(*part.rows), slice(*part.cols)] = part.values  # type: ignore[index]
    return tensors
