"""Countdown: problems from a seed, and the verifier."""

from __future__ import annotations

import itertools

import pytest

from mezzo.tasks import bundled_data, get_task, load_examples
from mezzo.tasks.countdown import SIZES, make_rows, reward

ROW = {"numbers": "3 7 5", "target": "26"}


def test_problems_follow_from_the_seed_and_are_all_different():
    splits = {split: make_rows(split) for split in SIZES}
    assert {split: len(rows) for split, rows in splits.items()} == SIZES
    assert len({(*sorted(r["numbers"].split()), r["target"]) for rows in splits.values() for r in rows}) == 2600
    assert bundled_data("countdown", "test") == splits["test"] != make_rows("test", seed=1)
    (example, *_) = load_examples(splits["dev"], get_task("countdown", "causal"), labelled=False)
    assert splits["dev"][0]["target"] in get_task("countdown").render(example)


def test_no_habit_solves_many_problems():
    """One expression for all problems, of the numbers as they are given or by size."""
    rows = make_rows("test")
    assert not any(reward(row["numbers"].replace(" ", sign), row) == 1 for row in rows for sign in "+*")
    forms = [
        form.format(*places)
        for places in itertools.permutations(["{0}", "{1}", "{2}"])
        for first, second in itertools.product("+-*", repeat=2)
        for form in (f"({{}} {first} {{}}) {second} {{}}", f"{{}} {first} ({{}} {second} {{}})")
    ]
    for order, form in itertools.product((list, sorted), forms):
        given = [order(map(int, row["numbers"].split())) for row in rows]
        solved = [reward(form.format(*numbers), row) == 1 for numbers, row in zip(given, rows, strict=True)]
        assert sum(solved) < 0.1 * len(rows) == 50, form


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 * 7 + 5", 1.0),
        ("Let me think: 3 + 5\n(3 * 7) + 5 = 26", 1.0),
        ("so <answer>5 + 7*3</answer>, which is 26", 1.0),
        ("3 + 7 + 5", 0.1 + 0.3 * 15 / 26),
        ("3 * 5 + 7", 0.1 + 0.3 * 22 / 26),
        ("(7 - 3) * 5 * 1", 0.0),
        ("(3 + 5) * 7", 0.1 + 0.3 * 26 / 56),
        ("5 + 3 - 7 * 1", 0.0),
        ("3 - 7 * 5", 0.1),
        ("5 / 7 * 3", 0.1 + 0.3 * (15 / 7) / 26),
        ("3 * 7 + 5 + 0", 0.0),
        ("3 * 7", 0.0),
        ("26", 0.0),
        ("", 0.0),
        ("3 ** 7 ** 5", 0.0),
        ("(3 * 7 + 5", 0.0),
        ("3 * 7 + 5if", 0.0),
        ("7 / (5 - 5) + 3", 0.0),
        ("__import__('os').exit() * 3 * 7 * 5", 0.0),
        ("(" * 5000 + "3 * 7 + 5", 0.0),
    ],
)
def test_answers_are_checked(text, expected):
    assert reward(text, ROW) == pytest.approx(expected)
