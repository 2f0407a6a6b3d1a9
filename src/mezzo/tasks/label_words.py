"""Label words: one token each, encoded as the word would be inside a sentence."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mezzo.errors import TaskError
from mezzo.tasks.task import Task
from mezzo.tasks.tokenizer import Ids, TokenizerWrapper

# A word that begins with one of these is encoded without a space before it.
_NO_SPACE = ("<", "[", ".", ",")

# Synonyms, most common first: suggestions for when a chosen word is several tokens.
_SYNONYMS = (
    ("great", "good", "excellent", "wonderful", "fantastic", "amazing", "perfect", "positive"),
    ("terrible", "bad", "awful", "horrible", "poor", "negative", "worst"),
    ("okay", "fine", "average", "neutral", "ok", "alright"),
    ("Yes", "yes", "Right", "True", "true", "Indeed"),
    ("No", "no", "Wrong", "False", "false", "Not"),
    ("Maybe", "maybe", "Perhaps", "perhaps", "Also"),
    ("correct", "right", "acceptable", "valid", "grammatical"),
    ("incorrect", "wrong", "unacceptable", "invalid", "ungrammatical"),
    ("billing", "bill", "payment", "invoice", "money", "price", "cost"),
    ("refund", "return", "money", "back"),
    ("shipping", "delivery", "transport", "post"),
    ("login", "password", "access", "account", "key", "sign"),
    ("technical", "bug", "error", "problem", "failure", "broken"),
    ("complaint", "problem", "trouble", "angry"),
    ("inquiry", "enquiry", "question", "asking", "information"),
    ("urgent", "emergency", "important", "critical", "now"),
    ("spam", "advertising", "junk", "fake"),
    ("ham", "mail", "real", "normal"),
    ("toxic", "offensive", "hateful", "rude", "cruel"),
    ("joy", "happy", "happiness"),
    ("sadness", "sad", "grief"),
    ("anger", "angry", "rage"),
    ("fear", "afraid", "scared"),
)
_ENDINGS = ("ing", "s", "es", "ed", "ment")
# Alternatives to a word, and bad words, that a message names.
SUGGESTED, MOST_LISTED = 3, 10

# Published words of labels that say little themselves, or are rarely one token.
_PUBLISHED: tuple[Mapping[str, str], ...] = (
    {"1": "terrible", "2": "bad", "3": "okay", "4": "good", "5": "great"},
    {"negative": "terrible", "neutral": "okay", "positive": "great"},
    {"neg": "terrible", "pos": "great"},
    {"contradiction": "No", "entailment": "Yes", "neutral": "Maybe"},
    {"entailment": "Yes", "not_entailment": "No"},
    {"duplicate": "Yes", "not_duplicate": "No"},
)


def word_ids(tokenizer: TokenizerWrapper, word: str, space: bool) -> Ids:
    """The tokens of a word in running text: after a space, or directly after other text."""
    return tokenizer.encode(" " + word if space else word, continues=True)


def is_single_token(tokenizer: TokenizerWrapper, word: str, space: bool) -> bool:
    ids = word_ids(tokenizer, word, space)
    return len(ids) == 1 and ids[0] != tokenizer.unk_id


def propose_words(tokenizer: TokenizerWrapper, labels: Sequence[str], space: bool) -> dict[str, str] | None:
    """Label → word, each one token: the label itself, its last or its first word; else published words of such labels.

    None where a label has no such word. A word that several labels share stands for none of them.
    """
    published = next((dict(words) for words in _PUBLISHED if {*map(str.lower, labels)} <= set(words)), None)
    chosen = _own_words(tokenizer, labels, space)
    if published and (chosen is None or all(label.isdecimal() for label in labels)):
        words = {label: published[label.lower()] for label in labels}
        return words if all(is_single_token(tokenizer, word, space) for word in words.values()) else chosen
    return chosen


def _own_words(tokenizer: TokenizerWrapper, labels: Sequence[str], space: bool) -> dict[str, str] | None:
    forms = {label: _label_forms(label) for label in labels}
    shared = Counter(form for each in forms.values() for form in each)
    chosen: dict[str, str] = {}
    for label, (whole, *parts) in forms.items():
        usable = [whole, *(part for part in parts if shared[part] == 1)]
        cased = (word for form in usable for word in (form, form.capitalize(), form.upper()))
        word = next((word for word in cased if is_single_token(tokenizer, word, space)), None)
        if word is None:
            return None
        chosen[label] = word
    ids = {word_ids(tokenizer, word, space) for word in chosen.values()}
    return chosen if len(ids) == len(chosen) else None


def _label_forms(label: str) -> list[str]:
    """`Billing_Issue` → billing issue, issue, billing."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", label)
    words = re.sub(r"[\s_/-]+", " ", spaced).strip().lower().split(" ")
    return list(dict.fromkeys((" ".join(words), words[-1], words[0])))


