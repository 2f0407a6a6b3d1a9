"""Batches as token rows: where a row ends, and which tokens rows share."""

from __future__ import annotations

from mezzo.engines.token_rows import MIN_SHARED_TOKENS, common_prefix, shared_prompts, token_rows
from mezzo.types import Batch, Prompt, Readout


def batch(*prompts, kind="words"):
    return Batch(tuple(prompts), Readout(kind, words=(1, 2) if kind == "words" else ()))


def test_causal_row_ends_at_the_position_read():
    rows = token_rows(batch(Prompt((5, 6, 7, 8), position=1), Prompt((5, 6, 7))))
    assert [(row.ids, row.example, row.candidate) for row in rows] == [((5, 6), 0, 0), ((5, 6, 7), 1, 0)]
    assert token_rows(batch(Prompt((5, 6, 7, 8), position=1)), causal=False)[0].ids == (5, 6, 7, 8)


def test_common_prefix_ends_before_the_position_read():
    long = tuple(range(100, 140))
    rows = token_rows(batch(Prompt((*long, 1, 2)), Prompt((*long, 3)), Prompt((*long, 1))))
    assert common_prefix(rows) == long
    rows = token_rows(batch(Prompt(long), Prompt((*long, 3))))
    assert common_prefix(rows) == long[:-1], "the last position of the shorter prompt must be computed"
    assert common_prefix(rows[:1]) == ()
    short = long[: MIN_SHARED_TOKENS - 1]
    assert common_prefix(token_rows(batch(Prompt((*short, 1, 2)), Prompt((*short, 3, 4))))) == ()


def test_prompts_with_several_candidates_are_shared():
    long = tuple(range(100, 130))
    rows = token_rows(
        batch(
            Prompt(long, candidates=((1,), (2, 3))),
            Prompt((9, *long), candidates=((1,),)),
            Prompt((8, 7), candidates=((1,), (2,))),
            kind="candidates",
        )
    )
    assert shared_prompts(rows, 0) == [long[:-1]], "one candidate has nothing to share, and two tokens are too few"
    assert [row.logprob_start for row in rows if row.example == 0] == [len(long) - 1] * 2
