"""The label-word rule, on a trained tokenizer of every family."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, BartTokenizerFast, T5Tokenizer

from mezzo.engines.hf_hub import load_tokenizer
from mezzo.errors import TaskError
from mezzo.tasks import Encoder, Task, get_task, list_tasks
from mezzo.tasks.label_words import label_word_ids
from mezzo.tasks.tokenizer import TokenizerWrapper

WORD_MARKS = {
    "byte-level": ("", "Ġ"),
    "byte-level, prefix space": ("Ġ", "Ġ"),
    "unigram": ("▁", "▁"),
    "sentencepiece bpe": ("▁", "▁"),
    "wordpiece": ("", ""),
}
MASKED = [task for task in list_tasks() if task.family == "masked"]
CAUSAL = [task for task in list_tasks() if task.family == "causal" and task.kind == "classification"]


def words_of(tokenizer: Any, **changes: Any) -> tuple[int, ...]:
    return label_word_ids(TokenizerWrapper(tokenizer), get_task("sst-2").replace(**changes))


@pytest.mark.parametrize("name", WORD_MARKS)
def test_word_marks_are_detected(name: str, tokenizers: dict[str, Any]) -> None:
    assert TokenizerWrapper(tokenizers[name]).word_marks == WORD_MARKS[name]


@pytest.mark.parametrize("name", WORD_MARKS)
def test_label_word_is_one_token_unlike_the_bare_string(name: str, tokenizers: dict[str, Any]) -> None:
    tokenizer, mark = tokenizers[name], WORD_MARKS[name][1]
    ids = words_of(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(ids)) == [mark + "terrible", mark + "great"]
    assert tokenizer.unk_token_id not in ids
    if mark:  # the traps: the string with its space is unknown, the bare string is another token or unknown
        for word, token in zip((" terrible", " great"), ids, strict=True):
            assert tokenizer.convert_tokens_to_ids(word) != token
            assert tokenizer.convert_tokens_to_ids(word.strip()) != token


def test_plain_lookup_of_the_string_gives_unk(roberta: Any) -> None:
    assert roberta.convert_tokens_to_ids(" terrible") == roberta.unk_token_id


@pytest.mark.parametrize("task", MASKED, ids=lambda task: task.name)
def test_words_of_bundled_tasks_are_one_token_as_in_running_text(task: Task, tokenizer: Any) -> None:
    for word, token in zip(task.words, label_word_ids(TokenizerWrapper(tokenizer), task), strict=True):
        text = tokenizer(f"it was {word}", add_special_tokens=False)["input_ids"]
        assert text[-1] == token


def test_bundled_model_has_every_label_word_as_one_token() -> None:
    tokenizer = TokenizerWrapper(load_tokenizer("mezzo/roberta-mini"))
    for task in MASKED:
        assert len(set(label_word_ids(tokenizer, task))) == len(task.labels), task.name


@pytest.mark.parametrize("task", CAUSAL, ids=lambda task: task.name)
def test_bundled_causal_model_has_every_answer_as_one_token(task: Task) -> None:
    readout = Encoder(task, load_tokenizer("mezzo/llama-mini"), max_length=512).readout
    assert readout.kind == "words" and len(readout.words) == len(task.labels)


def test_word_of_several_tokens_is_rejected_with_alternatives(roberta: Any) -> None:
    tokens = roberta.tokenize(" excellent")
    assert len(tokens) > 1
    with pytest.raises(TaskError) as caught:
        words_of(roberta, words=("terrible", "excellent"))
    assert str(caught.value) == (
        f"the word 'excellent' of label 'positive' is {len(tokens)} tokens ({', '.join(tokens)}) and must be one;"
        " try 'great', 'good'"
    )


def test_alternatives_are_words_of_the_same_meaning(roberta: Any) -> None:
    with pytest.raises(TaskError, match=r"is \d+ tokens \(.*\) and must be one; try 'good'$"):
        words_of(roberta, words=("terrible", "goods"))
    with pytest.raises(TaskError, match=r"and must be one; try 'entity'$|; try 'Entity'$"):
        words_of(roberta, words=("terrible", "ENTITY"))
    with pytest.raises(TaskError, match=r"choose a more common word$"):
        words_of(roberta, words=("terrible", "Entrance"))


def test_all_bad_words_are_listed_each_with_its_own_alternatives(roberta: Any) -> None:
    with pytest.raises(TaskError) as caught:
        words_of(roberta, words=("excellent", "wonderful"))
    message = str(caught.value)
    assert re.fullmatch(
        r"the word 'excellent' of label 'negative' is .*; try 'great', 'good'; "
        r"the word 'wonderful' of label 'positive' is .*; choose a more common word",
        message,
    )
    many = Task("x", "{t} [MASK]", ("t",), tuple(f"l{n}" for n in range(14)), tuple(f"zyxw{n}" for n in range(14)))
    with pytest.raises(TaskError, match=r"'zyxw9' of label 'l9' .*; and 4 more words$") as caught:
        label_word_ids(TokenizerWrapper(roberta), many)
    assert "zyxw10" not in str(caught.value)


def test_same_word_for_two_labels_is_rejected(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="'great' appears twice in words; each must be different"):
        words_of(tokenizers["byte-level"], words=("great", "great"))
    # for an uncased tokenizer these are one word, and only it can tell
    message = (
        "labels 'negative' and 'positive' have the same word for this tokenizer, 'Great'; choose two different ones"
    )
    with pytest.raises(TaskError, match=message):
        words_of(tokenizers["wordpiece"], words=("great", "Great"))


@pytest.mark.parametrize("name", ["unigram", "wordpiece"])
def test_word_outside_the_vocabulary_is_rejected(name: str, tokenizers: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="the word '好' of label 'positive' is not in this tokenizer's vocabulary"):
        words_of(tokenizers[name], words=("terrible", "好"))


def test_words_that_begin_with_punctuation_get_no_space(tokenizer: Any) -> None:
    full_stop, comma = words_of(tokenizer, words=(".", ","))
    assert tokenizer.convert_ids_to_tokens([full_stop, comma]) == [".", ","]


def test_space_prefix_can_be_turned_off(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["byte-level"]
    ids = words_of(tokenizer, words=("great", "good"), space_prefix=False)
    assert tokenizer.convert_ids_to_tokens(list(ids)) == ["great", "good"]


def test_encoder_names_the_task_in_label_word_errors(roberta: Any) -> None:
    with pytest.raises(TaskError, match=r"^task 'sst-2': the word 'lovely' of label 'positive' is \d tokens"):
        Encoder(get_task("sst-2").replace(words=("terrible", "lovely")), roberta)


# --- the tokenizers of T5 and BART, as their own classes make them


def t5(folder: Path, make: Any) -> Any:
    """Pieces as SentencePiece would learn them, in T5's own class, which splits at spaces first and has sentinels."""
    pieces = json.loads(make.unigram().backend_tokenizer.to_str())["model"]["vocab"]
    mine = [(piece, score) for piece, score in pieces if piece not in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")]
    head = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    sentinels = [(f"<extra_id_{number}>", 0.0) for number in reversed(range(3))]
    T5Tokenizer(vocab=[*head, *mine, *sentinels], extra_ids=3).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def bart(folder: Path, make: Any) -> Any:
    """BART's class is RoBERTa's: byte-level BPE whose first word has no space."""
    model = json.loads(make.byte_level().backend_tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    BartTokenizerFast(vocab=model["vocab"], merges=merges).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("build", "mark"), [(t5, "▁"), (bart, "Ġ")])
def test_t5_and_bart_tokenizers(build: Any, mark: str, make: Any, tmp_path: Path) -> None:
    tokenizer = build(tmp_path, make)
    assert TokenizerWrapper(tokenizer).word_marks[1] == mark
    ids = words_of(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(ids)) == [mark + "terrible", mark + "great"]
    for word, token in zip(("terrible", "great"), ids, strict=True):
        assert tokenizer(f"it was {word}", add_special_tokens=False)["input_ids"][-1] == token
    for task in MASKED:
        for word, token in zip(task.words, label_word_ids(TokenizerWrapper(tokenizer), task), strict=True):
            assert tokenizer(f"it was {word}", add_special_tokens=False)["input_ids"][-1] == token
    with pytest.raises(TaskError, match=r"is \d+ tokens \(.*\) and must be one|not in this tokenizer's vocabulary"):
        words_of(tokenizer, words=("terrible", "excellently"))
    specials = set(TokenizerWrapper(tokenizer).special_ids)
    for text in ("<extra_id_0> film", "film<mask>", "</s>", "a <pad> b"):
        assert specials.isdisjoint(TokenizerWrapper(tokenizer).encode(text)), (
            f"user text {text!r} became a special token"
        )
