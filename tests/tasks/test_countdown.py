"""Countdown: problems from a seed, and the verifier."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 * 7 + 5", 1.0),
        ("Let me think: 3 + 5\n(3 * 7) + 5 = 26", 1.0),
        ("so <answer>5 + 7*3</answer>, which is 26", 1.0),
        ("3 + 7 + 5", 0.1),
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
    assert reward(text, ROW) == expected
