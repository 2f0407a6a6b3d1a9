"""The encoder: an example becomes ids, the position that is read, and the candidates that are scored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mezzo.errors import TaskError, nearest
from mezzo.tasks import templates
from mezzo.tasks.demonstrations import Demonstrations
from mezzo.tasks.label_words import distinct, label_words, word_ids
from mezzo.tasks.registry import get_task
from mezzo.tasks.task import Task
from mezzo.tasks.template_ast import (
    MASK,
    LabelWord,
    Piece,
    Pieces,
    Slot,
    Special,
    append_demonstrations,
    demonstration,
    needs_demonstrations,
    prepend_demonstrations,
)
from mezzo.tasks.template_ast import Literal as Text
from mezzo.tasks.tokens import Ids, Tokenizer, Tokens
from mezzo.tasks.truncation import fit
from mezzo.types import Batch, Example, Prompt, Readout

ReadoutName = Literal["auto", "words", "head", "candidates"]
READOUTS = ("auto", "words", "head", "candidates")


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece with what is known of it before any example is seen."""

    piece: Piece
    glued: bool
    segment: int
    ids: Ids | None
    """None: it depends on the example."""


class Encoder:
    """Encodes examples of `task` for the model that `tokenizer` belongs to.

    Texts are cut to fit `max_length` (the task's, unless given), the template never. `demonstrations` is a pool of
    labelled examples; one per label joins each prompt, chosen by (`seed`, example index, sampling number): `demo_choice`
    is the sampling number, or (example index, sampling number).
    """

    def __init__(
        self,
        task: Task | str,
        tokenizer: Tokenizer,
        max_length: int | None = None,
        demonstrations: Sequence[Example] = (),
        readout: ReadoutName = "auto",
        vocabulary: bool = False,
        seed: int = 0,
    ) -> None:
        self.task = get_task(task)
        self.tokens = Tokens(tokenizer)
        try:
            self.readout = self._choose_readout(readout, vocabulary)
            self._demos = Demonstrations(self.task, demonstrations, seed) if demonstrations else None
            self._answers = self._label_answers()
            self._parts = self._plan()
            self._fixed = max(1, sum(self._most(part) for part in self._parts))
            self.max_length = self._choose_length(max_length)
        except TaskError as error:
            prefix = f"task {self.task.name!r}: "
            raise TaskError(prefix + str(error).removeprefix(prefix)) from None

    # --- use

    def encode(self, example: Example, demo_choice: int | tuple[int, int] | None = None) -> Prompt:
        """The prompt of one example."""
        shots = self._shots(example, demo_choice)
        texts = [text for each in (example, *shots) for text in self.task.texts(each)]
        candidates = self._candidates(example)
        pieces = [self._ids(part, texts, shots) for part in self._parts]
        longest = max((len(ids) for ids in candidates), default=0)
        self._shorten(pieces, self.max_length - longest)
        if not any(pieces):  # an empty causal prompt: something must be there to predict from
            pieces[0] = self.tokens.special("bos")
        ids = tuple(i for piece in pieces for i in piece)
        assert len(ids) + longest <= self.max_length
        return Prompt(
            ids=ids,
            label=self._label(example, candidates),
            position=self._position(pieces),
            candidates=candidates if self.readout.kind == "candidates" else (),
            segments=tuple(part.segment for part, piece in zip(self._parts, pieces, strict=True) for _ in piece),
            answers=tuple(self.task.answers(example)) if self.task.kind == "generation" else (),
        )

    def batch(self, examples: Iterable[Example], demo_choice: int | None = None) -> Batch:
        """The prompts of several examples, scored together."""
        return Batch(tuple(self.encode(example, demo_choice) for example in examples), self.readout)

    def render(self, example: Example, demo_choice: int | tuple[int, int] | None = None) -> str:
        """The prompt as the model sees it, special tokens and truncation included."""
        ids = list(self.encode(example, demo_choice).ids)
        return self.tokens.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # --- decided once

    def _choose_readout(self, asked: str, vocabulary: bool) -> Readout:
        task = self.task
        if asked not in READOUTS:
            raise TaskError(f"unknown readout {asked!r}; use one of {', '.join(READOUTS)}{nearest(asked, READOUTS)}")
        if asked == "head":
            if task.kind != "classification":
                raise TaskError(f"a head needs labels, and the task is a {task.kind}; use --readout candidates")
            return Readout("head", classes=len(task.labels), vocabulary=vocabulary)
        if task.family == "masked":
            if asked == "candidates":
                raise TaskError("candidates are continuations of a causal model; use --readout words")
            self.tokens.special("mask")
            return Readout("words", words=label_words(self.tokens, task), vocabulary=vocabulary)
        answers = self._label_answers() if task.kind == "classification" else ()
        single = bool(answers) and all(len(ids) == 1 and ids[0] != self.tokens.unk for ids in answers)
        if asked == "words" and not single:
            raise TaskError("--readout words needs answers of one token each; use --readout candidates")
        if single and asked != "candidates":
            return Readout("words", words=distinct(task, (ids[0] for ids in answers)), vocabulary=vocabulary)
        return Readout("candidates", vocabulary=vocabulary)

    def _label_answers(self) -> tuple[Ids, ...]:
        """What fills each label's place: its word (masked), or its answer as it continues the prompt (causal)."""
        task = self.task
        if task.kind != "classification":
            return ()
        if task.family == "masked":
            return tuple((word,) for word in self.readout.words)
        return tuple(self._answer(word) for word in task.words)

    def _answer(self, text: str) -> Ids:
        """Ids of an answer; a space goes before it unless the prompt ends in whitespace."""
        return word_ids(self.tokens, text.strip(), space=not templates.ends_with_space(self.task.pieces))

    def _template(self) -> Pieces:
        task, columns = self.task, len(self.task.columns)
        if self.readout.kind == "head" and task.family == "masked":
            if self._demos:
                raise TaskError("a head reads the text alone; leave out the demonstrations")
            return templates.head_pieces(columns)
        placed = needs_demonstrations(task.pieces, columns)
        if placed and self._demos is None:
            raise TaskError("the template places demonstrations; give some, or remove them from the template")
        if self._demos is None or placed:
            return task.pieces
        join = append_demonstrations if task.family == "masked" else prepend_demonstrations
        return join(task.pieces, columns, len(task.labels))

    def _plan(self) -> list[_Part]:
        parts: list[_Part] = []
        segment, glued = 0, False
        if self.task.family == "causal":
            parts.append(_Part(Special("bos"), False, 0, self.tokens.prefix))
        for piece in self._template():
            parts.append(_Part(piece, glued, segment, self._fixed_ids(piece, glued)))
            segment += isinstance(piece, Special) and piece.advance
            glued = piece == MASK or not isinstance(piece, Special)
        return parts

    def _fixed_ids(self, piece: Piece, glued: bool) -> Ids | None:
        if isinstance(piece, Special):
            return self.tokens.special(piece.name)
        if isinstance(piece, Text):
            return self.tokens.text(piece.text, glued)
        if isinstance(piece, LabelWord) and not piece.of_demo:
            if piece.index >= len(self._answers):
                raise TaskError(f"the template has '*label_{piece.index}*', and there are {len(self._answers)} labels")
            return self._answers[piece.index]
        if demonstration(piece, len(self.task.columns)) >= len(self.task.labels):
            raise TaskError(f"the template places more demonstrations than there are labels ({len(self.task.labels)})")
        return None

    def _most(self, part: _Part) -> int:
        """The most tokens a part can need, texts aside: they can be cut to nothing."""
        if part.ids is None and isinstance(part.piece, LabelWord):
            return max(len(ids) for ids in self._answers)
        return len(part.ids or ())

    def _choose_length(self, asked: int | None) -> int:
        limit = self.tokens.limit
        if asked is not None and limit is not None and asked > limit:
            raise TaskError(f"max_length {asked} is more than the {limit} tokens this model takes; lower it")
        usual = self.task.max_length * (2 if self._demos and self.task.family == "masked" else 1)
        length = asked if asked is not None else min(usual, limit or usual)
        longest = max((len(ids) for ids in self._answers), default=1) if self.readout.kind == "candidates" else 0
        if self._fixed + longest > length:
            raise TaskError(f"the template alone takes {self._fixed + longest} tokens of max_length {length}; raise it")
        return length

    # --- decided per example

    def _shots(self, example: Example, choice: int | tuple[int, int] | None) -> list[Example]:
        if self._demos is None:
            return []
        index, sampling = choice if isinstance(choice, tuple) else (None, choice or 0)
        return self._demos.choose(example, index, sampling)

    def _ids(self, part: _Part, texts: Sequence[str], shots: Sequence[Example]) -> Ids:
        if part.ids is not None:
            return part.ids
        if isinstance(part.piece, LabelWord):
            return self._answers[shots[part.piece.index].label]
        assert isinstance(part.piece, Slot)
        ids = self.tokens.text(part.piece.apply(texts[part.piece.index]), part.glued)
        limit = self.task.first_limit if part.piece.index == 0 else self.task.other_limit
        return ids[:limit]

    def _shorten(self, pieces: list[Ids], room: int) -> None:
        """Cut texts until everything fits; demonstrations give way before the query."""
        slots = [(i, part.piece.index) for i, part in enumerate(self._parts) if isinstance(part.piece, Slot)]
        room -= sum(len(ids) for ids in pieces) - sum(len(pieces[i]) for i, _ in slots)
        ranks = [int(index >= len(self.task.columns)) for _, index in slots]
        for (i, _), length in zip(slots, fit([len(pieces[i]) for i, _ in slots], ranks, room), strict=True):
            pieces[i] = pieces[i][:length]

    def _candidates(self, example: Example) -> tuple[Ids, ...]:
        if self.readout.kind != "candidates":
            return ()
        if self.task.kind == "classification":
            return self._answers
        texts = self.task.answers(example)
        if self.task.kind == "generation":
            end = self.tokens.text(self.task.answer_end, glued=True)
            return tuple((self._answer(text) + end)[: self.max_length - self._fixed] for text in texts[:1])
        return tuple(self._answer(text)[: self.max_length - self._fixed] for text in texts)

    def _label(self, example: Example, candidates: Sequence[Any]) -> int:
        if self.task.kind == "generation":
            return 0 if candidates else -1
        return example.label

    def _position(self, pieces: Sequence[Ids]) -> int:
        """Where the readout looks: the template's mask, the last token of a causal prompt, or `cls` for a head."""
        if self.task.family == "causal":
            return sum(map(len, pieces)) - 1
        if self.readout.kind == "head":
            return 0
        mask = next(i for i, part in enumerate(self._parts) if part.piece == MASK)
        return sum(map(len, pieces[:mask]))
