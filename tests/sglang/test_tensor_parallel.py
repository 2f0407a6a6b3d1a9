"""LoRA split over two ranks: the same noise, the same weights, the same scores as on one."""

from __future__ import annotations

import numpy as np
import pytest

from mezzo.method.estimators import Spsa
from mezzo.method.objectives import get_objective
from mezzo.method.space import Space
from mezzo.types import Probe
from tests.sglang.conftest import EPS, PAIR, both, candidates_batch, distance, spec_of, update, words_batch

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
# Projections that are split by rows (q, k, v, gate, up) and by columns (o, down).
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def engines():
    yield from both(spec_of(Space("lora", rank=4, alpha=8, targets=EVERY), tp=2))


@pytest.mark.parametrize("batch", [words_batch(), candidates_batch()], ids=["words", "candidates"])
@pytest.mark.parametrize("probes", [(Probe(),), PAIR], ids=["base", "pair"])
def test_scores_equal_the_torch_engine(engines, batch, probes):
    ours, reference = engines
    assert distance(ours.score(batch, probes), reference.score(batch, probes)) < 1e-4


def test_weights_stay_equal(engines):
    ours, reference = engines
    for engine in engines:
        engine.apply([update((4, 0.01), keep=0.99)])
    assert ours.digest() == reference.digest()
    assert distance(ours.score(words_batch(), PAIR), reference.score(words_batch(), PAIR)) < 1e-4
    assert ours.describe()["tp"] == 2


def test_both_follow_the_same_journal(engines):
    """Two hundred steps: at each, two ranks find the slope that one finds, and at the end the weights are the same bits."""
    ours, reference = engines
    estimator, objective = Spsa(1, EPS, 1), get_objective("cross_entropy")
    slopes = []
    for number in range(200):
        batch, probes = words_batch(4, seed=number), estimator.ask(number)
        found = [estimator.tell(probes, objective.losses(e.score(batch, probes), batch))[0] for e in engines]
        slopes.append([slope.value for slope in found])
        for engine in engines:
            engine.apply([update((found[0].seed, 1e-4 * found[0].value))])
    theirs = np.array(slopes)[:, 1]
    assert np.abs(np.array(slopes)[:, 0] - theirs).max() <= 1e-3 * np.sqrt(np.mean(theirs**2))
    assert ours.digest() == reference.digest()


def test_every_rank_holds_the_same_factors(engines):
    """LoRA's factors are replicated: were noise drawn per rank, they would drift apart."""
    first, second = engines[0].channel.call_all("state")
    assert [p.name for p in first] == [p.name for p in second]
    assert all((a.values == b.values).all() for a, b in zip(first, second, strict=True))
