"""A tokenizer seen through the few questions encoding asks of it; decided by looking at it, never at its name."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from mezzo.errors import TaskError

Ids = tuple[int, ...]

_ANCHORS = ("a", "e", "0", "(", "x", ".", "t", "s", "i", "o", "n")
_ENDLESS = 1_000_000  # a tokenizer without a limit reports an astronomically large one


@runtime_checkable
class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def __call__(self, text: str, **options: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    def decode(self, token_ids: list[int], **options: Any) -> str: ...


class Tokens:
    """Text to ids, piece by piece. User text never turns into a special token, whatever it contains."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    # --- what the tokenizer is like

    @cached_property
    def specials(self) -> frozenset[int]:
        """Ids that text must never produce. `unk` is allowed (it is what unknown characters become) unless it doubles
        as another special token, as in GPT-2."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        ids = set(getattr(self.tokenizer, "all_special_ids", ())) | {i for i, token in added.items() if token.special}
        roles = ("cls", "sep", "mask", "bos", "eos", "pad")
        if self.unk not in {getattr(self.tokenizer, f"{role}_token_id", None) for role in roles}:
            ids.discard(self.unk)
        return frozenset(i for i in ids if i is not None)

    @cached_property
    def unk(self) -> int | None:
        return getattr(self.tokenizer, "unk_token_id", None)

    @cached_property
    def marks(self) -> tuple[str, str]:
        """The word-initial marks in `a a`: before the first and before the second word.

        Byte-level BPE says ('', 'Ġ'), SentencePiece ('▁', '▁'), WordPiece ('', '').
        """
        for letter in _ANCHORS:
            ids = self._encode(f"{letter} {letter}")
            parts = "".join(self.show(ids)).split(letter)
            if self.unk not in ids and len(parts) == 3 and not parts[2]:
                return parts[0], parts[1]
        return "", ""

    @property
    def adds_mark(self) -> bool:
        """Does it put a word-initial mark before a text that does not begin with a space?"""
        return bool(self.marks[0]) and self.marks[0] == self.marks[1]

    @cached_property
    def prefix(self) -> Ids:
        """What it puts before a text by itself: a BOS token, or nothing."""
        for letter in _ANCHORS:
            plain = list(self._encode(letter))
            full = list(self.tokenizer(letter, add_special_tokens=True)["input_ids"])
            for start in range(len(full) - len(plain) + 1):
                if plain and full[start : start + len(plain)] == plain:
                    return tuple(full[:start])
        return ()

    @property
    def limit(self) -> int | None:
        """The longest sequence it says its model takes."""
        limit = getattr(self.tokenizer, "model_max_length", None)
        return int(limit) if limit is not None and limit < _ENDLESS else None

    def special(self, name: str) -> Ids:
        """The id of `cls`, `sep`, `mask`, `bos` or `eos`. `cls` and `bos` may stand in for each other, as may `sep` and
        `eos`; a model without either has none (T5 has no `cls`). A missing mask is an error."""
        stand_in = {"cls": "bos", "bos": "cls", "sep": "eos", "eos": "sep"}
        for role in (name, stand_in.get(name, name)):
            token = getattr(self.tokenizer, f"{role}_token_id", None)
            if token is not None:
                return (int(token),)
        if name == "mask":
            raise TaskError("this model has no mask token; use a masked language model, or the task's causal family")
        return ()

    # --- text to ids

    def text(self, text: str, glued: bool = False) -> Ids:
        """Ids of `text`; `glued` when it follows other text directly, so that no word-initial mark is added."""
        ids = self._piece(text, glued)
        return ids if self.specials.isdisjoint(ids) else self._defused(text, glued)

    def words_like(self, start: str) -> list[str]:
        """Words of the vocabulary that begin like this, shortest first."""
        vocabulary: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        mark = self.marks[1]
        found = {token.removeprefix(mark) for token in vocabulary if token.startswith(mark + start)}
        return sorted((word for word in found if word.isalpha()), key=lambda word: (len(word), word))

    def show(self, ids: Ids) -> list[str]:
        """The tokens of `ids` as the vocabulary spells them."""
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids))]

    def _encode(self, text: str) -> Ids:
        encoded = self.tokenizer(
            text.encode("utf-8", "replace").decode(),  # JSON may hold half a surrogate pair, which no tokenizer takes
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return tuple(encoded["input_ids"])

    def _piece(self, text: str, glued: bool) -> Ids:
        if glued and text and self.adds_mark:
            for anchor in _ANCHORS:  # in context, then without the context: an anchor that does not merge with it
                before, whole = self._encode(anchor), self._encode(anchor + text)
                if before and whole[: len(before)] == before:
                    return whole[len(before) :]
        return self._encode(text)

    @cached_property
    def _special_text(self) -> re.Pattern[str]:
        spelled = sorted(self.show(tuple(self.specials)), key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in spelled if token))

    def _defused(self, text: str, glued: bool) -> Ids:
        """`text` spells a special token that the model's vocabulary lists as a word (Unigram does): split it there."""
        cuts = [found.start() + 1 for found in self._special_text.finditer(text)]
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return tuple(i for n, part in enumerate(parts) if part for i in self._halved(part, glued or n > 0))

    def _halved(self, text: str, glued: bool) -> Ids:
        """Ids of `text`, cut in halves until no half is normalised into a special token (fullwidth `＜mask＞`)."""
        ids = self._piece(text, glued)
        if self.specials.isdisjoint(ids):
            return ids
        if len(text) == 1:
            return tuple(i for i in ids if i not in self.specials)
        middle = len(text) // 2
        return self._halved(text[:middle], glued) + self._halved(text[middle:], True)
