"""Projection matrices inside one worker, updated in place from (seed, coefficient) in SGLang's fused and split weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.engines.sglang.shards import Part
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.engines.torch.weights.reference_ops import update_values
from mezzo.errors import ModelError
from mezzo.method import noise, rounding
from mezzo.types import TrainedTensor, Update

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Piece:
    """This rank's share of a trained tensor: rows and columns [start, stop) of the whole."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    values: Array


class Matrices:
    """This rank's share of the trained matrices. `places` says of each where it lies: its part, and SGLang's layer."""

    def __init__(
        self, trained: Sequence[TrainedTensor], places: Mapping[str, tuple[Part, Any]], source: NoiseSource
    ) -> None:
        self.trained, self.places, self.source = tuple(trained), places, source
        for each in self.trained:
            held, part = self.view(each), places[each.name][0]
            if tuple(held.shape) != (part.rows[1] - part.rows[0], part.cols[1] - part.cols[0]):
                raise ModelError(f"SGLang stores {each.name} in another layout: {tuple(held.shape)} on this rank")

    def view(self, trained: TrainedTensor) -> Tensor:
        part, layer = self.places[trained.name]
        weight: Tensor = layer.weight.data
        return weight[part.local_rows]

    def apply(self, update: Update) -> None:
        """To the rounding that every engine keeps; U·Vᵀ is integers, exact in any order and on any share of it."""
        for trained in self.trained:
            scaled = tuple((seed, noise.factor_scale(coef, trained.rank)) for seed, coef in update.terms)
            update_values(
                self.view(trained),
                trained.decay,
                Update(scaled, update.keep),
                lambda seed, t=trained: self._noise(t, seed),  # type: ignore[misc]
                lambda t=trained: self._rounding(t, rounding.first_seed(update)),  # type: ignore[misc]
            )
        self.source.clear_cache()

    def _noise(self, trained: TrainedTensor, seed: int) -> Tensor:
        part = self.places[trained.name][0]
        left, right = self.source.factors(seed, trained.name, trained.shape, trained.rank)
        return left[slice(*part.rows)] @ right[slice(*part.cols)].T

    def _rounding(self, trained: TrainedTensor, seed: int) -> Tensor:
        """The rounding bits of this share, two bytes an element: whole rows are drawn, its columns kept."""
        part, width = self.places[trained.name][0], trained.shape[1]
        drawn = self.source.rounding_bits(seed, trained.name, part.rows[0] * width, part.rows[1] * width)
        first, last = part.cols
        return drawn.view(-1, 2 * width)[:, 2 * first : 2 * last].contiguous()

    def state(self) -> list[Piece]:
        found = []
        for trained in self.trained:
            part = self.places[trained.name][0]
            found.append(Piece(trained.name, part.rows, part.cols, to_numpy(self.view(trained))))
        return found

    def load(self, name: str, whole: Tensor) -> None:
        """Put this rank's share of a whole matrix where it belongs."""
        part, layer = self.places[name]
        layer.weight.data[part.local_rows].copy_(whole[slice(*part.rows), slice(*part.cols)])


def to_numpy(value: Tensor) -> Array:
    return value.detach().float().cpu().numpy().copy()


def probe_factors(source: NoiseSource, trained: TrainedTensor, seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """The adapter (A, B) that adds scale·z to a matrix: W + s·U·Vᵀ/√r has A = Vᵀ and B = s/√r·U."""
    left, right = source.factors(seed, trained.name, trained.shape, trained.rank)
    factor = torch.tensor(scale, dtype=torch.float32) * (1 / trained.rank**0.5)
    return right.T, left * factor
