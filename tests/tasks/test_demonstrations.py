"""Demonstrations: one per label, or any number before a causal prompt; never the example itself, and cut first."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo.errors import MezzoWarning, TaskError
from mezzo.tasks import Encoder, get_task
from mezzo.tasks.demonstrations import Demonstrations
from mezzo.tasks.truncation import truncate_lengths
from mezzo.types import Example

POOL = [Example({"text": f"{word} {i}"}, label) for label, word in enumerate(("film", "movie")) for i in range(4)]


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_template_is_repeated_once_per_label_with_its_word(roberta: Any) -> None:
    encoder = Encoder("sst-2", roberta, demonstrations=POOL)
    query = Example({"text": "a"}, 1)
    prompt = encoder.encode(query, demo_choice=(7, 2))
    shots = Demonstrations(get_task("sst-2"), POOL).choose(query, 7, 2)
    cls, mask, sep = roberta.cls_token_id, roberta.mask_token_id, roberta.sep_token_id
    was, stop = ids_of(roberta, " It was"), ids_of(roberta, ".")
    expected = (cls, *ids_of(roberta, "a"), *was, mask, *stop, sep)
    for shot, word in zip(shots, encoder.readout.words, strict=True):
        expected += (*ids_of(roberta, shot.fields["text"]), *was, word, *stop, sep)
    assert prompt.ids == expected
    assert prompt.ids[prompt.position] == mask and prompt.ids.count(mask) == 1
    assert prompt.segments[0] == 0 and prompt.segments[-1] == 2
    assert [shot.label for shot in shots] == [0, 1]


def test_demonstrations_of_pairs_contain_both_texts(roberta: Any) -> None:
    pool = [Example({"premise": f"a {i}.", "hypothesis": f"It {i}."}, i % 2) for i in range(4)]
    shown = Encoder("rte", roberta, demonstrations=pool).render(Example({"premise": "x.", "hypothesis": "y."}), (0, 0))
    first, *shots = shown.removeprefix("<s>").removesuffix("</s>").split("</s>")
    assert first == "x?<mask>, y."
    assert [("Yes" in shots[0], "No" in shots[1])] == [(True, True)]
    assert all("?" in shot and ", it " in shot for shot in shots)


def test_choice_depends_only_on_seed_index_and_sampling() -> None:
    task, query = get_task("sst-2"), Example({"text": "a"})
    pool = Demonstrations(task, POOL, seed=3)
    assert pool.choose(query, 5, 1) == Demonstrations(task, list(POOL), seed=3).choose(Example({"text": "b"}), 5, 1)
    several = [pool.choose(query, 5, sampling) for sampling in range(4)]
    assert len({shots[0].fields["text"] for shots in several}) == 4  # samplings differ until the pool is used up
    assert several[0] == pool.choose(query, 5, 4)
    chosen = {
        tuple(shot.fields["text"] for shot in Demonstrations(task, POOL, seed).choose(query, index))
        for seed in (0, 1)
        for index in range(10)
    }
    assert len(chosen) > 5
    assert pool.choose(query) == pool.choose(Example({"text": "a"}, 1))  # without an index the texts count


@pytest.mark.parametrize("index", range(20))
def test_example_is_never_its_own_demonstration(index: int) -> None:
    pool = Demonstrations(get_task("sst-2"), POOL)
    for example in POOL:
        same = Example(dict(example.fields), example.label)
        assert all(shot.fields != same.fields for n in range(4) for shot in pool.choose(same, index, n))


def test_demonstrations_are_truncated_before_the_query(roberta: Any) -> None:
    pool = [Example({"text": f"a {label} " * 40}, label) for label in (0, 1)]
    query = Example({"text": "a film " * 10})
    alone = Encoder("sst-2", roberta).encode(query).ids
    for max_length in (len(alone) + 12, len(alone) + 20, 80):
        prompt = Encoder("sst-2", roberta, max_length=max_length, demonstrations=pool).encode(query)
        assert len(prompt.ids) <= max_length
        assert prompt.ids[: len(alone)] == alone  # the query is complete
        assert prompt.ids.count(roberta.sep_token_id) == 3  # and so is the template of each demonstration
    short = Encoder("sst-2", roberta, max_length=20, demonstrations=pool).encode(query)
    assert len(short.ids) == 20 and short.ids.count(roberta.sep_token_id) == 3
    assert short.ids[short.position] == roberta.mask_token_id


def test_template_may_contain_its_demonstrations(roberta: Any) -> None:
    task = get_task("sst-2").replace(template="*cls**sent_1**labelx_0*.*sent_0**mask**sep+*")
    encoder = Encoder(task, roberta, demonstrations=POOL)
    prompt = encoder.encode(Example({"text": "a"}))
    assert encoder.readout.words[0] in prompt.ids
    with pytest.raises(TaskError, match="the template contains demonstrations; give some"):
        Encoder(task, roberta)
    with pytest.raises(TaskError, match=r"has more demonstrations than there are labels \(2\)"):
        Encoder(task.replace(template="*sent_0**mask**labelx_2*"), roberta, demonstrations=POOL)


COPA = {"premise": "It rains.", "question": "effect", "choice1": "We wait.", "choice2": "We go."}
SQUAD = {"title": "Rain", "context": "It rains.", "question": "What?", "answers": ["it rains", "rains"]}
ANSWER = "\nContext: It rains.\nQuestion: What?\nAnswer:"


@pytest.mark.parametrize(
    ("task", "field", "row", "label", "query", "answer"),
    [
        ("sst-2", "text", {}, 1, "{} It was", " great"),
        ("rte", "premise", {"hypothesis": "So."}, 1, '{}\nDoes this mean that "So." is true? Yes or No?\n', "No"),
        ("copa", "premise", COPA, 1, "{} so", " we go."),
        ("squad", "title", SQUAD, 0, "Title: {}" + ANSWER, " it rains"),
    ],
)
def test_causal_prompt_follows_solved_examples(
    task: str, field: str, row: dict[str, Any], label: int, query: str, answer: str, opt: Any
) -> None:
    """As published: the ids are those of the whole text, for classification, choice and generation."""
    pool = [Example({**row, field: f"film {i}"}, label) for i in range(5)]
    encoder = Encoder(get_task(task, "causal"), opt, max_length=500, demonstrations=pool, in_context=3)

    def shown(example: Example) -> list[str]:
        text = encoder.render(example).removeprefix("<s>")
        assert list(encoder.encode(example).ids) == opt("<s>" + text, add_special_tokens=False)["input_ids"]
        assert encoder.encode(example).position == len(encoder.encode(example).ids) - 1
        return text.split("\n\n")

    *solved, last = shown(Example({**row, field: "movie"}, label))
    assert last == query.format("movie")
    names = [text.removeprefix("Title: ")[:6] for text in solved]
    assert solved == [query.format(name) + answer for name in names]
    assert len(set(names)) == 3
    assert shown(Example({**row, field: "movie"}, label))[:-1] == solved
    drawn = {tuple(shown(Example({**row, field: f"movie {i}"}, label))[:-1]) for i in range(4)}
    assert len(drawn) > 1, "every prompt has its own draw"
    for example in pool:
        *others, last = shown(example)
        assert len(others) == 3 and last + answer not in others
    with pytest.raises(TaskError, match="6 demonstrations of 5 training examples; give more data, or ask for fewer"):
        Encoder(get_task(task, "causal"), opt, demonstrations=pool, in_context=6)


def test_solved_examples_that_do_not_fit_are_cut_at_their_beginning(opt: Any) -> None:
    task, query = get_task("sst-2", "causal"), Example({"text": "movie"})
    whole = Encoder(task, opt, max_length=500, demonstrations=POOL).encode(query).ids
    with pytest.warns(MezzoWarning, match="do not fit into prompts of 20 tokens, and the first are cut"):
        cut = Encoder(task, opt, max_length=20, demonstrations=POOL).encode(query).ids
    assert cut == whole[:1] + whole[-19:], "the BOS token stays"


def test_unusable_demonstrations_are_rejected(roberta: Any) -> None:
    with pytest.raises(TaskError, match=r"^task 'sst-2': no demonstration of label 'positive'; give at least one"):
        Encoder("sst-2", roberta, demonstrations=POOL[:4])
    with pytest.raises(TaskError, match="the only demonstration of label 'negative' is the example itself"):
        Encoder("sst-2", roberta, demonstrations=POOL[3:]).encode(POOL[3])
    with pytest.raises(TaskError, match="a head reads the text alone"):
        Encoder("sst-2", roberta, demonstrations=POOL, readout="head")


@pytest.mark.parametrize(
    ("lengths", "ranks", "limit", "truncated"),
    [
        ([5, 7], [0, 0], 12, [5, 7]),
        ([5, 7], [0, 0], 9, [5, 4]),
        ([4, 7], [0, 0], 9, [4, 5]),
        ([2, 9, 9], [0, 0, 0], 10, [2, 4, 4]),
        ([5, 5], [0, 1], 7, [5, 2]),
        ([5, 5], [1, 0], 4, [0, 4]),
        ([5, 5], [0, 0], 0, [0, 0]),
        ([], [], 3, []),
    ],
)
def test_truncate_lengths(lengths: list[int], ranks: list[int], limit: int, truncated: list[int]) -> None:
    assert truncate_lengths(lengths, ranks, limit) == truncated
