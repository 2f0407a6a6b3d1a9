"""Templates: the star grammar (`*cls**sent_0*_It_was*mask*.*sep+*`) and plain ones (`{text} It was [MASK].`).

Both are parsed into the same nodes and checked against the task's columns before any model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from mezzo.errors import TaskError, nearest
from mezzo.tasks.column_names import find_column
from mezzo.tasks.template_ast import MASK, SPECIAL_TOKENS, LabelWord, Node, Nodes, Slot, SpecialToken, Text

_SENT = re.compile(r"(\+?)sent([lu]?)(-?)_(\d+)")
_LABEL = re.compile(r"label(x?)_(\d+)")
_STAR_TOKEN = re.compile(r"\*(?:\+?sent[a-z]*-?_\w+|labelx?_\w+|mask|cls|bos|eos|sep\+?)\*")
_TOKEN_LIKE = re.compile(r"\+?[a-z]+[-+]?(?:_\w*)?")
_STAR_NAMES = (*SPECIAL_TOKENS, "sep+", "sent_0", "+sent_0", "sent-_0", "sentl_0", "+sentl_0", "sentu_0", "label_0")

_PLAIN_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|\[mask\]|<mask>", re.IGNORECASE)
# What other programs write for a text or a special token, and what would be ordinary text here.
_STAND_IN = re.compile(r"\[(\w+)\]|</?s>")
_STAND_INS = ("text", "input", "x")
_PUNCTUATION = "?!.,;:"
_CASES = "luL"
_DROPS = "-" + _PUNCTUATION


@lru_cache(maxsize=256)
def parse(template: str, columns: tuple[str, ...], family: str) -> Nodes:
    """The template's nodes, checked: every column has a slot, and there is one mask (masked) or none (causal)."""
    if not template.strip():
        raise TaskError("the template is empty; write one such as '{text} It was [MASK].'")
    star = _STAR_TOKEN.search(template) is not None
    nodes = _parse_star(template) if star else _parse_plain(template, columns, family)
    if family == "causal":
        nodes = _strip_trailing_spaces(nodes)
    _check(template, nodes, columns, family)
    return nodes


def ends_with_space(nodes: Nodes) -> bool:
    """Does the prompt end in whitespace (a newline), so that an answer needs no space before it?"""
    return bool(nodes) and isinstance(nodes[-1], Text) and nodes[-1].text[-1:].isspace()


def render(nodes: Nodes, texts: Sequence[str], mask: str = "[MASK]") -> str:
    """The prompt for a human reader, without a tokenizer: `cls` and `sep` left out, the mask written as `[MASK]`."""
    prompt = ""
    for node in nodes:
        if isinstance(node, Text):
            prompt += node.text
        elif isinstance(node, Slot):
            prompt += node.apply(texts[node.index]) if node.index < len(texts) else "…"
        elif isinstance(node, LabelWord):
            prompt += f" <label {node.index}>"
        elif node == MASK:
            prompt += mask if not prompt or prompt[-1].isspace() else " " + mask
    return prompt


def head_nodes(columns: int) -> Nodes:
    """The input of a classification head: `cls text sep`, with one more `text sep` per further column."""
    texts = tuple(node for i in range(columns) for node in (Slot(i), SpecialToken("sep", advance=True)))
    return (SpecialToken("cls"), *texts)


# --- demonstrations


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


def _demonstration_nodes(nodes: Nodes, i: int, columns: int) -> Nodes:
    """The template's nodes with the texts and the label word of demonstration `i` instead of the query's."""
    filled = (LabelWord(i, of_demo=True) if node == MASK else node for node in nodes)
    offset = columns * (i + 1)
    return tuple(replace(node, index=offset + node.index) if isinstance(node, Slot) else node for node in filled)


# --- the star grammar


def _parse_star(template: str) -> Nodes:
    tokens = template.split("*")
    return tuple(_parse_star_token(token, between_stars=i % 2 == 1) for i, token in enumerate(tokens) if token)


def _parse_star_token(token: str, between_stars: bool) -> Node:
    if token in SPECIAL_TOKENS:
        return SpecialToken(token)
    if token == "sep+":
        return SpecialToken("sep", advance=True)
    if match := _SENT.fullmatch(token):
        space, case, drop, index = match.groups()
        return Slot(int(index), bool(space), case, drop)
    if match := _LABEL.fullmatch(token):
        return LabelWord(int(match[2]), of_demo=bool(match[1]))
    if between_stars and _TOKEN_LIKE.fullmatch(token):
        raise TaskError(f"unknown token '*{token}*' in the template{nearest(token, _STAR_NAMES)}")
    return Text(token.replace("_", " "))


# --- plain templates


