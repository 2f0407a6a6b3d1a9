"""Prompts to padded rows, and logits back to scores: everything about shapes that is not about weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.engines.microbatch import group_by_length
from mezzo.types import Batch, MicroBatch, Readout, Scores

TENSORS = ("ids", "mask", "segments", "positions", "targets")


@dataclass(frozen=True)
class Rows:
    """One micro-batch: padded ids, and where each row's scores come from and go to.

    A row is an example, or (example, candidate) when candidates are continuations. `positions` are the hidden states that
    the LM head must see; `targets` the tokens whose log-probability is read there (−1: none).
    """

    ids: Tensor
    mask: Tensor
    segments: Tensor | None
    positions: Tensor | None
    targets: Tensor | None
    places: npt.NDArray[np.int64]
    """[2, rows]: the examples and the candidates that rows belong to."""
    tail: tuple[int, ...]
    padded: bool

    @property
    def count(self) -> int:
        return self.places.shape[1]

    def read(self, logits: Tensor, readout: Readout, words: Tensor, members: int) -> Tensor:
        """[P·rows, positions, width] → [P·rows, *tail]; `words` are the readout's, where the logits are."""
        if readout.kind == "head":
            return logits
        if readout.kind == "words":
            return logits[:, 0].log_softmax(-1)[:, words] if readout.vocabulary else logits[:, 0]
        assert self.targets is not None
        targets = self.targets.to(logits.device).repeat(members, 1)
        found = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]
        real = targets >= 0
        total = (found * real).sum(1)
        return total if readout.reduce == "sum" else total / real.sum(1)

    def place(self, out: Scores, scores: npt.NDArray[np.float32]) -> None:
        """Write scores[P, rows, *tail] to their examples and candidates."""
        examples, candidates = self.places
        if self.tail:
            out[:, examples] = scores
        else:
            out[:, examples, candidates] = scores

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Of all the tensors, in the order of `TENSORS`."""
        return tuple(None if (value := getattr(self, name)) is None else tuple(value.shape) for name in TENSORS)


def pack(batch: Batch, micro_batch: MicroBatch, pad_id: int) -> list[Rows]:
    """Micro-batches of at most `micro_batch.rows` rows, short with short so that little is padded; a pure function."""
    units = _sequences(batch)
    whole = group_by_length([one.ids for one in units], micro_batch.rows)
    groups = [
        part
        for group in whole
        for part in _halved(group, [len(units[index].ids) for index in group], micro_batch.waste)
    ]
    return [_rows([units[index] for index in group], batch.readout, micro_batch.pad_to, pad_id) for group in groups]


def _halved(group: list[int], lengths: list[int], waste: float) -> list[list[int]]:
    """A sorted group as it is, or in two halves where too much of it would be padding."""
    if sum(lengths) >= (1 - waste) * len(group) * lengths[-1]:
        return [group]
    middle = len(group) // 2
    return [group[:middle], group[middle:]]


@dataclass(frozen=True, slots=True)
class _Sequence:
    ids: tuple[int, ...]
    segments: tuple[int, ...]
    positions: tuple[int, ...]
    targets: tuple[int, ...]
    where: tuple[int, int]


def _sequences(batch: Batch) -> list[_Sequence]:
    kind = batch.readout.kind
    if kind != "candidates":
        return [
            _Sequence(p.ids, p.segments, (p.position % len(p.ids),) if kind == "words" else (), (), (index, 0))
            for index, p in enumerate(batch.prompts)
        ]
    return [
        # The token at position t is predicted by the hidden state at t − 1.
        _Sequence(
            p.ids + candidate,
            (),
            tuple(range(len(p.ids) - 1, len(p.ids) + len(candidate) - 1)),
            candidate,
            (index, number),
        )
        for index, p in enumerate(batch.prompts)
        for number, candidate in enumerate(p.candidates)
    ]


def _rows(units: Sequence[_Sequence], readout: Readout, pad_to: int, pad_id: int) -> Rows:
    lengths = np.fromiter((len(unit.ids) for unit in units), dtype=np.int64, count=len(units))
    length = int(-(-lengths.max() // pad_to) * pad_to)
    segments = [unit.segments for unit in units] if any(unit.segments for unit in units) else None
    width = {"words": len(readout.words), "head": readout.classes, "candidates": 0}[readout.kind]
    return Rows(
        ids=padded([unit.ids for unit in units], length, pad_id),
        mask=torch.from_numpy(_filled(lengths, length).astype(np.int64)),
        segments=padded(segments, length, 0) if segments else None,
        positions=padded([unit.positions for unit in units], None, 0) if readout.kind != "head" else None,
        targets=padded([unit.targets for unit in units], None, -1) if readout.kind == "candidates" else None,
        places=np.array([unit.where for unit in units], dtype=np.int64).T,
        tail=(width,) if width else (),
        padded=bool(lengths.min() < length),
    )


def padded(rows: Sequence[Sequence[int]], length: int | None, fill: int) -> Tensor:
    """Rows of ids side by side, filled up to `length`, or to the longest."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    length = int(lengths.max()) if length is None else length
    table = np.full((len(rows), length), fill, dtype=np.int64)
    table[_filled(lengths, length)] = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
    return torch.from_numpy(table)


def _filled(lengths: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.bool_]:
    """True where a row has an element."""
    return np.arange(length) < lengths[:, None]


def picked(hidden: Tensor, positions: Tensor) -> Tensor:
    """[rows, L, d] at positions[rows, k] → [rows, k, d]."""
    return hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[-1]))
