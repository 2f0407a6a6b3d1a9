"""Trained tensors on their way between ranks and the outside: put together, checked, hashed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mezzo.engines.sglang.matrices import Piece
from mezzo.engines.torch import catalog
from mezzo.errors import JournalError
from mezzo.types import TrainedTensor

Array = npt.NDArray[np.generic]


def assembled(trained: Sequence[TrainedTensor], ranks: Iterable[Sequence[Piece]]) -> dict[str, Array]:
    """Whole tensors from every rank's share; a replicated share is written twice."""
    whole: dict[str, Array] = {t.name: np.full(t.shape, np.nan, dtype=np.float32) for t in trained}
    for pieces in ranks:
        for piece in pieces:
            whole[piece.name][slice(*piece.rows), slice(*piece.cols)] = piece.values  # type: ignore[index]
    return whole


def fitting(trained: Sequence[TrainedTensor], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors if they belong to this run."""
    if set(tensors) != {t.name for t in trained}:
        raise JournalError("the tensors do not belong to this run: their names differ")
    for each in trained:
        if tuple(tensors[each.name].shape) != each.shape:
            raise JournalError(f"{each.name} has shape {tensors[each.name].shape}, expected {each.shape}")
    return dict(tensors)


def digest_of(tensors: Mapping[str, Array], dtype: torch.dtype) -> str:
    """Of the tensors as they are stored: their float32 values are those of `dtype`."""
    return catalog.digest_of(
        (name, torch.from_numpy(np.ascontiguousarray(value)).to(dtype)) for name, value in tensors.items()
    )
