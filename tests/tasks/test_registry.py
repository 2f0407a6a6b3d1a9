"""The published tasks, one by one, and how a user's own tasks are found and checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mezzo.errors import TaskError
from mezzo.tasks import MLMConfig, Task, bundled_data, get_task, list_tasks
from mezzo.types import Example

FAMILIES = ("masked", "causal")
T1 = "*cls**sent_0*_It_was*mask*.*sep+*"
T2 = "*cls**sent-_0*?*mask*,*+sentl_1**sep+*"
T3 = "*cls**sent_0**mask*,*+sentl_1**sep+*"
T4 = "*cls**sent_0*_This_is*mask*.*sep+*"
T5 = "*cls**mask*:*+sent_0**sep+*"
SENTIMENT = {"negative": "terrible", "positive": "great"}
NLI = {"contradiction": "No", "entailment": "Yes", "neutral": "Maybe"}
RTE = {"entailment": "Yes", "not_entailment": "No"}
SAME = {"not_duplicate": "No", "duplicate": "Yes"}
DEGREES = dict(
    zip(
        ("very negative", "negative", "neutral", "positive", "very positive"),
        ("terrible", "bad", "okay", "good", "great"),
        strict=True,
    )
)
TREC = {word.lower(): word for word in ("Description", "Entity", "Expression", "Human", "Location", "Number")}

MASKED: dict[str, tuple[str, dict[str, str], int, str]] = {
    "sst-2": (T1, SENTIMENT, 128, "accuracy"),
    "mr": (T1, SENTIMENT, 128, "accuracy"),
    "cr": (T1, SENTIMENT, 128, "accuracy"),
    "mpqa": (T1, SENTIMENT, 128, "accuracy"),
    "sst-5": (T1, DEGREES, 128, "accuracy"),
    "subj": (T4, {"subjective": "subjective", "objective": "objective"}, 128, "accuracy"),
    "cola": (T4, {"unacceptable": "incorrect", "acceptable": "correct"}, 128, "matthews"),
    "trec": (T5, TREC, 128, "accuracy"),
    "mnli": (T2, NLI, 256, "accuracy"),
    "snli": (T2, NLI, 256, "accuracy"),
    "qnli": (T2, RTE, 256, "accuracy"),
    "rte": (T2, RTE, 256, "accuracy"),
    "mrpc": (T3, SAME, 128, "f1"),
    "qqp": (T3, SAME, 128, "f1"),
    "reviews": ("*cls**sent_0*_I*mask*_it!*sep+*", {"negative": "hated", "positive": "loved"}, 128, "accuracy"),
    "pairs": (T2, NLI, 256, "accuracy"),
}

# task: a row, the prompt it must give, and the answers in candidate order
CAUSAL: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "sst-2": ({"text": "fun ."}, "fun . It was", ["terrible", "great"]),
    "rte": (
        {"premise": "A.", "hypothesis": "B."},
        'A.\nDoes this mean that "B." is true? Yes or No?\n',
        ["Yes", "No"],
    ),
    "cb": (
        {"premise": "A.", "hypothesis": "b"},
        'Suppose A. Can we infer that "b"? Yes, No, or Maybe?\n',
        ["Yes", "No", "Maybe"],
    ),
    "boolq": ({"passage": "P.", "question": "is it"}, "P. Is it?\n", ["Yes", "No"]),
    "wsc": (
        {"text": "T.", "span1": "The cup", "span2": "It"},
        'T.\nIn the previous sentence, does the pronoun "it" refer to The cup? Yes or No?\n',
        ["No", "Yes"],
    ),
    "wic": (
        {"word": "w", "sentence1": "A.", "sentence2": "B."},
        'Does the word "w" have the same meaning in these two sentences? Yes, No?\nA.\nB.\n',
        ["No", "Yes"],
    ),
    "multirc": (
        {"paragraph": "P.", "question": "Q?", "answer": "a"},
        'P.\nQuestion: Q?\nI found this answer "a". Is that correct? Yes or No?\n',
        ["No", "Yes"],
    ),
    "copa": (
        {"premise": "It fell.", "question": "cause", "choice1": "The wind blew.", "choice2": "I pushed."},
        "It fell because",
        ["the wind blew.", "I pushed."],
    ),
    "record": (
        {"passage": "P.\n@highlight\nH", "query": "@placeholder won", "entities": ["Ann", "Bo"]},
        "P.\n- H\n-",
        ["Ann won", "Bo won"],
    ),
    "squad": (
        {"title": "T", "context": "C.", "question": "Q?", "answers": ["x", "y"]},
        "Title: T\nContext: C.\nQuestion: Q?\nAnswer:",
        ["x", "y"],
    ),
    "drop": (
        {"passage": "P.", "question": "Q?", "answers": ["3"]},
        "Passage: P.\nQuestion: Q?\nAnswer:",
        ["3"],
    ),
}

# tasks that were published for the other family, or not with a prompt: rendered for texts A., B., C., and the words
PAIR_3 = 'Suppose A. Can we infer that "B."? Yes, No, or Maybe?\n'
INTENTS = 77
KINDS = ["person", "place", "number", "time", "reason", "way", "meaning", "thing"]
OURS: dict[tuple[str, str], tuple[str, list[str] | int]] = {
    **{("causal", name): ("A. It was", ["terrible", "great"]) for name in ("mr", "cr", "mpqa", "reviews")},
    ("causal", "sst-5"): ("A. It was", list(DEGREES.values())),
    ("causal", "prompts"): ("A.", []),
    ("causal", "countdown"): (
        "Write an expression that equals B.. Use each of the numbers A. exactly once, with + - * / and parentheses. "
        "Answer with the expression alone.\nExpression:",
        [],
    ),
    ("causal", "subj"): ("A. This is", ["subjective", "objective"]),
    ("causal", "cola"): ("A. This is", ["incorrect", "correct"]),
    ("causal", "trec"): (
        "Question: A.\nAnswer type:",
        ["description", "thing", "expression", "human", "location", "number"],
    ),
    **{("causal", name): (PAIR_3, ["No", "Yes", "Maybe"]) for name in ("mnli", "snli", "pairs")},
    ("causal", "qnli"): ('B.\nDoes this answer the question "A."? Yes or No?\n', ["Yes", "No"]),
    ("causal", "mrpc"): ("A.\nB.\nDo these two sentences mean the same? Yes or No?\n", ["No", "Yes"]),
    ("causal", "qqp"): ("A.\nB.\nDo these two questions ask the same? Yes or No?\n", ["No", "Yes"]),
    ("masked", "cb"): ("A? [MASK], b.", ["Yes", "No", "Maybe"]),
    ("masked", "boolq"): ("A. B.? [MASK].", ["Yes", "No"]),
    ("masked", "wsc"): ('A. Does "b." refer to C.? [MASK].', ["No", "Yes"]),
    ("masked", "wic"): ('B. C. Does "A." have the same meaning? [MASK].', ["No", "Yes"]),
    ("masked", "multirc"): ('A. B. Is "C." correct? [MASK].', ["No", "Yes"]),
    ("masked", "questions"): ("The [MASK]: A.", KINDS),
    ("causal", "questions"): ("Question: A.\nThe answer is a", KINDS),
    ("masked", "ag-news"): ("A. This news is about [MASK].", ["world", "sports", "business", "technology"]),
    ("causal", "ag-news"): ("A. This news is about", ["world", "sports", "business", "technology"]),
    ("masked", "emotion"): ("A. I felt [MASK].", ["sad", "happy", "loving", "angry", "afraid", "surprised"]),
    ("causal", "emotion"): ("A. I felt", ["sad", "happy", "loving", "angry", "afraid", "surprised"]),
    ("masked", "banking77"): ("A. This is about [MASK].", INTENTS),
    ("causal", "banking77"): ("A. This is about", INTENTS),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_task_matches_the_published_one(name: str) -> None:
    task = get_task(name)
    assert (task.template, task.word_of, task.max_length, task.metric) == MASKED[name]
    assert task.family == "masked"


# The most tokens of the first and of each other text, in the published scripts.
LIMITS = {
    "sst-5": (110, 20),
    **dict.fromkeys(("mr", "cr", "subj"), (110, 50)),
    **dict.fromkeys(("trec", "mpqa"), (110, None)),
    **dict.fromkeys(("mnli", "rte"), (240, None)),
}


@pytest.mark.parametrize("name", MASKED)
def test_limits_of_texts_are_the_published_ones(name: str) -> None:
    task = get_task(name)
    assert (task.first_limit, task.other_limit) == LIMITS.get(name, (None, None))


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_task_matches_the_published_one(name: str) -> None:
    fields, prompt, answers = CAUSAL[name]
    task = get_task(name, family="causal")
    assert task.render(Example(fields)) == prompt
    assert task.answers(Example(fields)) == answers


def test_copa_effect_prompt_ends_with_so() -> None:
    fields = {**CAUSAL["copa"][0], "question": "effect"}
    assert get_task("copa").render(Example(fields)) == "It fell so"


@pytest.mark.parametrize(("family", "name"), OURS)
def test_task_of_the_other_family_asks_in_plain_words(family: Any, name: str) -> None:
    task = get_task(name, family)
    texts = dict(zip(task.columns, ("A.", "B.", "C."), strict=False))
    prompt, words = OURS[family, name]
    assert task.render(Example(texts)) == prompt
    assert (len(task.words) if isinstance(words, int) else list(task.words)) == words
    assert task.max_length == (2048 if family == "causal" else get_task(name, "masked").max_length)


def test_no_other_tasks_are_registered() -> None:
    listed = [(task.family, task.name) for task in list_tasks()]
    published = [("masked", name) for name in MASKED] + [("causal", name) for name in CAUSAL]
    assert sorted(listed) == sorted([*published, *OURS])


def test_every_classification_task_exists_for_both_families() -> None:
    named = {
        family: {t.name for t in list_tasks() if (t.family, t.kind) == (family, "classification")}
        for family in FAMILIES
    }
    assert named["masked"] == named["causal"]
    for name in named["masked"]:
        masked, causal = get_task(name, "masked"), get_task(name, "causal")
        assert (masked.labels, masked.columns, masked.metric) == (causal.labels, causal.columns, causal.metric)


@pytest.mark.parametrize("task", list_tasks(), ids=lambda task: f"{task.family}-{task.name}")
def test_task_description_and_dict_round_trip(task: Task) -> None:
    shown = task.describe()
    assert shown["example"] and shown["words"] == task.word_of and shown["metric"] == task.metric
    assert ("[MASK]" in shown["example"]) == (task.family == "masked")
    assert get_task(task.as_dict()) == task


def test_task_name_spelling_is_lenient_and_family_selects() -> None:
    assert get_task("SST2") is get_task("sst_2") is get_task("sst-2")
    assert get_task("AG_News") is get_task("ag-news")
    assert get_task("sst-2", "causal").family == "causal"
    assert get_task("copa").family == "causal"
    assert get_task(get_task("rte")) is get_task("rte")


TOML = """
columns = ["body"]
template = "{body} It is [MASK]."
max_length = 64
id_order = ["calm", "urgent"]
[words]
calm = "fine"
urgent = "urgent"
"""


def test_task_from_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "tickets.toml"
    path.write_text(TOML, encoding="utf-8")
    task = get_task(str(path))
    assert (task.name, task.columns, task.max_length) == ("tickets", ("body",), 64)
    assert task.word_of == {"calm": "fine", "urgent": "urgent"}
    assert task.id_orders["data"] == ("calm", "urgent")
    assert task.render(Example({"body": "Printer on fire."})) == "Printer on fire. It is [MASK]."
    assert get_task(task.as_dict()) == task


MINE = {"columns": ["text"], "template": "It was [MASK].", "labels": ["a", "b"], "words": ["good", "bad"]}

INVALID_TASKS: list[tuple[dict[str, Any], str]] = [
    ({"lables": ["a"]}, "your task: unknown key 'lables'; did you mean 'labels'?"),
    ({"family": "mask"}, "task 'custom': family 'mask' is not one of masked, causal; did you mean 'masked'?"),
    (
        {"metric": "f2"},
        "task 'custom': metric 'f2' is not one of accuracy, f1, matthews, countdown; did you mean 'f1'?",
    ),
    ({"max_length": 0}, "task 'custom': max_length is 0; give a positive number of tokens"),
    ({"columns": "text"}, "task 'custom': columns is 'text'; give a list, such as ['text']"),
    ({"template": 3}, "task 'custom': template is 3; give a string"),
    ({"id_orders": ["a", "b"]}, "task 'custom': id_orders is ['a', 'b']; give a table"),
    ({"columns": []}, "task 'custom': no columns; name the data's text columns, such as columns = ['text']"),
    ({"words": ["good"]}, "task 'custom': 1 words for 2 labels; give one word per label, in order"),
    ({"words": ["good", "good"]}, "task 'custom': 'good' appears twice in words; each must be different"),
    ({"words": ["good", " "]}, "task 'custom': the word of label 'b' is empty"),
    ({"words": {"a": "good", "c": "bad"}}, "task 'custom': a word for 'c', but the labels are a, b"),
    ({"words": {"a": "good"}}, "task 'custom': no word for label 'b'; give one per label"),
    (
        {"labels": ["a"], "words": ["good"]},
        "task 'custom': 1 labels; name at least two, such as labels = ['negative', 'positive']",
    ),
    (
        {"id_orders": {"mine": ["a", "c"]}},
        "task 'custom': the id order of 'mine' is ('a', 'c'); it must list each of ('a', 'b') once",
    ),
    ({"id_order": "mine"}, "task 'custom': id_order 'mine' is not declared in id_orders (none)"),
    ({"kind": "choice"}, "task 'custom': a choice task needs a causal model; set family = 'causal'"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID_TASKS)
def test_invalid_task_is_rejected_with_a_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        get_task({**MINE, **changes})
    assert str(caught.value) == message


def test_missing_key_file_or_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"^your task: no 'template'; a task needs columns, template, labels and words$"
    ):
        get_task({"columns": ["text"]})
    with pytest.raises(TaskError, match=r"cannot read the task file .*: No such file"):
        get_task(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("columns = [\n=", encoding="utf-8")
    with pytest.raises(TaskError, match=r"bad.toml: not valid TOML: .*line 2"):
        get_task(str(tmp_path / "bad.toml"))
    with pytest.raises(TaskError, match=r"^unknown task 'mnil'; did you mean 'mnli'[?]$"):
        get_task("mnil")
    with pytest.raises(TaskError, match=r"^unknown task 'qqqqqqqq'; known: sst-2, .*or a path that ends in .toml$"):
        get_task("qqqqqqqq")
    with pytest.raises(
        TaskError, match=r"^task 'copa' is causal, not masked: name a causal model with --model, or one "
    ):
        get_task("copa", "masked")
    with pytest.raises(TaskError, match="is masked, but causal was requested"):
        get_task({**MINE, "family": "masked"}, "causal")
    assert get_task({**MINE, "template": "It was"}, "causal").family == "causal"


def test_replace_validates_the_new_task() -> None:
    task = get_task("sst-2").replace(
        template="{text} All in all, [MASK].", words={"positive": "good", "negative": "bad"}
    )
    assert task.words == ("bad", "good")
    with pytest.raises(TaskError, match="has no mask"):
        task.replace(template="{text}")
    with pytest.raises(TaskError, match=r"^a task has no 'tempalte'; did you mean 'template'[?]$"):
        task.replace(tempalte="x")


def test_mlm_config_accepts_label_names_or_ids() -> None:
    sst2 = get_task("sst-2")
    named = MLMConfig("{text} So [MASK].", {"positive": "good", "negative": "bad"}).apply(sst2)
    assert (named.template, named.word_of) == ("{text} So [MASK].", {"negative": "bad", "positive": "good"})
    assert MLMConfig(label_word_mapping={0: "bad", 1: "good"}).apply(sst2).word_of == named.word_of
    assert MLMConfig(label_word_mapping={"0": "bad", "1": "good"}).apply(sst2).word_of == named.word_of
    assert MLMConfig(use_space_prefix=False).apply(sst2).space_prefix is False
    assert MLMConfig(label_word_mapping={"NEG": "bad", "Positive": "good"}).apply(sst2).word_of == named.word_of
    with pytest.raises(TaskError) as caught:
        MLMConfig(label_word_mapping={1: "bad", 2: "good"}).apply(sst2)
    assert str(caught.value) == (
        "the words are mapped by ids 1, 2, and id 0 has no pair;"
        " map label names, such as {'negative': 'terrible', 'positive': 'great'}"
    )
    with pytest.raises(TaskError, match="a word for 'postive', but the labels are negative, positive; did you mean"):
        MLMConfig(label_word_mapping={"negative": "bad", "postive": "good"}).apply(sst2)


def test_ids_whose_meaning_differs_between_sources_are_not_guessed() -> None:
    by_id, mnli = MLMConfig(label_word_mapping={0: "No", 1: "Yes", 2: "Maybe"}), get_task("mnli")
    with pytest.raises(TaskError) as caught:
        by_id.apply(mnli)
    assert str(caught.value) == (
        "the words are mapped by ids, which mean different labels (hub: 0 entailment, 1 neutral, 2 contradiction; lm-bff: "
        "0 contradiction, 1 entailment, 2 neutral); map label names, such as {'contradiction': 'No', 'entailment': 'Yes',"
        " 'neutral': 'Maybe'}, or state whose ids they are, such as --id-order hub"
    )
    assert by_id.apply(mnli, "lm-bff").word_of == by_id.apply(mnli.replace(id_order="lm-bff")).word_of == NLI
    assert by_id.apply(mnli, "hub").word_of["entailment"] == "No"
    by_csv = MLMConfig(label_word_mapping=dict(enumerate(("a", "b", "c", "d"), 1)))
    assert by_csv.apply(get_task("ag-news"), "csv").words == ("a", "b", "c", "d")
    with pytest.raises(
        TaskError, match=r"mapped by ids, which have no declared order; map label names, such as \{'a': "
    ):
        MLMConfig(label_word_mapping={0: "x", 1: "y"}).apply(get_task(MINE))


def test_bundled_data_is_none_for_tasks_without_data() -> None:
    assert bundled_data("sst-2", "train") is None
    found = bundled_data("reviews", "train")
    assert found is None or found.name == "train.jsonl"


def test_importing_tasks_imports_no_torch_and_no_transformers() -> None:
    code = "import sys, mezzo.tasks; print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
