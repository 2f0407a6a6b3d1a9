"""Where the noise of many matrices lies in memory when kernels read it from there, and which matrices one launch serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import words_on
from mezzo.engines.torch.gpu.kernels import matrices
from mezzo.engines.torch.weights.noise import ALIGN
from mezzo.method import noise, rounding
from mezzo.types import TrainedTensor

AT_ONCE = 2**25
"""Elements whose signs are held at a time: 4 MiB of them for each direction."""
Matrix = tuple[TrainedTensor, Tensor]


class Signs:
    """One bit an element, of tensors side by side; `at` says at which byte a tensor's begin."""

    def __init__(self, named: Sequence[tuple[str, int]], device: torch.device) -> None:
        self.at: dict[str, int] = {}
        places: list[int] = []
        for name, count in named:
            self.at[name] = 8 * matrices.WORDS * (len(places) // 2)
            for first in range(0, -(-count // ALIGN), matrices.WORDS):
                places += (noise.name_hash(name), first // 4)
        self.places = words_on(device, places)

    def made(self, seeds: Tensor, terms: int) -> Tensor:
        """[terms, bytes] under the first so many seeds."""
        programs = len(self.places) // 2
        words = torch.empty((terms, programs * matrices.WORDS), dtype=torch.int64, device=seeds.device)
        if terms:
            matrices.fill_signs[(programs, terms)](
                words, words.shape[1], self.places, seeds, BLOCKS=matrices.BLOCKS, num_warps=2
            )
        return words.view(torch.uint8)


class FactorSigns:
    """One number a row of the factors U and V of low-rank noise, of tensors side by side."""

    def __init__(self, trained: Sequence[TrainedTensor], device: torch.device) -> None:
        self.at: dict[str, int] = {}
        self.rank = trained[0].rank
        places: list[int] = []
        for one in trained:
            for side, size in zip("UV", one.shape, strict=True):
                self.at[f"{one.name}/{side}"] = matrices.FACTOR_ROWS * (len(places) // 2)
                for first in range(0, size, matrices.FACTOR_ROWS):
                    places += (noise.name_hash(f"{one.name}/{side}"), first)
        self.places = words_on(device, places)

    def made(self, seeds: Tensor, terms: int) -> Tensor:
        programs = len(self.places) // 2
        kind = torch.uint8 if self.rank <= 8 else torch.int32
        rows = torch.empty((terms, programs * matrices.FACTOR_ROWS), dtype=kind, device=seeds.device)
        if terms:
            matrices.fill_factors[(programs, terms)](
                rows, rows.shape[1], self.places, seeds, RANK=self.rank, ROWS=matrices.FACTOR_ROWS
            )
        return rows


@dataclass(frozen=True)
class Run:
    """Matrices of one shape, type and kind of noise that one launch updates; entries as `matrices.update` reads them."""

    trained: TrainedTensor
    base: Tensor
    matrices: int
    entries: Tensor


@dataclass(frozen=True)
class Group:
    """Matrices whose noise is made together, and then used run by run."""

    signs: Signs | FactorSigns
    runs: tuple[Run, ...]


def groups_of(every: Sequence[Matrix], device: torch.device) -> list[Group]:
    """All matrices in groups of at most `AT_ONCE` elements, or of one; those with low-rank noise by rank."""
    found: list[Group] = []
    for rank, same in groupby(sorted(every, key=lambda matrix: matrix[0].rank), key=lambda matrix: matrix[0].rank):
        for part in [list(same)] if rank else portions(list(same)):
            trained = [one for one, _ in part]
            named = [(one.name, value.numel()) for one, value in part]
            signs = FactorSigns(trained, device) if rank else Signs(named, device)
            found.append(Group(signs, tuple(_runs(part, signs, device))))
    return found


def portions(every: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """One after the other, as many together as `AT_ONCE` allows."""
    part: list[Matrix] = []
    for matrix in every:
        if part and sum(value.numel() for _, value in (*part, matrix)) > AT_ONCE:
            yield part
            part = []
        part.append(matrix)
    if part:
        yield part


def _runs(part: Sequence[Matrix], signs: Signs | FactorSigns, device: torch.device) -> Iterator[Run]:
    alike: dict[tuple[object, ...], list[Matrix]] = {}
    for trained, value in part:
        first = next(iter(alike.get((trained.shape, value.dtype, trained.decay, 0), [(trained, value)])))[1]
        apart = value.data_ptr() - first.data_ptr()
        alone = value.data_ptr() if apart % (16 * value.element_size()) else 0  # kernels count in sixteens of elements
        alike.setdefault((trained.shape, value.dtype, trained.decay, alone), []).append((trained, value))
    for (_, _, _, _), same in alike.items():
        base = same[0][1]
        words: list[int] = []
        for trained, value in same:
            name, begins = trained.name, (value.data_ptr() - base.data_ptr()) // value.element_size()
            held = [signs.at[f"{name}/U"], signs.at[f"{name}/V"]] if trained.rank else [signs.at[name], 0]
            words += [begins % 2**64, noise.name_hash(name), noise.name_hash(rounding.stream(name)), *held, 0]
        yield Run(same[0][0], base, len(same), words_on(device, words))
