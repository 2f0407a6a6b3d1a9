"""The nodes of a parsed template. Both ways of writing templates are parsed into the same nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """The first letter: `l` for lower case, `u` for upper case, empty for as it is."""
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


Node = SpecialToken | Text | Slot | LabelWord
Nodes = tuple[Node, ...]

MASK = SpecialToken("mask")


def demonstration_index(node: Node, columns: int) -> int:
    """The number of the demonstration a node belongs to; -1 for the query."""
    if isinstance(node, Slot):
        return node.index // columns - 1
    return node.index if isinstance(node, LabelWord) and node.of_demo else -1


def contains_demonstrations(nodes: Nodes, columns: int) -> bool:
    """Does the template itself contain demonstrations (`sent_i` beyond the row's texts, or `labelx_i`)?"""
    return any(demonstration_index(node, columns) >= 0 for node in nodes)


def append_demonstrations(nodes: Nodes, columns: int, count: int) -> Nodes:
    """For masked models: after the query, once per label, the template again without `cls`, its mask filled."""
    body = tuple(node for node in nodes if node != SpecialToken("cls"))
    return nodes + tuple(node for i in range(count) for node in _demonstration_nodes(body, i, columns))


def prepend_demonstrations(nodes: Nodes, columns: int, count: int, separator: str = "\n\n") -> Nodes:
    """For causal models: before the query, once per label, the prompt with its answer, then an empty line."""
    demonstrations: list[Node] = []
    for i in range(count):
        demonstrations += [*_demonstration_nodes(nodes, i, columns), LabelWord(i, of_demo=True), Text(separator)]
    return (*demonstrations, *nodes)


def _demonstration_nodes(nodes: Sequence[Node], i: int, columns: int) -> list[Node]:
    """The template's nodes with the texts and the label word of demonstration `i` instead of the query's."""
    renumbered: list[Node] = []
    for node in nodes:
        if isinstance(node, Slot):
            renumbered.append(replace(node, index=columns * (i + 1) + node.index))
        else:
            renumbered.append(LabelWord(i, of_demo=True) if node == MASK else node)
    return renumbered
