"""Trained tensors on their way between the ranks and the driver: parts of them, and their encoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.types import TrainedTensor

Array = npt.NDArray[np.generic]


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


def to_tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def to_numpy(value: Tensor) -> Array:
    """A float32 copy on the host."""
    return value.detach().float().cpu().numpy().copy()
