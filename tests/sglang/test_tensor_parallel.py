"""LoRA on two ranks: the same noise, weights and scores as on one."""

from __future__ import annotations

import numpy as np
import pytest

from mezzo.method.estimators import Spsa
from mezzo.method.objectives import get_objective
from mezzo.method.space import Space
from mezzo.types import Generation, Probe
from tests.sglang.conftest import EPS, PAIR, candidates_batch, distance, open_both_engines, spec_of, update, words_batch

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
# Projections that are split by rows (q, k, v, gate, up) and by columns (o, down).
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def engines():
    yield from open_both_engines(spec_of(Space("lora", rank=4, alpha=8, targets=PROJECTIONS), tp=2))


@pytest.mark.parametrize("batch", [words_batch(), candidates_batch()], ids=["words", "candidates"])
@pytest.mark.parametrize("probes", [(Probe(),), PAIR], ids=["base", "pair"])
def test_scores_match_torch_engine(engines, batch, probes):
    ours, reference = engines
    assert distance(ours.score(batch, probes), reference.score(batch, probes)) < 1e-4


def test_same_update_gives_same_digest_as_torch_engine(engines):
    ours, reference = engines
    for engine in engines:
        engine.apply([update((4, 0.01), keep=0.99)])
    assert ours.digest() == reference.digest()
    assert distance(ours.score(words_batch(), PAIR), reference.score(words_batch(), PAIR)) < 1e-4
    assert ours.describe()["tp"] == 2


def test_two_ranks_write_what_the_torch_engine_writes(engines):
    asked = (words_batch(4), [Probe(), *PAIR, Probe(((4, 0.05),))], Generation(5, stop_ids=(323,)))
    texts = engines[0].generate(*asked)
    assert texts == engines[1].generate(*asked)
    assert texts[0] != texts[3], "members write with their own adapters"


def test_two_ranks_find_the_slopes_of_one_over_200_steps(engines):
    """At each step, two ranks find the slope that the torch engine finds; at the end the weights are bit for bit the same."""
    ours, reference = engines
    estimator, objective = Spsa(1, EPS, 1), get_objective("cross_entropy")
    slopes = []
    for number in range(200):
        batch, probes = words_batch(4, seed=number), estimator.ask(number)
        pair = [estimator.tell(probes, objective.losses(e.score(batch, probes), batch))[0] for e in engines]
        slopes.append([slope.value for slope in pair])
        for engine in engines:
            engine.apply([update((pair[0].seed, 1e-4 * pair[0].value))])
    theirs = np.array(slopes)[:, 1]
    assert np.abs(np.array(slopes)[:, 0] - theirs).max() <= 1e-3 * np.sqrt(np.mean(theirs**2))
    assert ours.digest() == reference.digest()


def test_all_ranks_hold_the_same_factors(engines):
    """LoRA factors are replicated; if noise were drawn per rank, they would diverge."""
    first, second = engines[0].channel.call_all("state")
    assert [p.name for p in first] == [p.name for p in second]
    assert all((a.values == b.values).all() for a, b in zip(first, second, strict=True))
