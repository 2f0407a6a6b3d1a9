"""Evolution strategies: weights of directions against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest

from mezzo.method.es import EvolutionStrategies, rank_shares
from mezzo.method.estimators import Spsa
from mezzo.method.optimizers import Sgd, schedule
from mezzo.types import Batch, Generation, Prompt, Question, Readout, Rewards

EPS, RATE = 0.5, 0.25


class Objective:
    def __init__(self, draws=1):
        self.draws = draws

    def question(self, batch, probes):
        return Question(batch, probes, Generation(1, draws=self.draws))


def make_es(shaping, pairs=3, decay=0.0, draws=1):
    batch = Batch((Prompt((1,)), Prompt((2,))), Readout("candidates"))
    optimizer = Sgd(schedule("constant", RATE, 10), decay)
    return EvolutionStrategies(Objective(draws), Spsa(1, EPS, pairs), optimizer, lambda step: batch, shaping)


def rewards_of(pairs=3, prompts=2, draws=2, seed=0):
    return np.random.default_rng(seed).normal(size=(2 * pairs, prompts, draws))


def test_zscores_weigh_directions_whatever_the_scale_of_the_rewards():
    values = rewards_of()
    record = make_es("zscore").conclude(4, Rewards(values))
    fitness = values.mean(axis=(1, 2))
    scaled = (fitness - fitness.mean()) / fitness.std()
    expected = -RATE * (scaled[::2] - scaled[1::2]) / 2 / 3
    np.testing.assert_allclose([coef for _, coef in record.update.terms], expected, rtol=1e-6)
    np.testing.assert_allclose(record.losses, -fitness)
    np.testing.assert_allclose(record.slopes, -(fitness[::2] - fitness[1::2]) / (2 * EPS))
    hard = np.array([[[0.0], [1000.0]]])  # one prompt is easy for every member
    other = make_es("zscore").conclude(4, Rewards(7 * values + hard))
    np.testing.assert_allclose([c for _, c in other.update.terms], expected, rtol=1e-5)


def test_ranks_are_taken_per_prompt_and_shared_by_equal_rewards():
    np.testing.assert_allclose(rank_shares(np.array([[3.0], [1.0], [1.0], [9.0]]))[:, 0], [1 / 6, -1 / 3, -1 / 3, 0.5])
    values = rewards_of()
    outlier = np.where(values == values.max(), 1e9, values)
    first, second = (make_es("rank").conclude(0, Rewards(v[:, :, :1])).update for v in (values, outlier))
    assert first == second, "one huge reward counts as the best and no more"


def test_no_shaping_follows_the_slopes_as_spsa_does():
    record = make_es("none").conclude(0, Rewards(rewards_of()))
    expected = [RATE * slope / 3 for slope in record.slopes]
    np.testing.assert_allclose([coef for _, coef in record.update.terms], expected, rtol=1e-6)


@pytest.mark.parametrize("shaping", ["zscore", "rank", "none"])
def test_what_a_prompt_adds_to_all_members_changes_nothing(shaping):
    """So nothing has to be centred per prompt."""
    values, added = np.round(rewards_of(), 3), np.array([-3.0, 8.0])[:, None]
    first, second = (make_es(shaping).conclude(0, Rewards(each)).update.terms for each in (values, values + added))
    np.testing.assert_allclose([coef for _, coef in first], [coef for _, coef in second], rtol=1e-6)


@pytest.mark.parametrize("shaping", ["zscore", "rank", "none"])
def test_equal_rewards_move_nothing_but_decay(shaping):
    update = make_es(shaping, decay=0.1).conclude(0, Rewards(np.ones((6, 2, 1)))).update
    assert all(coef == 0 for _, coef in update.terms) and update.keep == np.float32(1 - 0.1 * RATE)


def test_notes_hold_reward_slopes_errors_and_failures():
    values = rewards_of(draws=3)
    method = make_es("zscore", draws=3)
    record = method.conclude(0, Rewards(values, failed=5, tokens=7))
    differences = (values[::2] - values[1::2]).mean(axis=2) / (2 * EPS)
    errors = differences.std(axis=1, ddof=1) / np.sqrt(2)
    expected = {"reward": values.mean(), "slope": np.sqrt(np.mean(np.square(record.slopes)))}
    expected |= {"slope_error": np.sqrt(np.mean(errors**2)), "failed": 5, "tokens": 7}
    assert record.notes == pytest.approx(expected)
    assert method.cost(record) == 6 * 2 * 3, "texts: probes × prompts × draws"
