"""A tokenizer reduced to what encoding needs. Its properties are measured, never guessed from its name."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from mezzo.errors import TaskError

Ids = tuple[int, ...]

# Short texts to try a tokenizer with: a small vocabulary may lack some of them.
_SAMPLE_TEXTS = ("a", "e", "0", "(", "x", ".", "t", "s", "i", "o", "n")
_MESSAGE = "@MESSAGE@"  # stands for a message in a chat template
# An exported model may ask for its chat template by itself.
WITHOUT_CHAT = "leave out --chat, or add --set chat=false"
_NO_LIMIT = 1_000_000  # a tokenizer without a limit reports an astronomically large one


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def __call__(self, text: str, **options: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    def decode(self, token_ids: list[int], **options: Any) -> str: ...


class TokenizerWrapper:
    """Encodes text part by part. User text never becomes a special token, whatever it contains."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.wrapped = tokenizer

    # --- properties of the tokenizer

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that text must never produce. `unk` is allowed (unknown characters become it) unless it doubles as another
        special token, as in GPT-2."""
        added = getattr(self.wrapped, "added_tokens_decoder", {})
        ids = set(getattr(self.wrapped, "all_special_ids", ())) | {i for i, token in added.items() if token.special}
        roles = ("cls", "sep", "mask", "bos", "eos", "pad")
        if self.unk_id not in {getattr(self.wrapped, f"{role}_token_id", None) for role in roles}:
            ids.discard(self.unk_id)
        return frozenset(i for i in ids if i is not None)

    @cached_property
    def unk_id(self) -> int | None:
        return getattr(self.wrapped, "unk_token_id", None)

    @cached_property
    def word_marks(self) -> tuple[str, str]:
        """The word-initial marks in `a a`: before the first and before the second word.

        ('', 'Ġ') in byte-level BPE, ('▁', '▁') in SentencePiece, ('', '') in WordPiece.
        """
        for letter in _SAMPLE_TEXTS:
            ids = self._tokenize(f"{letter} {letter}")
            marks = "".join(self.token_strings(ids)).split(letter)
            if self.unk_id not in ids and len(marks) == 3 and not marks[2]:
                return marks[0], marks[1]
        return "", ""

    @cached_property
    def leading_ids(self) -> Ids:
        """The special tokens that it adds before a text: a BOS token, or nothing."""
        for letter in _SAMPLE_TEXTS:
            plain = list(self._tokenize(letter))
            full = list(self.wrapped(letter, add_special_tokens=True)["input_ids"])
            for start in range(len(full) - len(plain) + 1):
                if plain and full[start : start + len(plain)] == plain:
                    return tuple(full[:start])
        return ()

    @property
    def max_length(self) -> int | None:
        """The longest input of its model, as the tokenizer states it."""
        limit = getattr(self.wrapped, "model_max_length", None)
        return int(limit) if limit is not None and limit < _NO_LIMIT else None

    def special_token(self, name: str) -> Ids:
        """The id of `cls`, `sep`, `mask`, `bos` or `eos`. `cls` and `bos` may replace each other, as may `sep` and `eos`;
        a model without either has none (T5 has no `cls`). A missing mask is an error."""
        substitutes = {"cls": "bos", "bos": "cls", "sep": "eos", "eos": "sep"}
        for role in (name, substitutes.get(name, name)):
            token = getattr(self.wrapped, f"{role}_token_id", None)
            if token is not None:
                return (int(token),)
        if name == "mask":
            raise TaskError("this model has no mask token; use a masked language model, or the task's causal family")
        return ()

    def chat_frame(self) -> tuple[Ids, Ids]:
        """What its chat template puts before and after a user's message, up to where the model answers."""
        if not getattr(self.wrapped, "chat_template", None):
            raise TaskError(f"this model's tokenizer has no chat template; {WITHOUT_CHAT}")
        messages = [{"role": "user", "content": _MESSAGE}]
        try:
            text = self.wrapped.apply_chat_template(  # type: ignore[attr-defined]
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise TaskError(f"the chat template of this model's tokenizer fails: {reason}; {WITHOUT_CHAT}") from None
        before, found, after = str(text).partition(_MESSAGE)
        if not found or _MESSAGE in after:
            raise TaskError(
                f"the chat template of this model's tokenizer does not repeat a message once; {WITHOUT_CHAT}"
            )
        before_ids, after_ids = (self.wrapped(part, add_special_tokens=False)["input_ids"] for part in (before, after))
        return tuple(before_ids), tuple(after_ids)

    # --- between text and ids

    def encode(self, text: str, continues: bool = False) -> Ids:
        """Ids of `text`; `continues` when it directly follows other text, so that no word-initial mark is added."""
        ids = self._encode_in_context(text, continues)
        return ids if self.special_ids.isdisjoint(ids) else self._encode_special_text(text, continues)

    def encode_before_text(self, text: str) -> Ids:
        """Ids of `text` as it is tokenized with other text behind it, where that makes a difference: "\\n\\n" may be one token
        at the end, and two before a word."""
        for letter in _SAMPLE_TEXTS:
            full, after = self.encode(text + letter), self.encode(letter, continues=True)
            if after and full[-len(after) :] == after:
                return full[: -len(after)]
        return self.encode(text)

    def decode(self, ids: Ids) -> str:
        return self.wrapped.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_strings(self, ids: Ids) -> list[str]:
        """The tokens of `ids` as the vocabulary spells them."""
        return [str(token) for token in self.wrapped.convert_ids_to_tokens(list(ids))]

    def _tokenize(self, text: str) -> Ids:
        encoded = self.wrapped(
            text.encode("utf-8", "replace").decode(),  # JSON may hold half a surrogate pair, which no tokenizer accepts
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return tuple(encoded["input_ids"])

    def _encode_in_context(self, text: str, continues: bool) -> Ids:
        first, inner = self.word_marks
        if continues and text and first and first == inner:  # a mark would be added that continued text does not have
            for context in _SAMPLE_TEXTS:  # tokenize behind a context that does not merge with the text, then remove it
                before, full = self._tokenize(context), self._tokenize(context + text)
                if before and full[: len(before)] == before:
                    return full[len(before) :]
        return self._tokenize(text)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        spellings = sorted(self.token_strings(tuple(self.special_ids)), key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in spellings if token))

    def _encode_special_text(self, text: str, continues: bool) -> Ids:
        """Ids of a text that spells a special token which the vocabulary lists as a word (as in Unigram): split it there."""
        cuts = [match.start() + 1 for match in self._special_pattern.finditer(text)]
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return tuple(
            i for n, part in enumerate(parts) if part for i in self._encode_by_halves(part, continues or n > 0)
        )

    def _encode_by_halves(self, text: str, continues: bool) -> Ids:
        """Ids of `text`, halved until no part is normalised into a special token (fullwidth `＜mask＞`)."""
        ids = self._encode_in_context(text, continues)
        if self.special_ids.isdisjoint(ids):
            return ids
        if len(text) == 1:
            return tuple(i for i in ids if i not in self.special_ids)
        middle = len(text) // 2
        return self._encode_by_halves(text[:middle], continues) + self._encode_by_halves(text[middle:], True)
