"""What a template is made of once it is parsed: a row of small pieces, the same for both ways of writing templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal as Choice

SPECIALS = ("cls", "bos", "eos", "sep", "mask")


@dataclass(frozen=True, slots=True)
class Special:
    """A special token of the model; `advance` (`sep+`) starts the next segment after it."""

    name: str
    advance: bool = False


@dataclass(frozen=True, slots=True)
class Literal:
    """Text of the template itself. It is never truncated."""

    text: str


@dataclass(frozen=True, slots=True)
class Slot:
    """Text number `index` of the row. Texts beyond the row's own belong to its demonstrations."""

    index: int
    space: bool = False
    case: Choice["", "l", "u"] = ""
    drop: str = ""
    """`-` drops the last character whatever it is; any other character is dropped only if the text ends with it."""

    def apply(self, text: str) -> str:
        """`text` as it appears in the prompt: stripped, with this slot's changes."""
        text = text.strip()
        if self.case:
            first = text[:1].lower() if self.case == "l" else text[:1].upper()
            text = first + text[1:]
        if self.drop == "-" or (self.drop and text.endswith(self.drop)):
            text = text[:-1]
        return " " + text if self.space else text


@dataclass(frozen=True, slots=True)
class LabelWord:
    """The word of label `index` (`label_i`), or of the label of demonstration `index` (`labelx_i`)."""

    index: int
    of_demo: bool = False


Piece = Special | Literal | Slot | LabelWord
Pieces = tuple[Piece, ...]

MASK = Special("mask")


def demonstration(piece: Piece, columns: int) -> int:
    """The number of the demonstration a piece belongs to; -1 for the query's own."""
    if isinstance(piece, Slot):
        return piece.index // columns - 1
    return piece.index if isinstance(piece, LabelWord) and piece.of_demo else -1


def needs_demonstrations(pieces: Pieces, columns: int) -> bool:
    """Does the template itself place demonstrations (`sent_i` beyond the row's texts, or `labelx_i`)?"""
    return any(demonstration(piece, columns) >= 0 for piece in pieces)


def append_demonstrations(pieces: Pieces, columns: int, count: int) -> Pieces:
    """The masked-LM rule: after the query, once per label, the template again without `cls`, its mask filled."""
    body = tuple(piece for piece in pieces if piece != Special("cls"))
    return pieces + tuple(piece for i in range(count) for piece in _demonstration(body, i, columns))


def prepend_demonstrations(pieces: Pieces, columns: int, count: int, separator: str = "\n\n") -> Pieces:
    """The causal rule: before the query, once per label, the prompt with its answer, then an empty line."""
    shots: list[Piece] = []
    for i in range(count):
        shots += [*_demonstration(pieces, i, columns), LabelWord(i, of_demo=True), Literal(separator)]
    return (*shots, *pieces)


def _demonstration(pieces: Sequence[Piece], i: int, columns: int) -> list[Piece]:
    """The template's pieces with the texts and the label word of demonstration `i` instead of the query's."""
    moved: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Slot):
            moved.append(replace(piece, index=columns * (i + 1) + piece.index))
        else:
            moved.append(LabelWord(i, of_demo=True) if piece == MASK else piece)
    return moved
