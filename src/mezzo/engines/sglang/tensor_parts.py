"""Trained tensors on their way between the ranks and the driver: assembled, checked, hashed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.engines.torch import catalog
from mezzo.errors import JournalError
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


def refuse_foreign_tensors(trained: Sequence[TrainedTensor], tensors: Mapping[str, Array]) -> None:
    """Raise JournalError unless names and shapes are those of the run."""
    if set(tensors) != {t.name for t in trained}:
        raise JournalError("the tensors do not belong to this run: their names differ")
    for each in trained:
        if tuple(tensors[each.name].shape) != each.shape:
            raise JournalError(f"{each.name} has shape {tensors[each.name].shape}, expected {each.shape}")


def digest_tensors(tensors: Mapping[str, Array], dtype: torch.dtype) -> str:
    """The digest of the tensors as stored: in `dtype`, whose values they hold in float32."""
    return catalog.digest_of((name, to_tensor(values).to(dtype)) for name, values in tensors.items())


def to_tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def to_numpy(value: Tensor) -> Array:
    """A float32 copy on the host."""
    return value.detach().float().cpu().numpy().copy()
