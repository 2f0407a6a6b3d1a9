"""Encoded ids against an independent implementation of the grammar, and properties of every prompt."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mezzo.errors import TaskError
from mezzo.tasks import Encoder, Task, get_task, list_tasks, load_examples
from mezzo.types import Example, Readout

STAR_TASKS = [task for task in list_tasks() if task.family == "masked" and "*mask*" in task.template]

# --- a reference implementation of the grammar: one function that shares no code


@cache
def text_only(backend: str, continues: bool) -> Tokenizer:
    """A tokenizer that knows no special tokens, so that all input is text; `continues`: it adds no mark in front."""
    spec = json.loads(backend)
    special = {token["content"] for token in spec["added_tokens"]}
    spec["added_tokens"] = []
    spec["post_processor"] = None
    if spec["model"]["type"] == "Unigram":  # here special tokens are pieces of the model: make them unreachable
        spec["model"]["vocab"] = [
            [f"\x00{i}" if piece in special - {"<unk>"} else piece, score]
            for i, (piece, score) in enumerate(spec["model"]["vocab"])
        ]
    if continues and (spec["pre_tokenizer"] or {}).get("type") == "Metaspace":
        spec["pre_tokenizer"]["prepend_scheme"] = "never"
    if continues and (spec["pre_tokenizer"] or {}).get("type") == "ByteLevel":
        spec["pre_tokenizer"]["add_prefix_space"] = False
    if continues and (spec["normalizer"] or {}).get("type") == "Sequence":
        spec["normalizer"]["normalizers"] = [n for n in spec["normalizer"]["normalizers"] if n["type"] != "Prepend"]
    return Tokenizer.from_str(json.dumps(spec))


def reference_encoding(
    tokenizer: Any, template: str, texts: list[str], max_length: int, first_limit: int | None = None
) -> tuple[list[int], list[int], int]:
    """ids, segments and mask position of a template, token by token as in the published table."""
    backend = tokenizer.backend_tokenizer.to_str()
    parts: list[list[int]] = []
    cuttable: list[int] = []
    kinds: list[str] = []
    started = False
    for token in template.split("*"):
        if not token:
            continue
        name = token.lstrip("+")
        if token in ("cls", "sep", "sep+", "mask", "bos", "eos"):
            parts.append([getattr(tokenizer, token.rstrip("+") + "_token_id")])
            started = token == "mask"
        else:
            if name.startswith("sent"):
                form, number = name[4:].split("_")
                text = texts[int(number)].strip()
                if "l" in form:
                    text = text[:1].lower() + text[1:]
                if "u" in form:
                    text = text[:1].upper() + text[1:]
                if "-" in form:
                    text = text[:-1]
                if token[0] == "+":
                    text = " " + text
                cuttable.append(len(parts))
            else:
                text = token.replace("_", " ")
            parts.append(text_only(backend, started).encode(text, add_special_tokens=False).ids)
            if name.startswith("sent") and name.endswith("_0"):
                parts[-1] = parts[-1][:first_limit]
            started = True
        kinds.append(token)
    while sum(map(len, parts)) > max_length:  # cut the longest text, the later one of equals
        longest = max(cuttable, key=lambda i: (len(parts[i]), i))
        parts[longest].pop()
    segments: list[int] = []
    segment = 0
    for kind, part in zip(kinds, parts, strict=True):
        segments += [segment] * len(part)
        segment += kind == "sep+"
    position = sum(len(part) for part in parts[: kinds.index("mask")])
    return [i for part in parts for i in part], segments, position


# --- adversarial text

ODD = [
    "",
    " ",
    "a",
    ".",
    "\n\t",
    "😀👍🏽",
    "<mask>",
    "<s> </s> <pad> <unk> <mask>",
    "[MASK][CLS] [SEP]",
    "it was <mask> .",
    "x<mask>y",
    "＜mask＞",
    "  leading and trailing  ",
    "שלום עולם",
    "مرحبا",
    "Ünïcödé ß İ",
    "*cls**mask*",
    "{text} [MASK]",
    "a_b __ c",
    "▁ Ġ ##a",
    "\u200b\ufeff\x00",
]
some_text = st.one_of(
    st.sampled_from(ODD),
    st.text(max_size=40),
    st.lists(st.sampled_from(["the", "film", "was", "Great", "<mask>", "</s>", "?", "😀", "x"]), max_size=30).map(
        " ".join
    ),
)
anything = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def example_of(task: Task, texts: list[str], label: int = 0) -> Example:
    return Example(dict(zip(task.columns, texts, strict=True)), label)


@pytest.mark.parametrize("task", STAR_TASKS, ids=lambda task: task.name)
def test_masked_tasks_match_the_reference_grammar(task: Task, tokenizer: Any) -> None:
    encoder = Encoder(task, tokenizer)
    for first in [*ODD, "word " * 10_000]:
        texts = [first, "Another one.", "And a third."][: len(task.columns)]
        prompt = encoder.encode(example_of(task, texts, label=1))
        ids, segments, position = reference_encoding(tokenizer, task.template, texts, task.max_length, task.first_limit)
        assert (list(prompt.ids), list(prompt.segments), prompt.position) == (ids, segments, position), first
        assert prompt.label == 1


PARTS = ["*cls*", "*sep*", "*sep+*", "*bos*", "*eos*", "_It_was", "?", ",", ":", "_a_b_", "so"]
SLOTS = [
    *("*sent_{}*", "*+sent_{}*", "*sent-_{}*", "*sentl_{}*", "*+sentl_{}*", "*sentl-_{}*"),
    *("*sentu_{}*", "*+sentu_{}*", "*+sentu-_{}*"),
]


@st.composite
def templates(draw: st.DrawFn) -> str:
    """Any order of a mask, one slot for each of two texts, and other parts; literals never touch each other."""
    parts = [draw(st.sampled_from(SLOTS)).format(i) for i in (0, 1)] + ["*mask*"]
    parts += draw(st.lists(st.sampled_from(PARTS), max_size=5))
    parts = draw(st.permutations(parts))
    kept = [part for i, part in enumerate(parts) if part[0] == "*" or not i or parts[i - 1][0] == "*"]
    return "".join(kept)


@pytest.mark.parametrize("name", ["byte-level", "unigram", "sentencepiece bpe"])
@anything
@given(template=templates(), texts=st.tuples(some_text, some_text), max_length=st.integers(40, 80))
def test_random_templates_match_the_reference_grammar(
    name: str, tokenizers: dict[str, Any], template: str, texts: tuple[str, str], max_length: int
) -> None:
    tokenizer = tokenizers[name]
    task = get_task("rte").replace(template=template)
    prompt = Encoder(task, tokenizer, max_length=max_length).encode(example_of(task, list(texts)))
    expected = reference_encoding(tokenizer, template, list(texts), max_length)
    assert (list(prompt.ids), list(prompt.segments), prompt.position) == expected


@anything
@given(text=some_text)
def test_special_tokens_in_user_text_stay_text(tokenizers: dict[str, Any], text: str) -> None:
    for tokenizer in tokenizers.values():
        prompt = Encoder("sst-2", tokenizer).encode(Example({"text": text}))
        special = [i for i in prompt.ids if i in tokenizer.all_special_ids and i != tokenizer.unk_token_id]
        assert special == [tokenizer.cls_token_id, tokenizer.mask_token_id, tokenizer.sep_token_id]
        assert prompt.ids[prompt.position] == tokenizer.mask_token_id


@pytest.mark.parametrize("word", ["word ", "<mask> ", "😀", "x"])
@pytest.mark.parametrize("max_length", [16, 17, 128])
def test_long_text_is_truncated_but_not_the_template(word: str, max_length: int, tokenizer: Any) -> None:
    for name in ("sst-2", "mnli"):
        task = get_task(name)
        texts = [word * 1_000] * len(task.columns)
        prompt = Encoder(task, tokenizer, max_length=max_length).encode(example_of(task, texts))
        assert len(prompt.ids) == len(prompt.segments) <= max_length
        assert prompt.ids[prompt.position] == tokenizer.mask_token_id
        assert prompt.ids[-1] == tokenizer.sep_token_id
        if " " in word:  # one endless word is a single unknown token in WordPiece
            assert len(prompt.ids) == max_length


def test_first_and_other_limit_cap_each_text(roberta: Any) -> None:
    task = get_task("rte").replace(first_limit=3, other_limit=2)
    prompt = Encoder(task, roberta).encode(example_of(task, ["a a a a a a.", "a a a a."]))
    assert len(prompt.ids) == 1 + 3 + 1 + 1 + 1 + 2 + 1


def test_segments_advance_after_sep_plus(roberta: Any) -> None:
    task = get_task("rte").replace(template="*cls**sent_0**sep+**mask*,*+sent_1**sep+*")
    prompt = Encoder(task, roberta).encode(example_of(task, ["a", "a"]))
    assert prompt.segments == (0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "plain_template"),
    [("sst-2", "It was [MASK]."), ("sst-2", "{text} It was [MASK]."), ("mnli", "? [MASK],"), ("mrpc", "[MASK],")],
)
def test_plain_templates_give_the_same_ids_as_star_templates(name: str, plain_template: str, tokenizer: Any) -> None:
    task = get_task(name)
    example = example_of(task, ["A fine film.", "It was good."][: len(task.columns)])
    assert Encoder(task.replace(template=plain_template), tokenizer).encode(example) == Encoder(task, tokenizer).encode(
        example
    )


def test_label_token_inserts_the_word_of_that_label(roberta: Any) -> None:
    task = get_task("sst-2").replace(template="*cls**label_1**sent_0**mask**sep+*")
    encoder = Encoder(task, roberta)
    assert encoder.encode(Example({"text": "a"})).ids[1] == encoder.readout.words[1]


def test_render_includes_special_tokens_and_truncation(roberta: Any) -> None:
    encoder = Encoder("sst-2", roberta, max_length=9)
    assert encoder.render(Example({"text": " a film a film a film "})) == "<s>a film a It was<mask>.</s>"


def test_batch_has_labels_and_readout(roberta: Any) -> None:
    encoder = Encoder("sst-2", roberta, vocabulary=True)
    batch = encoder.batch([Example({"text": "a"}, 1), Example({"text": "b"})])
    assert batch.labels.tolist() == [1, -1]
    assert batch.readout == encoder.readout
    assert batch.readout.vocabulary and batch.readout.kind == "words"


# --- causal prompts


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_causal_prompt_begins_with_the_bos_its_tokenizer_adds(opt: Any, roberta: Any) -> None:
    task = get_task("sst-2", "causal")
    with_bos = Encoder(task, opt).encode(Example({"text": "a film ."}, 1))
    assert with_bos.ids == (opt.bos_token_id, *ids_of(opt, "a film . It was"))
    assert with_bos.position == len(with_bos.ids) - 1
    without = Encoder(task, roberta).encode(Example({"text": "a film ."}, 1))
    assert without.ids == ids_of(roberta, "a film . It was")


def test_single_token_answers_use_the_words_readout(opt: Any) -> None:
    sst2, rte = (Encoder(get_task(name, "causal"), opt) for name in ("sst-2", "rte"))
    assert sst2.readout == Readout("words", words=ids_of(opt, " terrible") + ids_of(opt, " great"))
    # the prompt ends in a newline: no space
    assert rte.readout.kind == "candidates" or rte.readout.words == ids_of(opt, "Yes") + ids_of(opt, "No")


def test_longer_answers_use_the_candidates_readout(opt: Any) -> None:
    task = get_task("sst-2", "causal").replace(words=("not very good", "great"))
    encoder = Encoder(task, opt)
    assert encoder.readout == Readout("candidates")
    prompt = encoder.encode(Example({"text": "a"}, 1))
    assert prompt.candidates == (ids_of(opt, " not very good"), ids_of(opt, " great"))
    assert prompt.ids == Encoder(task.replace(words=("bad", "good")), opt).encode(Example({"text": "a"})).ids
    with pytest.raises(TaskError, match="needs answers of one token each; use --readout candidates"):
        Encoder(task, opt, readout="words")
    asked = Encoder(get_task("sst-2", "causal"), opt, readout="candidates")
    assert asked.encode(Example({"text": "a"})).candidates == (ids_of(opt, " terrible"), ids_of(opt, " great"))


@pytest.mark.parametrize("name", ["byte-level", "unigram", "sentencepiece bpe", "wordpiece"])
def test_prompt_plus_answer_tokenizes_like_the_joined_text(name: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[name]
    prompt = Encoder(get_task("sst-2", "causal"), tokenizer, readout="candidates").encode(Example({"text": "a film"}))
    assert prompt.ids + prompt.candidates[1] == ids_of(tokenizer, "a film It was great")


def test_record_trains_on_the_first_answer_and_knows_all_right_candidates(opt: Any) -> None:
    row = {"passage": "P", "query": "@placeholder won", "entities": ["Ann", "Bo", "Cy"], "answers": ["Cy", "Ann"]}
    (example,) = load_examples([row], "record")
    prompt = Encoder("record", opt).encode(example)
    assert (prompt.label, prompt.right, len(prompt.candidates)) == (2, (0, 2), 3)
    (by_index,) = load_examples([{**row, "answers": 1}], "record")
    assert Encoder("record", opt).encode(by_index).right == ()


def test_choice_takes_candidates_from_the_example(opt: Any) -> None:
    task = get_task("copa")
    prompt = Encoder(task, opt).encode(Example(dict(task.sample), 1))
    assert opt.decode(prompt.ids) == "<s>The pavement was wet because"
    assert prompt.candidates == (ids_of(opt, " it had rained."), ids_of(opt, " it was noon."))
    assert prompt.label == 1


def test_generation_scores_the_first_answer_and_keeps_all_for_f1(opt: Any) -> None:
    task = get_task("squad")
    example = Example({**task.sample, "answers": ["in burrows", "burrows"]}, 0)
    encoder = Encoder(task, opt)
    prompt = encoder.encode(example)
    assert encoder.readout.kind == "candidates"
    assert prompt.candidates == (ids_of(opt, " in burrows") + ids_of(opt, "\n"),)
    assert (prompt.label, prompt.answers) == (0, ("in burrows", "burrows"))
    unanswered = encoder.encode(Example({key: task.sample[key] for key in task.columns}))
    assert (unanswered.label, unanswered.candidates, unanswered.answers) == (-1, (), ())


@anything
@given(text=some_text, answer=some_text)
def test_causal_prompt_with_candidates_fits_and_has_no_special_tokens(opt: Any, text: str, answer: str) -> None:
    task = get_task("squad")
    fields = {"title": text, "context": text * 50, "question": text, "answers": [answer * 20]}
    prompt = Encoder(task, opt, max_length=64).encode(Example(fields, 0))
    assert 1 <= len(prompt.ids) + max(map(len, prompt.candidates)) <= 64
    assert prompt.ids[0] == opt.bos_token_id
    assert not set(prompt.ids[1:]) & set(opt.all_special_ids)
    assert not set(prompt.candidates[0]) & set(opt.all_special_ids)
    assert opt.decode(prompt.ids).endswith("\nAnswer:")


def test_empty_causal_prompt_gets_a_bos_token(roberta: Any) -> None:
    task = get_task("sst-2", "causal").replace(template="{text}")
    assert Encoder(task, roberta).encode(Example({"text": ""})).ids == (roberta.bos_token_id,)


# --- heads, limits, errors


def test_head_prompt_has_only_the_texts(roberta: Any) -> None:
    encoder = Encoder("rte", roberta, readout="head")
    prompt = encoder.encode(Example({"premise": "a", "hypothesis": "film"}, 1))
    cls, sep = roberta.cls_token_id, roberta.sep_token_id
    assert prompt.ids == (cls, *ids_of(roberta, "a"), sep, *ids_of(roberta, "film"), sep)
    assert encoder.readout == Readout("head", classes=2)
    assert (prompt.position, prompt.label) == (0, 1)


def test_head_needs_no_mask_token(opt: Any) -> None:
    assert Encoder("sst-2", opt, readout="head").readout.classes == 2


def test_prompt_has_no_cls_if_the_model_has_none(make: Any) -> None:
    t5 = make.unigram(cls_token=None, bos_token=None, sep_token=None, mask_token=None)
    prompt = Encoder("sst-2", t5, readout="head").encode(Example({"text": "film"}))
    assert prompt.ids == (*ids_of(t5, "film"), t5.eos_token_id)
    with pytest.raises(TaskError, match="this model has no mask token"):
        Encoder("sst-2", t5)


def test_unk_token_that_doubles_as_eos_is_special(make: Any) -> None:
    end = "<s>"
    same = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    gpt2 = make.byte_level(**same, mask_token=None, cls_token=None)
    prompt = Encoder(get_task("sst-2", "causal"), gpt2).encode(Example({"text": f"a {end} film"}))
    assert gpt2.convert_tokens_to_ids(end) not in prompt.ids
    assert gpt2.decode(prompt.ids) == f"a {end} film It was"


def test_encoder_errors_state_a_remedy(roberta: Any, opt: Any) -> None:
    with pytest.raises(TaskError, match=r"^task 'sst-2': this model has no mask token; use a masked language model"):
        Encoder("sst-2", opt)
    with pytest.raises(TaskError, match="candidates are continuations of a causal model; use --readout words"):
        Encoder("sst-2", roberta, readout="candidates")
    with pytest.raises(TaskError, match=r"unknown readout 'haed'; .* did you mean 'head'"):
        Encoder("sst-2", roberta, readout="haed")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="a head needs labels, but this is a generation task"):
        Encoder("squad", opt, readout="head")
    with pytest.raises(TaskError, match="the template alone takes 6 tokens of max_length 5; raise it"):
        Encoder("sst-2", roberta, max_length=5)
    with pytest.raises(TaskError, match=r"'[*]label_7[*]', but there are 2 labels"):
        Encoder(get_task("sst-2").replace(template="*sent_0**mask**label_7*"), roberta)
    with pytest.raises(TaskError, match="the example has no 'text', only txt"):
        Encoder("sst-2", roberta).encode(Example({"txt": "a"}))


def test_max_length_is_limited_by_the_model(roberta: Any) -> None:
    before = roberta.model_max_length
    try:
        roberta.model_max_length = 32
        assert Encoder("sst-2", roberta).max_length == 32
        with pytest.raises(TaskError, match="max_length 64 is more than the 32 tokens this model takes; lower it"):
            Encoder("sst-2", roberta, max_length=64)
    finally:
        roberta.model_max_length = before