def label_word_ids(tokenizer: TokenizerWrapper, task: Task) -> Ids:
    """The id of each label's word, in label order: exactly one token each, all different, none unknown."""
    ids: list[int] = []
    problems: list[str] = []
    taken = list(task.words)  # also what has been suggested for another label
    for label, word in task.word_of.items():
        space = task.space_prefix and not word.strip().startswith(_NO_SPACE)
        found = word_ids(tokenizer, word.strip(), space)
        if problem := _problem(tokenizer, found):
            suggested = _suggest_words(tokenizer, word.strip(), space, taken)
            taken += suggested
            hint = f"try {', '.join(map(repr, suggested))}" if suggested else "choose a more common word"
            problems.append(f"the word {word!r} of label {label!r} {problem}; {hint}")
        ids += found[:1]
    if problems:
        more = f"; and {len(problems) - MOST_LISTED} more words" if len(problems) > MOST_LISTED else ""
        raise TaskError("; ".join(problems[:MOST_LISTED]) + more)
    return distinct_ids(task, ids)


def distinct_ids(task: Task, ids: Iterable[int]) -> Ids:
    """The ids, one per label; two labels with the same id are an error."""
    label_of_id: dict[int, str] = {}
    for (label, word), token in zip(task.word_of.items(), ids, strict=True):
        if token in label_of_id:
            raise TaskError(
                f"labels {label_of_id[token]!r} and {label!r} have the same word for this tokenizer, {word!r}; "
                "choose two different ones"
            )
        label_of_id[token] = label
    return tuple(label_of_id)


def _problem(tokenizer: TokenizerWrapper, ids: Ids) -> str:
    """What is wrong with the tokens of a label word; empty if nothing is."""
    if tokenizer.unk_id in ids and tokenizer.unk_id is not None:
        return "is not in this tokenizer's vocabulary"
    return "" if len(ids) == 1 else f"is {len(ids)} tokens ({', '.join(tokenizer.token_strings(ids))}) and must be one"


def _suggest_words(tokenizer: TokenizerWrapper, word: str, space: bool, taken: Sequence[str]) -> list[str]:
    """Words of the same meaning that are one token here: synonyms, the word in another case or without its ending."""
    synonyms = [other for group in _SYNONYMS if word.lower() in map(str.lower, group) for other in group]
    stems = [word.lower().removesuffix(ending) for ending in _ENDINGS if word.lower().endswith(ending)]
    stems += [stem[:-1] for stem in stems if stem[-2:-1] == stem[-1:]]  # shipping, ship
    parts = _label_forms(word)
    found = dict.fromkeys([*synonyms, word.lower(), word.capitalize(), *parts, *(s for s in stems if len(s) > 2)])
    usable = (other for other in found if other not in (word, *taken) and is_single_token(tokenizer, other, space))
    return list(itertools.islice(usable, SUGGESTED))
