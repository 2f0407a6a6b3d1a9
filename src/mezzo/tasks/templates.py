"""Templates: the star grammar (`*cls**sent_0*_It_was*mask*.*sep+*`) and plain ones (`{text} It was [MASK].`).

Both are parsed into the same pieces and checked against the task's columns, before any model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from mezzo.errors import TaskError, nearest
from mezzo.tasks.template_ast import (
    MASK,
    SPECIALS,
    LabelWord,
    Literal,
    Piece,
    Pieces,
    Slot,
    Special,
    needs_demonstrations,
)

_SENT = re.compile(r"(\+?)sent([lu]?)(-?)_(\d+)")
_LABEL = re.compile(r"label(x?)_(\d+)")
_STAR_TOKEN = re.compile(r"\*(?:\+?sent[a-z]*-?_\w+|labelx?_\w+|mask|cls|bos|eos|sep\+?)\*")
_TOKEN_LIKE = re.compile(r"\+?[a-z]+[-+]?(?:_\w*)?")
_STAR_NAMES = (*SPECIALS, "sep+", "sent_0", "+sent_0", "sent-_0", "sentl_0", "+sentl_0", "sentu_0", "label_0")

_PLAIN_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|\[MASK\]|<mask>")
_PUNCTUATION = "?!.,;:"
_CASES = "lu"
_DROPS = "-" + _PUNCTUATION


@lru_cache(maxsize=256)
def parse(template: str, columns: tuple[str, ...], family: str) -> Pieces:
    """The template's pieces, checked: every column has a slot, and there is one mask (masked) or none (causal)."""
    if not template.strip():
        raise TaskError("the template is empty; write one such as '{text} It was [MASK].'")
    star = _STAR_TOKEN.search(template) is not None
    pieces = _parse_star(template) if star else _parse_plain(template, columns, family)
    if family == "causal":
        pieces = _without_trailing_spaces(pieces)
    _check(template, pieces, columns, family)
    return pieces


def ends_with_space(pieces: Pieces) -> bool:
    """Does the prompt end in whitespace (a newline), so that an answer needs no space before it?"""
    return bool(pieces) and isinstance(pieces[-1], Literal) and pieces[-1].text[-1:].isspace()


def render(pieces: Pieces, texts: Sequence[str], mask: str = "[MASK]") -> str:
    """The prompt as a person reads it, with no tokenizer: `cls` and `sep` left out, the mask written as `[MASK]`."""
    out = ""
    for piece in pieces:
        if isinstance(piece, Literal):
            out += piece.text
        elif isinstance(piece, Slot):
            out += piece.apply(texts[piece.index]) if piece.index < len(texts) else "…"
        elif isinstance(piece, LabelWord):
            out += f" <label {piece.index}>"
        elif piece == MASK:
            out += mask if not out or out[-1].isspace() else " " + mask
    return out


def head_pieces(columns: int) -> Pieces:
    """What a classification head reads: `cls text sep`, with one more `text sep` per further column."""
    texts = tuple(piece for i in range(columns) for piece in (Slot(i), Special("sep", advance=True)))
    return (Special("cls"), *texts)


# --- the star grammar


def _parse_star(template: str) -> Pieces:
    parts = template.split("*")
    pieces = (_star_piece(part, between_stars=i % 2 == 1) for i, part in enumerate(parts) if part)
    return tuple(pieces)


def _star_piece(part: str, between_stars: bool) -> Piece:
    if part in SPECIALS:
        return Special(part)
    if part == "sep+":
        return Special("sep", advance=True)
    if found := _SENT.fullmatch(part):
        space, case, drop, index = found.groups()
        return Slot(int(index), bool(space), "l" if case == "l" else "u" if case == "u" else "", drop)
    if found := _LABEL.fullmatch(part):
        return LabelWord(int(found[2]), of_demo=bool(found[1]))
    if between_stars and _TOKEN_LIKE.fullmatch(part):
        raise TaskError(f"unknown token '*{part}*' in the template{nearest(part, _STAR_NAMES)}")
    return Literal(part.replace("_", " "))


# --- plain templates


