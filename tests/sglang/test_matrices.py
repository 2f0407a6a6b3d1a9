"""Space `matrices` with low-rank noise, whole and split over two ranks: probes are adapters, updates are written in place."""

from __future__ import annotations

import numpy as np
import pytest

from mezzo.method import noise
from mezzo.method.space import Space
from mezzo.types import Probe
from tests.sglang.conftest import PAIR, UPDATES, both, candidates_batch, distance, spec_of, update, words_batch

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engines(request):
    yield from both(spec_of(Space("matrices", noise_rank=4), tp=request.param))


def test_weights_equal_the_rebuild_bit_for_bit(engines):
    """Fifty steps of a journal, with decay: the fused and split weights of every rank, put together, are torch's."""
    ours, reference = engines
    kept = ours.state()
    steps = [
        update((noise.step_seed(1, step, 0), 1e-3 * (-1) ** step), keep=1 - 1e-5 * (step % 3)) for step in range(50)
    ]
    for step in steps:
        ours.apply([step])
    reference.apply(steps)
    assert ours.digest() == reference.digest()
    assert ours.base_digest == reference.base_digest
    moved = ours.state()
    assert any((moved[name] != kept[name]).all() for name in kept)
    for engine in engines:
        engine.load_state(kept)
    assert ours.digest() == reference.digest()


@pytest.mark.parametrize("batch", [words_batch(), candidates_batch()], ids=["words", "candidates"])
@pytest.mark.parametrize("probes", [(Probe(),), PAIR], ids=["base", "pair"])
def test_scores_equal_the_torch_engine(engines, batch, probes):
    ours, reference = engines
    assert distance(ours.score(batch, probes), reference.score(batch, probes)) < 1e-4


def test_scores_follow_an_update(engines):
    ours, reference = engines
    before, kept = ours.score(words_batch(), [Probe()]), ours.state()
    for engine in engines:
        engine.apply([update((3, 0.01))])
    after = ours.score(words_batch(), [Probe()])
    assert np.abs(after - before).max() > 1e-3
    assert distance(after, reference.score(words_batch(), [Probe()])) < 1e-4
    for engine in engines:
        engine.load_state(kept)


def test_a_probe_leaves_the_base_untouched(engines):
    ours, batch = engines[0], words_batch()
    before = ours.digest(), ours.score(batch, [Probe()])
    ours.score(batch, PAIR)
    assert ours.digest() == before[0]
    np.testing.assert_array_equal(ours.score(batch, [Probe()]), before[1])
    assert UPDATES
