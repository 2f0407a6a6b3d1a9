"""The encoder: turns an example into token ids, the position that is read, and the candidates that are scored."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mezzo.errors import MezzoWarning, TaskError, nearest
from mezzo.tasks import templates
from mezzo.tasks.demonstrations import Demonstrations, InContextExamples
from mezzo.tasks.label_words import distinct_ids, label_word_ids, word_ids
from mezzo.tasks.registry import get_task
from mezzo.tasks.task import Task
from mezzo.tasks.template_ast import MASK, LabelWord, Node, Nodes, Slot, SpecialToken, Text
from mezzo.tasks.tokenizer import WITHOUT_CHAT, Ids, Tokenizer, TokenizerWrapper
from mezzo.tasks.truncation import truncate_lengths
from mezzo.types import Batch, Example, Prompt, Readout

ReadoutName = Literal["auto", "words", "head", "candidates"]
READOUTS: tuple[str, ...] = get_args(ReadoutName)


@dataclass(frozen=True, slots=True)
class _PreparedNode:
    """A template node with everything that does not depend on the example."""

    node: Node
    continues: bool
    """It directly follows other text."""
    segment: int
    ids: Ids | None
    """None: they depend on the example."""


class Encoder:
    """Encodes examples of `task` for the model of `tokenizer`.

    Texts are cut to fit `max_length` (the task's, unless given), the template never. `demonstrations` is a pool of
    labelled examples. For a causal model, `in_context` of them (all, unless given), drawn at random, precede each prompt;
    the first are cut where they do not fit. For a masked one, one per label follows each prompt, chosen by (`seed`, example
    index, sampling number): `demo_choice` is the sampling number, or (example index, sampling number). With
    `chat`, the prompt is a user's message in the tokenizer's chat template, and the answer begins the model's.
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
        in_context: int | None = None,
        chat: bool = False,
    ) -> None:
        self.task, self.chat = get_task(task), chat
        self.tokenizer = TokenizerWrapper(tokenizer)
        try:
            self.readout = self._choose_readout(readout, vocabulary)
            self._demonstrations: Demonstrations | None = None
            self._in_context: InContextExamples | None = None
            if demonstrations and self._puts_them_before():
                count = len(demonstrations) if in_context is None else in_context
                self._in_context = InContextExamples(self.task, demonstrations, count, seed)
            elif demonstrations:
                self._demonstrations = Demonstrations(self.task, demonstrations, seed)
            self._label_ids = self._encode_labels()
            self._nodes = self._prepare_nodes()
            self._template_length = max(1, sum(self._max_template_tokens(prepared) for prepared in self._nodes))
            self.max_length = self._choose_max_length(max_length)
        except TaskError as error:
            prefix = f"task {self.task.name!r}: "
            raise TaskError(prefix + str(error).removeprefix(prefix)) from None

    def encode(self, example: Example, demo_choice: int | tuple[int, int] | None = None) -> Prompt:
        """The prompt of one example."""
        node_ids, candidates = self._encode_parts(example, demo_choice)
        longest = max((len(ids) for ids in candidates), default=0)
        self._truncate(node_ids, self.max_length - longest)
        if not any(node_ids):  # an empty causal prompt: there must be a token to predict from
            node_ids[0] = self.tokenizer.special_token("bos")
        room = self.max_length - longest - sum(map(len, node_ids))
        node_ids[0] += self._fit(self._encode_in_context(example), room)
        prompt_ids = tuple(token for ids in node_ids for token in ids)
        assert len(prompt_ids) + longest <= self.max_length
        return Prompt(
            ids=prompt_ids,
            label=example.label if self.task.kind != "generation" else 0 if candidates else -1,
            position=self._readout_position(node_ids),
            candidates=candidates,
            segments=tuple(prepared.segment for prepared, ids in zip(self._nodes, node_ids, strict=True) for _ in ids),
            answers=tuple(self.task.answers(example)) if self.task.kind == "generation" else (),
            right=self.task.right_choices(example),
            row=example.fields,
        )

    def full_length(self, example: Example, demo_choice: int | tuple[int, int] | None = None) -> int:
        """Tokens that the prompt and its longest candidate would have if nothing were cut to `max_length`."""
        node_ids, candidates = self._encode_parts(example, demo_choice)
        in_context = self._encode_in_context(example)
        return len(in_context) + sum(map(len, node_ids)) + max(map(len, candidates), default=0)

    def batch(self, examples: Iterable[Example], demo_choice: int | None = None) -> Batch:
        """The prompts of several examples, scored together."""
        return Batch(tuple(self.encode(example, demo_choice) for example in examples), self.readout)

    def render(self, example: Example, demo_choice: int | tuple[int, int] | None = None) -> str:
        """The prompt as the model sees it, special tokens and truncation included."""
        return self.tokenizer.decode(self.encode(example, demo_choice).ids)

    # --- once per encoder

    def _choose_readout(self, name: str, vocabulary: bool) -> Readout:
        task = self.task
        if name not in READOUTS:
            raise TaskError(f"unknown readout {name!r}; use one of {', '.join(READOUTS)}{nearest(name, READOUTS)}")
        if name == "head":
            if task.kind != "classification":
                raise TaskError(f"a head needs labels, but this is a {task.kind} task; use --readout candidates")
            return Readout("head", classes=len(task.labels), vocabulary=vocabulary)
        if task.family == "masked":
            if name == "candidates":
                raise TaskError("candidates are continuations of a causal model; use --readout words")
            self.tokenizer.special_token("mask")
            return Readout("words", words=label_word_ids(self.tokenizer, task), vocabulary=vocabulary)
        answers = self._encode_labels()
        single_tokens = bool(answers) and all(len(ids) == 1 and ids[0] != self.tokenizer.unk_id for ids in answers)
        if name == "words" and not single_tokens:
            raise TaskError("--readout words needs answers of one token each; use --readout candidates")
        if single_tokens and name != "candidates":
            return Readout("words", words=distinct_ids(task, (ids[0] for ids in answers)), vocabulary=vocabulary)
        return Readout("candidates", vocabulary=vocabulary)

    def _encode_labels(self) -> tuple[Ids, ...]:
        """What stands for each label: its word (masked), or its answer as it continues the prompt (causal)."""
        task = self.task
        if task.kind != "classification":
            return ()
        if task.family == "masked":
            return tuple((word,) for word in self.readout.words)
        return tuple(self._encode_answer(word) for word in task.words)

    def _encode_answer(self, text: str) -> Ids:
        """Ids of an answer; a space goes before it unless the prompt ends in whitespace."""
        space = not self.chat and not templates.ends_with_space(self.task.nodes)
        return word_ids(self.tokenizer, text.strip(), space=space)

    def _template_nodes(self) -> Nodes:
        task, columns = self.task, len(self.task.columns)
        if self.readout.kind == "head" and task.family == "masked":
            if self._demonstrations:
                raise TaskError("a head reads the text alone; leave out the demonstrations")
            return templates.head_nodes(columns)
        explicit = templates.contains_demonstrations(task.nodes, columns)
        if explicit and self._demonstrations is None:
            raise TaskError("the template contains demonstrations; give some, or remove them from the template")
        if self._demonstrations is None or explicit:
            return task.nodes
        return templates.append_demonstrations(task.nodes, columns, len(task.labels))

    def _puts_them_before(self) -> bool:
        """Whether demonstrations precede the prompt, unless the template says itself where they are."""
        task = self.task
        return task.family == "causal" and not templates.contains_demonstrations(task.nodes, len(task.columns))

    def _prepare_nodes(self) -> list[_PreparedNode]:
        prepared: list[_PreparedNode] = []
        segment, continues = 0, False
        if self.task.family == "causal":
            before, after = self.tokenizer.chat_frame() if self.chat else (self.tokenizer.leading_ids, ())
            prepared.append(_PreparedNode(SpecialToken("bos"), False, 0, before))
            continues = self._in_context is not None or self.chat
        elif self.chat:
            raise TaskError(f"a chat template is for causal models; {WITHOUT_CHAT}")
        for node in self._template_nodes():
            prepared.append(_PreparedNode(node, continues, segment, self._constant_ids(node, continues)))
            segment += isinstance(node, SpecialToken) and node.advance
            continues = node == MASK or not isinstance(node, SpecialToken)
        if self.chat:
            prepared.append(_PreparedNode(Text(""), True, 0, after))
        return prepared

    def _constant_ids(self, node: Node, continues: bool) -> Ids | None:
        """The ids of a node that is the same for every example."""
        if isinstance(node, SpecialToken):
            return self.tokenizer.special_token(node.name)
        if isinstance(node, Text):
            return self.tokenizer.encode(node.text, continues)
        if isinstance(node, LabelWord) and not node.of_demo:
            if node.index >= len(self._label_ids):
                raise TaskError(f"the template has '*label_{node.index}*', but there are {len(self._label_ids)} labels")
            return self._label_ids[node.index]
        if templates.demonstration_index(node, len(self.task.columns)) >= len(self.task.labels):
            raise TaskError(f"the template has more demonstrations than there are labels ({len(self.task.labels)})")
        return None

    def _max_template_tokens(self, prepared: _PreparedNode) -> int:
        """The most tokens a node can need. Slots need none: their texts can be cut to nothing."""
        if prepared.ids is None and isinstance(prepared.node, LabelWord):
            return max(len(ids) for ids in self._label_ids)
        return len(prepared.ids or ())

    def _choose_max_length(self, requested: int | None) -> int:
        limit = self.tokenizer.max_length
        if requested is not None and limit is not None and requested > limit:
            raise TaskError(f"max_length {requested} is more than the {limit} tokens this model takes; lower it")
        default = self.task.max_length * (2 if self._demonstrations and self.task.family == "masked" else 1)
        length = requested if requested is not None else min(default, limit or default)
        longest = max((len(ids) for ids in self._label_ids), default=1) if self.readout.kind == "candidates" else 0
        needed = self._template_length + longest
        if needed > length:
            raise TaskError(f"the template alone takes {needed} tokens of max_length {length}; raise it")
        return length

    # --- once per example

    def _encode_parts(
        self, example: Example, demo_choice: int | tuple[int, int] | None
    ) -> tuple[list[Ids], tuple[Ids, ...]]:
        """The ids of every node, with whole texts, and of the candidates."""
        demonstrations = self._choose_demonstrations(example, demo_choice)
        texts = [text for each in (example, *demonstrations) for text in self.task.texts(each)]
        node_ids = [self._encode_node(prepared, texts, demonstrations) for prepared in self._nodes]
        return node_ids, self._encode_candidates(example)

    def _choose_demonstrations(self, example: Example, choice: int | tuple[int, int] | None) -> list[Example]:
        if self._demonstrations is None:
            return []
        index, sampling = choice if isinstance(choice, tuple) else (None, choice or 0)
        return self._demonstrations.choose(example, index, sampling)

    def _encode_in_context(self, example: Example) -> Ids:
        """The solved examples before a prompt, and the empty line that ends them."""
        if self._in_context is None:
            return ()
        text = "".join(self._in_context.solve(each) + "\n\n" for each in self._in_context.choose(example))
        return self.tokenizer.encode_before_text(text)

    def _fit(self, in_context: Ids, room: int) -> Ids:
        """The end of the solved examples, as long as there is room."""
        if len(in_context) > room:
            warnings.warn(
                f"the demonstrations do not fit into prompts of {self.max_length} tokens, and the first are cut; "
                "ask for fewer, or raise --max-length",
                MezzoWarning,
                stacklevel=2,
            )
        return in_context[max(0, len(in_context) - room) :]

    def _encode_node(self, prepared: _PreparedNode, texts: Sequence[str], demonstrations: Sequence[Example]) -> Ids:
        node = prepared.node
        if prepared.ids is not None:
            return prepared.ids
        if isinstance(node, LabelWord):
            return self._label_ids[demonstrations[node.index].label]
        assert isinstance(node, Slot)
        ids = self.tokenizer.encode(node.apply(texts[node.index]), prepared.continues)
        return ids[: self.task.first_limit if node.index == 0 else self.task.other_limit]

    def _truncate(self, node_ids: list[Ids], limit: int) -> None:
        """Cut texts in place until everything fits; demonstrations are cut before the query."""
        slots = [(i, each.node.index) for i, each in enumerate(self._nodes) if isinstance(each.node, Slot)]
        limit -= sum(len(ids) for ids in node_ids) - sum(len(node_ids[i]) for i, _ in slots)
        ranks = [int(index >= len(self.task.columns)) for _, index in slots]
        lengths = truncate_lengths([len(node_ids[i]) for i, _ in slots], ranks, limit)
        for (i, _), length in zip(slots, lengths, strict=True):
            node_ids[i] = node_ids[i][:length]

    def _encode_candidates(self, example: Example) -> tuple[Ids, ...]:
        if self.readout.kind != "candidates":
            return ()
        if self.task.kind == "classification":
            return self._label_ids
        texts = self.task.answers(example)
        end: Ids = ()
        if self.task.kind == "generation":
            end = self.tokenizer.encode(self.task.answer_end, continues=True)
            texts, end = texts[:1], self.tokenizer.special_token("eos") if self.chat else end
        limit = self.max_length - self._template_length
        return tuple((self._encode_answer(text) + end)[:limit] for text in texts)

    def _readout_position(self, node_ids: Sequence[Ids]) -> int:
        """The position that is read: the template's mask, the last token of a causal prompt, or `cls` for a head."""
        if self.task.family == "causal":
            return sum(map(len, node_ids)) - 1
        if self.readout.kind == "head":
            return 0
        mask = next(i for i, prepared in enumerate(self._nodes) if prepared.node == MASK)
        return sum(map(len, node_ids[:mask]))
