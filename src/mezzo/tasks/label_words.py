"""Label words: one token each, found the way the tokenizer would write the word inside a sentence."""

from __future__ import annotations

from collections.abc import Iterable

from mezzo.errors import TaskError
from mezzo.tasks.task import Task
from mezzo.tasks.tokens import Ids, Tokens

_NO_SPACE = ("<", "[", ".", ",")

# Words of one meaning, commonest first: what to propose when a chosen word is several tokens.
_SYNONYMS = (
    ("great", "good", "excellent", "wonderful", "fantastic", "amazing", "perfect", "positive"),
    ("terrible", "bad", "awful", "horrible", "poor", "negative", "worst"),
    ("okay", "fine", "average", "neutral", "ok", "alright"),
    ("Yes", "yes", "Right", "True", "true", "Indeed"),
    ("No", "no", "Wrong", "False", "false", "Not"),
    ("Maybe", "maybe", "Perhaps", "perhaps", "Also"),
    ("correct", "right", "acceptable", "valid", "grammatical"),
    ("incorrect", "wrong", "unacceptable", "invalid", "ungrammatical"),
)


def has_space(word: str, space_prefix: bool = True) -> bool:
    """Is the word looked up with a space before it? Not if it begins with `<`, `[`, `.` or `,`."""
    return space_prefix and not word.startswith(_NO_SPACE)


def word_ids(tokens: Tokens, word: str, space: bool) -> Ids:
    """The tokens of a word in running text: after a space, or directly after other text."""
    return tokens.text(" " + word if space else word, glued=True)


def label_words(tokens: Tokens, task: Task) -> Ids:
    """The id of each label's word, in label order: exactly one token each, all different, none unknown."""
    return distinct(task, [_single(tokens, task, label, word) for label, word in task.word_of.items()])


def distinct(task: Task, ids: Iterable[int]) -> Ids:
    """The ids, refused if two labels share one."""
    seen: dict[int, str] = {}
    for (label, word), token in zip(task.word_of.items(), ids, strict=True):
        if token in seen:
            raise TaskError(
                f"labels {seen[token]!r} and {label!r} have one word for this tokenizer, {word!r}; choose two that differ"
            )
        seen[token] = label
    return tuple(seen)


def _single(tokens: Tokens, task: Task, label: str, word: str) -> int:
    space = has_space(word.strip(), task.space_prefix)
    ids = word_ids(tokens, word.strip(), space)
    if tokens.unk in ids and tokens.unk is not None:
        problem = "is not in this tokenizer's vocabulary"
    elif len(ids) != 1:
        problem = f"is {len(ids)} tokens ({', '.join(tokens.show(ids))}) and must be one"
    else:
        return ids[0]
    raise TaskError(f"the word {word!r} of label {label!r} {problem}{_advice(tokens, word.strip(), space, task.words)}")


def _advice(tokens: Tokens, word: str, space: bool, taken: Iterable[str]) -> str:
    """`; try 'good', 'excellent'`: words near in meaning or in spelling that are one token here."""
    near = [other for group in _SYNONYMS if word.lower() in map(str.lower, group) for other in group]
    spelled = [word.lower(), word.capitalize(), *(word[:end] for end in range(len(word) - 1, 2, -1))]
    found: list[str] = []
    for other in dict.fromkeys(near + spelled + tokens.words_like(word[:3])):
        ids = word_ids(tokens, other, space)
        if other not in (word, *taken) and len(ids) == 1 and ids[0] != tokens.unk:
            found.append(repr(other))
        if len(found) == 3:
            break
    return f"; try {', '.join(found)}" if found else "; choose a commoner word"
