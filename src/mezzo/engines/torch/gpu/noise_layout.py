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

# Elements whose ±1 noise is in memory at a time: 4 MiB for each direction.
MAX_SIGN_ELEMENTS = 2**25
Matrix = tuple[TrainedTensor, Tensor]


class SignLayout:
    """±1 noise of several tensors in memory, one bit an element; `offsets` says at which byte each tensor's begins.

    With a `rank`: of the factors U and V of low-rank noise. The signs of a factor's row are the bits of one number, and `offsets`
    count these numbers.
    """

    def __init__(self, sizes: Sequence[tuple[str, int]], device: torch.device, rank: int = 0) -> None:
        """`sizes`: the name of each tensor and its elements, or that of each factor and its rows."""
        self.rank = rank
        self.per_program = matrices.FACTOR_ROWS_PER_PROGRAM if rank else matrices.WORDS_PER_PROGRAM
        self.offsets: dict[str, int] = {}
        positions: list[int] = []
        for name, count in sizes:
            self.offsets[name] = self.per_program * (len(positions) // 2) * (1 if rank else 8)
            for first in range(0, count if rank else -(-count // ALIGN), self.per_program):
                positions += (noise.name_hash(name), first if rank else first // 4)
        self.positions = words_on(device, positions)

    def generate(self, seeds: Tensor, terms: int) -> Tensor:
        """[terms, bytes or rows]: the noise under each of the first `terms` seeds."""
        programs = len(self.positions) // 2
        dtype = (torch.uint8 if self.rank <= 8 else torch.int32) if self.rank else torch.int64
        out = torch.empty((terms, programs * self.per_program), dtype=dtype, device=seeds.device)
        arguments = out, out.shape[1], self.positions, seeds
        if terms and self.rank:
            matrices.generate_factors[(programs, terms)](*arguments, RANK=self.rank, ROWS=self.per_program)
        elif terms:
            matrices.generate_signs[(programs, terms)](*arguments, BLOCKS=matrices.BLOCKS_PER_PROGRAM, num_warps=2)
        return out if self.rank else out.view(torch.uint8)


@dataclass(frozen=True)
class UpdateLaunch:
    """Matrices of one shape, dtype and kind of noise that one launch of `matrices.update` updates."""

    trained: TrainedTensor
    """One of them."""
    base: Tensor
    entries: Tensor
    """[matrices, ENTRY_WORDS]"""


# Matrices whose noise is generated together, and then read by one launch after the other.
NoiseGroup = tuple[SignLayout, list[UpdateLaunch]]


def group_matrices(every: Sequence[Matrix], device: torch.device) -> list[NoiseGroup]:
    """Dense matrices in groups of at most `MAX_SIGN_ELEMENTS`, or of one; those with low-rank noise by rank."""
    groups: list[NoiseGroup] = []
    for rank, same_rank in groupby(sorted(every, key=lambda matrix: matrix[0].rank), key=lambda matrix: matrix[0].rank):
        for group in [list(same_rank)] if rank else split_by_size(list(same_rank)):
            if rank:
                sizes = [(f"{t.name}/{side}", size) for t, _ in group for side, size in zip("UV", t.shape, strict=True)]
            else:
                sizes = [(trained.name, value.numel()) for trained, value in group]
            layout = SignLayout(sizes, device, rank)
            groups.append((layout, list(_launches(group, layout, device))))
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


def _launches(group: Sequence[Matrix], layout: SignLayout, device: torch.device) -> Iterator[UpdateLaunch]:
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
        yield UpdateLaunch(trained, base, words_on(device, words).view(len(launch), -1))


def _entry(trained: TrainedTensor, value: Tensor, base: Tensor, offsets: dict[str, int]) -> list[int]:
    """An entry of the table that `matrices.update` reads, padded to `ENTRY_WORDS`."""
    name, distance = trained.name, (value.data_ptr() - base.data_ptr()) // value.element_size()
    noise_offsets = [offsets[f"{name}/U"], offsets[f"{name}/V"]] if trained.rank else [offsets[name], 0]
    keys = [noise.name_hash(name), noise.name_hash(rounding.stream_name(name))]
    return [distance % 2**64, *keys, *noise_offsets, 0]
