"""Space `matrices` in process, on one rank and on two: probes are adapters, updates are written in place."""

from __future__ import annotations

import numpy as np
import pytest

from mezzo.method import noise
from mezzo.method.space import Space
from mezzo.types import Probe
from tests.sglang.conftest import (
    PAIR,
    candidates_batch,
    distance,
    open_both_engines,
    spec_of,
    update,
    without_internals,
    words_batch,
)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engines(request):
    yield from open_both_engines(spec_of(Space("matrices", noise_rank=4), tp=request.param))


def test_same_updates_give_same_digest_as_torch_engine(engines):
    """Fifty steps with decay: the fused and split weights of all ranks, assembled, equal the torch engine's."""
    ours, reference = engines
    initial = ours.state()
    updates = [
        update((noise.step_seed(1, step, 0), 1e-3 * (-1) ** step), keep=1 - 1e-5 * (step % 3)) for step in range(50)
    ]
    for each in updates:
        ours.apply([each])
    reference.apply(updates)
    assert ours.digest() == reference.digest()
    assert ours.base_digest == reference.base_digest
    state = ours.state()
    assert any((state[name] != initial[name]).all() for name in initial)
    for engine in engines:
        engine.load_state(initial)
    assert ours.digest() == reference.digest()


@pytest.mark.parametrize("batch", [words_batch(), candidates_batch()], ids=["words", "candidates"])
@pytest.mark.parametrize("probes", [(Probe(),), PAIR], ids=["base", "pair"])
def test_scores_match_torch_engine(engines, batch, probes):
    ours, reference = engines
    assert distance(ours.score(batch, probes), reference.score(batch, probes)) < 1e-4


def test_scores_change_with_an_update(engines):
    ours, reference = engines
    before, state = ours.score(words_batch(), [Probe()]), ours.state()
    for engine in engines:
        engine.apply([update((3, 0.01))])
    after = ours.score(words_batch(), [Probe()])
    assert np.abs(after - before).max() > 1e-3
    assert distance(after, reference.score(words_batch(), [Probe()])) < 1e-4
    for engine in engines:
        engine.load_state(state)


def test_probe_leaves_weights_and_scores_unchanged(engines):
    ours, batch = engines[0], words_batch()
    before = ours.digest(), ours.score(batch, [Probe()])
    ours.score(batch, PAIR)
    assert ours.digest() == before[0]
    np.testing.assert_array_equal(ours.score(batch, [Probe()]), before[1])


def test_public_interface_gives_the_same_where_internals_fail(engines, capsys):
    ours, reference = engines
    state = reference.state()
    with without_internals(ours):
        assert "using its public interface" in capsys.readouterr().err
        for _ in range(2):
            for probes in ((Probe(),), PAIR):
                batch = words_batch()
                assert distance(ours.score(batch, probes), reference.score(batch, probes)) < 1e-4
            for engine in engines:
                engine.apply([update((41, 1e-3), keep=0.999)])
        assert ours.digest() == reference.digest()
    reference.load_state(state)
    assert ours.digest() == reference.digest()
    assert distance(ours.score(batch, PAIR), reference.score(batch, PAIR)) < 1e-4
