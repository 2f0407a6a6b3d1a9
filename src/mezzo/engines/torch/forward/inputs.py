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
class PaddedRows:
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
    """The shape of one row's scores."""
    has_padding: bool

    @property
    def count(self) -> int:
        return self.places.shape[1]

    def read_scores(self, logits: Tensor, readout: Readout, words: Tensor, members: int) -> Tensor:
        """[P·rows, positions, width] → [P·rows, *tail]; `words` are the readout's, where the logits are."""
        if readout.kind == "head":
            return logits
        if readout.kind == "words":
            return logits[:, 0].log_softmax(-1)[:, words] if readout.vocabulary else logits[:, 0]
        assert self.targets is not None
        targets = self.targets.to(logits.device).repeat(members, 1)
        is_target = targets >= 0
        total = sum_log_probabilities(logits, targets, is_target)
        return total if readout.reduce == "sum" else total / is_target.sum(1)

    def write_scores(self, out: Scores, scores: npt.NDArray[np.float32]) -> None:
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


def make_rows(batch: Batch, micro_batch: MicroBatch, pad_id: int) -> list[PaddedRows]:
    """Micro-batches of at most `micro_batch.rows` rows of similar length, so that little is padded; a pure function."""
    sequences = _sequences(batch)
    return [
        _padded_rows(part, batch.readout, micro_batch.pad_to, pad_id)
        for group in group_by_length([sequence.ids for sequence in sequences], micro_batch.rows)
        for part in _halve_if_wasteful([sequences[index] for index in group], micro_batch.waste)
    ]


def _halve_if_wasteful(group: list[_Sequence], waste: float) -> list[list[_Sequence]]:
    """A sorted group as it is, or in two halves where too much of it would be padding."""
    lengths, middle = [len(sequence.ids) for sequence in group], len(group) // 2
    is_full = sum(lengths) >= (1 - waste) * len(group) * lengths[-1]
    return [group] if is_full else [group[:middle], group[middle:]]


@dataclass(frozen=True, slots=True)
class _Sequence:
    ids: tuple[int, ...]
    segments: tuple[int, ...]
    positions: tuple[int, ...]
    targets: tuple[int, ...]
    place: tuple[int, int]


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


def _padded_rows(sequences: Sequence[_Sequence], readout: Readout, pad_to: int, pad_id: int) -> PaddedRows:
    lengths = np.fromiter((len(sequence.ids) for sequence in sequences), dtype=np.int64, count=len(sequences))
    length = int(-(-lengths.max() // pad_to) * pad_to)
    segments = [sequence.segments for sequence in sequences] if any(s.segments for s in sequences) else None
    width = {"words": len(readout.words), "head": readout.classes, "candidates": 0}[readout.kind]
    return PaddedRows(
        ids=pad([sequence.ids for sequence in sequences], length, pad_id),
        mask=torch.from_numpy(_length_mask(lengths, length).astype(np.int64)),
        segments=pad(segments, length, 0) if segments else None,
        positions=pad([sequence.positions for sequence in sequences], None, 0) if readout.kind != "head" else None,
        targets=pad([sequence.targets for sequence in sequences], None, -1) if readout.kind == "candidates" else None,
        places=np.array([sequence.place for sequence in sequences], dtype=np.int64).T,
        tail=(width,) if width else (),
        has_padding=bool(lengths.min() < length),
    )


def pad(rows: Sequence[Sequence[int]], length: int | None, fill: int) -> Tensor:
    """Rows as one table, filled up to `length`, or to the longest."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    length = int(lengths.max()) if length is None else length
    table = np.full((len(rows), length), fill, dtype=np.int64)
    table[_length_mask(lengths, length)] = np.fromiter(
        chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum())
    )
    return torch.from_numpy(table)


def _length_mask(lengths: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.bool_]:
    """True where a row has an element."""
    return np.arange(length) < lengths[:, None]


def select_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """[rows, L, d] at positions[rows, k] → [rows, k, d]."""
    return hidden.gather(1, positions.to(hidden.device)[:, :, None].expand(-1, -1, hidden.shape[-1]))


def sum_log_probabilities(logits: Tensor, targets: Tensor, is_target: Tensor) -> Tensor:
    """[rows]: the summed log-probabilities of targets[rows, k] by logits[rows, k, vocabulary], where `is_target`."""
    log_probabilities = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]
    return (log_probabilities * is_target).sum(1)
