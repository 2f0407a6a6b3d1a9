"""Checks of what workers return, the same for every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mezzo.engines.microbatch import candidate_count, group_calls, split_into_units
from mezzo.parallel.results import MAX_OPINIONS, MalformedReply, UnitResults
from mezzo.parallel.stats import WorkStats
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout
from tests.conftest import make_batch

PROBES = (Probe(((1, 1e-3),)), Probe(((1, -1e-3),)))


@pytest.fixture
def single_unit():
    """Results of one unit, its call, and finite scores for it."""
    batch = make_batch(3)
    units = split_into_units(batch, len(PROBES), MicroBatch(rows=3))
    calls = group_calls(batch, PROBES, units, merge=False)
    scores = np.zeros((len(PROBES), len(batch), candidate_count(batch)), np.float32)
    return UnitResults[int]("score", units, WorkStats()), calls, scores


def with_value(scores: Any, value: float, index: int = 0) -> Any:
    changed = scores.copy()
    changed.flat[index] = value
    return changed


def test_finite_scores_are_accepted(single_unit):
    results, calls, scores = single_unit
    assert results.add(0, calls, [scores]) == []
    assert not results.pending
    assert results.stats.recomputed_units == 0


@pytest.mark.parametrize("value", [None, [], "text", [None], [np.zeros((2, 3, 2))], [np.zeros((2, 1, 2), np.float32)]])
def test_reply_that_cannot_be_scores_is_malformed(single_unit, value):
    results, calls, _ = single_unit
    with pytest.raises(MalformedReply):
        results.add(0, calls, value)
    assert results.pending


def test_finite_scores_of_a_second_worker_show_that_the_first_is_faulty(single_unit):
    results, calls, scores = single_unit
    assert results.add(0, calls, [with_value(scores, np.nan)]) == []
    (unit,) = results.pending
    assert results.doubted_workers(unit) == [0]
    assert results.add(1, calls, [scores]) == [0]
    assert np.array_equal(results.values[unit], scores)
    assert results.stats.recomputed_units == 1


def test_worker_that_corrects_itself_is_not_faulty(single_unit):
    results, calls, scores = single_unit
    results.add(0, calls, [with_value(scores, np.inf)])
    assert results.add(0, calls, [scores]) == []
    assert not results.pending


def test_equal_non_finite_scores_of_two_workers_are_genuine(single_unit):
    results, calls, scores = single_unit
    results.add(0, calls, [with_value(scores, np.nan)])
    assert results.add(1, calls, [with_value(scores, np.nan)]) == []
    assert not results.pending


def test_last_opinion_is_accepted_when_no_two_are_equal(single_unit):
    results, calls, scores = single_unit
    for worker in range(MAX_OPINIONS):
        assert results.pending
        results.add(worker, calls, [with_value(scores, np.nan, index=worker)])
    assert not results.pending
    assert results.stats.recomputed_units == MAX_OPINIONS - 1


def test_padding_of_missing_candidates_counts_as_finite():
    prompts = (Prompt((5, 6), 0, candidates=((1,), (2,), (3,))), Prompt((5, 6), 0, candidates=((1,), (2,))))
    batch = Batch(prompts, Readout("candidates"))
    units = split_into_units(batch, len(PROBES), MicroBatch(rows=2))
    results = UnitResults[int]("score", units, WorkStats())
    scores = np.zeros((len(PROBES), 2, 3), np.float32)
    scores[:, 1, 2] = -np.inf
    results.add(0, group_calls(batch, PROBES, units, merge=False), [scores])
    assert not results.pending