def _parse_plain(template: str, columns: tuple[str, ...], family: str) -> Pieces:
    if not any(found[1] is not None for found in _PLAIN_TOKEN.finditer(template)):
        template = _with_slots(template, columns)
    pieces: list[Piece] = []
    literal, end = "", 0
    for found in _PLAIN_TOKEN.finditer(template):
        literal += template[end : found.start()]
        end = found.end()
        token = found[0]
        if token in ("{{", "}}"):
            literal += token[0]
        elif token in "{}":
            raise TaskError(f"a lone {token!r} in the template; write {token * 2!r} for the character itself")
        elif found[1] is None:  # the mask stands for ` word`: the space before it belongs to the word
            pieces += [*_literal(literal.rstrip(" ")), MASK]
            literal = ""
        else:  # the space before a text belongs to the text, as in `+sent_1`
            space = literal.endswith(" ")
            pieces += [*_literal(literal[:-1] if space else literal), _slot(found[1], columns, space)]
            literal = ""
    pieces += _literal(literal + template[end:])
    return (Special("cls"), *pieces, Special("sep", advance=True)) if family == "masked" else tuple(pieces)


def _with_slots(template: str, columns: tuple[str, ...]) -> str:
    """A template without a slot: a suffix of one sentence, an infix of two, as in the reference's T1, T2 and T3."""
    body = template.strip(" ")
    stops = body[0] in _PUNCTUATION
    if len(columns) == 1:
        return "{0}" + ("" if stops else " ") + body
    if len(columns) == 2:  # punctuation replaces the first sentence's own; the second goes on in lower case
        return ("{0:-}" if stops else "{0} ") + body + " {1:l}"
    raise TaskError(f"a template without slots fits one or two texts, and the task has {', '.join(columns)}; add slots")


def _slot(spec: str, columns: tuple[str, ...], space: bool) -> Slot:
    name, _, changes = spec.partition(":")
    if name.isdecimal():
        index = int(name)
    elif name in columns:
        index = columns.index(name)
    else:
        raise TaskError(f"the template names {name!r}, not a column of {', '.join(columns)}{nearest(name, columns)}")
    case = "".join(c for c in changes if c in _CASES)
    drop = "".join(c for c in changes if c in _DROPS)
    if len(case) > 1 or len(drop) > 1 or len(case) + len(drop) < len(changes):
        raise TaskError(
            f"unknown change {changes!r} in '{{{spec}}}'; use l or u (first letter), - or a mark {_PUNCTUATION}"
        )
    return Slot(index, space, "l" if case == "l" else "u" if case == "u" else "", drop)


def _literal(text: str) -> list[Piece]:
    return [Literal(text)] if text else []


def _without_trailing_spaces(pieces: Pieces) -> Pieces:
    """Spaces at the end of a causal prompt belong to the answer: ` because` + ` the sun`, one token each."""
    if pieces and isinstance(pieces[-1], Literal):
        return (*pieces[:-1], *_literal(pieces[-1].text.rstrip(" ")))
    return pieces


# --- checks


def _check(template: str, pieces: Pieces, columns: tuple[str, ...], family: str) -> None:
    masks = pieces.count(MASK)
    if family == "causal" and masks:
        raise TaskError(f"the template {template!r} has a mask, and the task is causal; end it where the answer begins")
    if family == "masked" and masks == 0:
        raise TaskError(f"the template {template!r} has no mask; put [MASK] (or *mask*) where the label word goes")
    if masks > 1:
        raise TaskError(f"the template {template!r} has {masks} masks; keep one")
    used = {piece.index for piece in pieces if isinstance(piece, Slot)}
    for i, column in enumerate(columns):
        if i not in used:
            raise TaskError(f"the template {template!r} has no slot for {column!r}; add {{{column}}} (or *sent_{i}*)")
    placed = any(isinstance(piece, LabelWord) and piece.of_demo for piece in pieces)
    if needs_demonstrations(pieces, len(columns)) and not placed:
        raise TaskError(
            f"the template {template!r} has a slot {max(used)}, and the task's texts are 0 to {len(columns) - 1}"
            f" ({', '.join(columns)})"
        )
