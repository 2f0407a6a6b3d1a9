"""Demonstrations: one per label, never the example itself, deterministic, and truncated first."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo.errors import TaskError
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


def test_causal_demonstrations_precede_the_query(opt: Any) -> None:
    encoder = Encoder(get_task("sst-2", "causal"), opt, demonstrations=POOL)
    shown = encoder.render(Example({"text": "a"}), (0, 0))
    first, second, last = shown.removeprefix("<s>").split("\n\n")
    assert first.startswith("film ") and first.endswith(" It was terrible")
    assert second.startswith("movie ") and second.endswith(" It was great")
    assert last == "a It was"


def test_unusable_demonstrations_are_rejected(roberta: Any, opt: Any) -> None:
    with pytest.raises(TaskError, match=r"^task 'sst-2': no demonstration of label 'positive'; give at least one"):
        Encoder("sst-2", roberta, demonstrations=POOL[:4])
    with pytest.raises(TaskError, match="the only demonstration of label 'negative' is the example itself"):
        Encoder("sst-2", roberta, demonstrations=POOL[3:]).encode(POOL[3])
    with pytest.raises(TaskError, match="'copa' is a choice task; demonstrations need a task with labels"):
        Encoder("copa", opt, demonstrations=POOL)
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
