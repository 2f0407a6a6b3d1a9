"""Where the noise of many matrices lies in memory while kernels read it, and which matrices one launch updates."""

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

MAX_SIGN_ELEMENTS = 2**25
"""Elements whose ±1 noise is in memory at a time: 4 MiB for each direction."""
Matrix = tuple[TrainedTensor, Tensor]


class SignLayout:
    """±1 noise of several tensors, one bit an element; `offsets` says at which byte each tensor's begins."""

    def __init__(self, sizes: Sequence[tuple[str, int]], device: torch.device) -> None:
        self.offsets: dict[str, int] = {}
        positions: list[int] = []
        for name, count in sizes:
            self.offsets[name] = 8 * matrices.WORDS_PER_PROGRAM * (len(positions) // 2)
            for first_word in range(0, -(-count // ALIGN), matrices.WORDS_PER_PROGRAM):
                positions += (noise.name_hash(name), first_word // 4)
        self.positions = words_on(device, positions)

    def generate(self, seeds: Tensor, terms: int) -> Tensor:
        """[terms, bytes]: the noise under each of the first `terms` seeds."""
        programs = len(self.positions) // 2
        words = torch.empty((terms, programs * matrices.WORDS_PER_PROGRAM), dtype=torch.int64, device=seeds.device)
        if terms:
            matrices.generate_signs[(programs, terms)](
                words, words.shape[1], self.positions, seeds, BLOCKS=matrices.BLOCKS_PER_PROGRAM, num_warps=2
            )
        return words.view(torch.uint8)


class FactorLayout:
    """The factors U and V of several tensors' low-rank noise: the signs of each row as the bits of one number."""

    def __init__(self, trained: Sequence[TrainedTensor], device: torch.device) -> None:
        self.offsets: dict[str, int] = {}
        self.rank = trained[0].rank
        positions: list[int] = []
        for each in trained:
            for side, size in zip("UV", each.shape, strict=True):
                self.offsets[f"{each.name}/{side}"] = matrices.FACTOR_ROWS_PER_PROGRAM * (len(positions) // 2)
                for first_row in range(0, size, matrices.FACTOR_ROWS_PER_PROGRAM):
                    positions += (noise.name_hash(f"{each.name}/{side}"), first_row)
        self.positions = words_on(device, positions)

    def generate(self, seeds: Tensor, terms: int) -> Tensor:
        """[terms, rows]: the signs under each of the first `terms` seeds."""
        programs = len(self.positions) // 2
        dtype = torch.uint8 if self.rank <= 8 else torch.int32
        rows = torch.empty((terms, programs * matrices.FACTOR_ROWS_PER_PROGRAM), dtype=dtype, device=seeds.device)
        if terms:
            matrices.generate_factors[(programs, terms)](
                rows, rows.shape[1], self.positions, seeds, RANK=self.rank, ROWS=matrices.FACTOR_ROWS_PER_PROGRAM
            )
        return rows


@dataclass(frozen=True)
class UpdateLaunch:
    """Matrices of one shape, dtype and kind of noise that one launch of `matrices.update` updates."""

    trained: TrainedTensor
    """One of them."""
    base: Tensor
    matrices: int
    entries: Tensor


@dataclass(frozen=True)
class NoiseGroup:
    """Matrices whose noise is generated together, and then read by one launch after the other."""

    layout: SignLayout | FactorLayout
    launches: tuple[UpdateLaunch, ...]


def group_matrices(every: Sequence[Matrix], device: torch.device) -> list[NoiseGroup]:
    """Dense matrices in groups of at most `MAX_SIGN_ELEMENTS`, or of one; those with low-rank noise by rank."""
    groups: list[NoiseGroup] = []
    for rank, same_rank in groupby(sorted(every, key=lambda matrix: matrix[0].rank), key=lambda matrix: matrix[0].rank):
        for group in [list(same_rank)] if rank else split_by_size(list(same_rank)):
            layout: SignLayout | FactorLayout
            if rank:
                layout = FactorLayout([trained for trained, _ in group], device)
            else:
                layout = SignLayout([(trained.name, value.numel()) for trained, value in group], device)
            groups.append(NoiseGroup(layout, tuple(_launches(group, layout, device))))
    return groups


def split_by_size(every: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """Consecutive matrices, as many together as `MAX_SIGN_ELEMENTS` allows."""
    group: list[Matrix] = []
    for matrix in every:
        if group and sum(value.numel() for _, value in (*group, matrix)) > MAX_SIGN_ELEMENTS:
            yield group
            group = []
        group.append(matrix)
    if group:
        yield group


def _launches(
    group: Sequence[Matrix], layout: SignLayout | FactorLayout, device: torch.device
) -> Iterator[UpdateLaunch]:
    by_launch: dict[tuple[object, ...], list[Matrix]] = {}
    for trained, value in group:
        first = by_launch.get((trained.shape, value.dtype, trained.decay, 0), [(trained, value)])[0][1]
        distance = value.data_ptr() - first.data_ptr()
        # The kernel is told that offsets are multiples of 16 elements; a matrix at another distance gets its own launch.
        alone = value.data_ptr() if distance % (16 * value.element_size()) else 0
        by_launch.setdefault((trained.shape, value.dtype, trained.decay, alone), []).append((trained, value))
    for launch in by_launch.values():
        trained, base = launch[0]
        words = [word for each, value in launch for word in _entry(each, value, base, layout.offsets)]
        yield UpdateLaunch(trained, base, len(launch), words_on(device, words))


def _entry(trained: TrainedTensor, value: Tensor, base: Tensor, offsets: dict[str, int]) -> list[int]:
    """An entry of the table that `matrices.update` reads, padded to `ENTRY_WORDS`."""
    name, distance = trained.name, (value.data_ptr() - base.data_ptr()) // value.element_size()
    noise_offsets = [offsets[f"{name}/U"], offsets[f"{name}/V"]] if trained.rank else [offsets[name], 0]
    keys = [noise.name_hash(name), noise.name_hash(rounding.stream_name(name))]
    return [distance % 2**64, *keys, *noise_offsets, 0]
