"""The nodes of a parsed template. Both ways of writing templates are parsed into the same nodes."""

from __future__ import annotations

from dataclasses import dataclass

SPECIAL_TOKENS = ("cls", "bos", "eos", "sep", "mask")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token of the model; after one with `advance` (`sep+`) the next segment starts."""

    name: str
    advance: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the template itself. It is never truncated."""

    text: str


@dataclass(frozen=True, slots=True)
class Slot:
    """Text number `index` of the row. Texts beyond the row's own belong to its demonstrations."""

    index: int
    space: bool = False
    case: str = ""
    """`l` for the first letter in lower case, `u` in upper case, `L` for all of it in lower case; empty for as it is."""
    drop: str = ""
    """`-` drops the last character whatever it is; otherwise it is dropped if it is one of these."""

    def apply(self, text: str) -> str:
        """`text` as it appears in the prompt: stripped, with this slot's changes."""
        text = text.strip()
        if self.case == "L":
            text = text.lower()
        elif self.case:
            first = text[:1].lower() if self.case == "l" else text[:1].upper()
            text = first + text[1:]
        if self.drop == "-" or text.endswith(tuple(self.drop)):
            text = text[:-1]
        return " " + text if self.space else text


@dataclass(frozen=True, slots=True)
class LabelWord:
    """The word of label `index` (`label_i`), or of the label of demonstration `index` (`labelx_i`)."""

    index: int
    of_demo: bool = False


Node = SpecialToken | Text | Slot | LabelWord
Nodes = tuple[Node, ...]

MASK = SpecialToken("mask")