def _parse_plain(template: str, columns: tuple[str, ...], family: str) -> Nodes:
    if "mask" not in columns:
        template = template.replace("{mask}", "[MASK]")
    has_slots = any(match[1] is not None for match in _PLAIN_TOKEN.finditer(template))
    _refuse_stand_ins(template, columns, has_slots)
    if not has_slots:
        template = _add_slots(template, columns, family)
    nodes: list[Node] = []
    text, end = "", 0
    for match in _PLAIN_TOKEN.finditer(template):
        text += template[end : match.start()]
        end = match.end()
        token = match[0]
        if token in ("{{", "}}"):
            text += token[0]
        elif token in "{}":
            raise TaskError(f"a lone {token!r} in the template; write {token * 2!r} for the character itself")
        elif match[1] is None:  # the mask stands for ` word`: the space before it belongs to the word
            nodes += [*_text_nodes(text.rstrip(" ")), MASK]
            text = ""
        else:  # the space before a slot belongs to the slot, as in `+sent_1`
            space = text.endswith(" ")
            nodes += [*_text_nodes(text[:-1] if space else text), _parse_slot(match[1], columns, space)]
            text = ""
    nodes += _text_nodes(text + template[end:])
    return (SpecialToken("cls"), *nodes, SpecialToken("sep", advance=True)) if family == "masked" else tuple(nodes)


def _refuse_stand_ins(template: str, columns: tuple[str, ...], has_slots: bool) -> None:
    for match in _STAND_IN.finditer(template):
        name = (match[1] or match[0]).lower()
        if name in ("cls", "sep", "pad", "bos", "eos", "<s>", "</s>"):
            raise TaskError(f"{match[0]!r} in the template would be ordinary text; leave it out, it is added by itself")
        column = find_column(name, columns) or (columns[0] if name in _STAND_INS else None)
        if column and (match[1].isupper() or not has_slots):
            raise TaskError(f"{match[0]!r} in the template would be ordinary text; write {{{column}}} for the text")


def _add_slots(template: str, columns: tuple[str, ...], family: str) -> str:
    """Complete a template without slots: it follows one text or joins two, as in the published T1, T2 and T3. One that ends in
    a colon precedes its text, as T5 does."""
    body = template.strip(" ")
    if len(columns) == 1 and family == "masked" and body.endswith(":"):
        return body + " {0}"
    starts_with_punctuation = body[0] in _PUNCTUATION
    if len(columns) == 1:
        return "{0}" + ("" if starts_with_punctuation else " ") + body
    if len(columns) == 2:  # punctuation replaces that of the first text; the second continues in lower case
        return ("{0:.?!}" if starts_with_punctuation else "{0} ") + body + " {1:l}"
    raise TaskError(f"a template without slots fits one or two texts, but the task has {', '.join(columns)}; add slots")


def _parse_slot(spec: str, columns: tuple[str, ...], space: bool) -> Slot:
    name, _, changes = spec.partition(":")
    if name.isdecimal():
        index = int(name)
    elif column := find_column(name, columns):
        index = columns.index(column)
    else:
        slots = ", ".join(f"{{{column}}}" for column in columns)
        raise TaskError(f"the template has {{{name}}}, and the task's texts are {slots}{nearest(name, columns)}")
    case = "".join(c for c in changes if c in _CASES)
    drop = "".join(c for c in changes if c in _DROPS)
    if len(case) > 1 or ("-" in drop and len(drop) > 1) or len(case) + len(drop) < len(changes):
        raise TaskError(
            f"unknown change {changes!r} in '{{{spec}}}'; use l or u (first letter), L (all letters), - or some of"
            f" {_PUNCTUATION}"
        )
    return Slot(index, space, case, drop)


def _text_nodes(text: str) -> list[Node]:
    return [Text(text)] if text else []


def _strip_trailing_spaces(nodes: Nodes) -> Nodes:
    """Spaces at the end of a causal prompt belong to the answer: ` because` + ` the sun`, one token each."""
    if nodes and isinstance(nodes[-1], Text):
        return (*nodes[:-1], *_text_nodes(nodes[-1].text.rstrip(" ")))
    return nodes


# --- checks


def _check(template: str, nodes: Nodes, columns: tuple[str, ...], family: str) -> None:
    masks = nodes.count(MASK)
    if family == "causal" and masks:
        raise TaskError(f"the template {template!r} has a mask, but the task is causal; end it where the answer begins")
    if family == "masked" and masks == 0:
        raise TaskError(f"the template {template!r} has no mask; put [MASK] (or *mask*) where the label word goes")
    if masks > 1:
        raise TaskError(f"the template {template!r} has {masks} masks; keep one")
    slots = {node.index for node in nodes if isinstance(node, Slot)}
    for i, column in enumerate(columns):
        if i not in slots:
            raise TaskError(f"the template {template!r} has no slot for {column!r}; add {{{column}}} (or *sent_{i}*)")
    has_demo_labels = any(isinstance(node, LabelWord) and node.of_demo for node in nodes)
    if contains_demonstrations(nodes, len(columns)) and not has_demo_labels:
        raise TaskError(
            f"the template {template!r} has a slot {max(slots)}, but the task's texts are 0 to {len(columns) - 1}"
            f" ({', '.join(columns)})"
        )
