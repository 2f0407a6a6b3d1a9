"""LoRA on SGLang: both signs are adapters of one batch, written from seeds in the workers; all of it equals the torch engine."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from mezzo.method.space import Space
from mezzo.types import Batch, Probe
from tests.sglang.conftest import (
    PAIR,
    UPDATES,
    both,
    candidates_batch,
    distance,
    spec_of,
    tokens,
    update,
    words_batch,
)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TOLERANCE = 1e-4
MIXED = (Probe(((7, 0.02),)), Probe(), Probe(((9, 0.03), (7, -0.01))))


@pytest.fixture(scope="module")
def engines():
    yield from both(spec_of(Space("lora", rank=4, alpha=8)))


BATCHES = {
    "words": words_batch(),
    "vocabulary": words_batch(vocabulary=True),
    "candidates": candidates_batch(),
    "candidates-sum": candidates_batch("sum"),
    "shared-prompts": candidates_batch(low=30, high=50),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("probes", [(Probe(),), PAIR, MIXED], ids=["base", "pair", "mixed"])
def test_scores_equal_the_torch_engine(engines, batch, probes):
    ours, reference = engines
    assert distance(ours.score(batch, probes), reference.score(batch, probes)) < TOLERANCE


def test_the_perturbation_reaches_the_serving_weights(engines):
    plus, minus = engines[0].score(words_batch(), PAIR)
    assert np.abs(plus - minus).max() > 1e-3


def test_same_journal_same_bits(engines):
    ours, reference = engines
    assert ours.base_digest == reference.base_digest
    assert ours.trained == reference.trained
    assert ours.digest() == reference.digest()
    kept = ours.state()
    for engine in engines:
        engine.apply([update((11, 0.003), (12, -0.001), keep=0.99), update()])
    assert ours.digest() == reference.digest()
    for name, value in ours.state().items():
        np.testing.assert_array_equal(value, reference.state()[name])
    for engine in engines:
        engine.load_state(kept)
    assert ours.digest() == reference.digest()


def test_a_probe_leaves_no_trace(engines):
    ours, batch = engines[0], words_batch()
    before = ours.digest(), ours.score(batch, [Probe()])
    ours.score(batch, PAIR)
    assert ours.digest() == before[0]
    np.testing.assert_array_equal(ours.score(batch, [Probe()]), before[1])


@pytest.mark.parametrize("name", ["words", "candidates", "shared-prompts"])
def test_one_call_equals_a_request_for_each(engines, name):
    ours, batch = engines[0], BATCHES[name]
    assert distance(ours.score_by_requests(batch, PAIR), ours.score(batch, PAIR)) < TOLERANCE


def test_micro_batches_and_order_do_not_matter(engines):
    ours, batch = engines[0], words_batch()
    scores = ours.score(batch, PAIR)
    order = np.random.default_rng(0).permutation(len(batch))
    shuffled = ours.score(Batch(tuple(batch.prompts[i] for i in order), batch.readout), PAIR)
    np.testing.assert_allclose(shuffled, scores[:, order], atol=1e-4)
    kept = ours.micro_batch
    try:
        ours.micro_batch = type(kept)(rows=3, members=1)
        np.testing.assert_allclose(ours.score(batch, PAIR), scores, atol=1e-4)
    finally:
        ours.micro_batch = kept


def test_evicted_adapters_come_back_right(engines):
    """Other adapters push mezzo's out of SGLang's pool; SGLang would reload the zeros they were loaded with."""
    import torch

    from mezzo.engines.sglang.inprocess.launch import adapter_of

    ours, batch = engines[0], words_batch()
    expected = ours.score(batch, PAIR)
    adapter = adapter_of(ours.spec, ours.trained)
    tensors = {f"base_model.model.{name}": torch.full(value.shape, 0.1) for name, value in ours.state().items()}
    others = [f"other-{index}" for index in range(4)]
    for name in others:
        assert ours.engine.load_lora_adapter_from_tensors(name, tensors, adapter.config()).success
        ours.engine.generate(
            input_ids=[[5, 6, 7]], sampling_params={"max_new_tokens": 1, "temperature": 0}, lora_path=[name]
        )
    assert not set(ours.residents()) & set(ours.adapters), "the pool must have been filled by the others"
    assert distance(ours.score_by_requests(batch, PAIR), expected) < TOLERANCE
    np.testing.assert_array_equal(ours.score(batch, PAIR), expected)
    for name in others:
        assert ours.engine.unload_lora_adapter(name).success


# ---- RadixAttention, exactly

DEMONSTRATIONS = tokens(np.random.default_rng(8), 240, 241)


def test_a_shared_prefix_is_computed_once_a_probe(engines):
    ours, batch = engines[0], words_batch(16, prefix=DEMONSTRATIONS)
    taken = {}
    for share in (False, True):
        ours.share_prefixes = share
        ours.score(batch, PAIR)
        before, began = (ours.count.cached, ours.count.computed), time.perf_counter()
        taken[share] = ours.score(batch, PAIR), time.perf_counter() - began
        cached, computed = ours.count.cached - before[0], ours.count.computed - before[1]
        if share:
            # Every prompt of a probe takes the demonstrations from the cache; each probe computed them itself.
            assert cached == 2 * 16 * len(DEMONSTRATIONS)
            assert computed == 2 * (len(DEMONSTRATIONS) + sum(_read(p) - len(DEMONSTRATIONS) for p in batch.prompts))
        else:
            assert cached == 0
    np.testing.assert_allclose(taken[True][0], taken[False][0], atol=1e-5)
    assert taken[True][1] < 0.7 * taken[False][1], "sharing must save time"
    assert ours.describe()["cached_tokens"] > 0


def test_candidates_of_a_prompt_share_it(engines):
    """Each sign computes a prompt once; all of its candidates take it from the cache, but for the token they are read after."""
    ours, batch = engines[0], BATCHES["shared-prompts"]
    before, kept = (ours.count.cached, ours.count.computed), ours.micro_batch
    ours.micro_batch = type(kept)(
        rows=16, members=2
    )  # all in one forward: a unit may begin in the middle of a prompt's candidates
    ours.score(batch, PAIR)
    ours.micro_batch = kept
    shared = [(len(p.ids) - 1, p.candidates) for p in batch.prompts if len(p.candidates) > 1]
    assert ours.count.cached - before[0] == 2 * sum(length * len(candidates) for length, candidates in shared)
    whole = sum(len(p.ids) + len(candidate) for p in batch.prompts for candidate in p.candidates)
    again = sum(length * (len(candidates) - 1) for length, candidates in shared)
    assert ours.count.computed - before[1] == 2 * (whole - again)


def _read(prompt):
    return prompt.position % len(prompt.ids) + 1


def test_no_cached_token_crosses_a_probe_or_a_step(engines):
    """The same prompts again, at other weights: were anything kept, more tokens would be cached and scores be stale."""
    ours, reference = engines
    batch = words_batch(6, prefix=DEMONSTRATIONS)
    counts = []
    kept = ours.state()
    for step in range(3):
        before = ours.count.cached
        scores = ours.score(batch, PAIR)
        counts.append(ours.count.cached - before)
        assert distance(scores, reference.score(batch, PAIR)) < TOLERANCE
        for engine in engines:
            engine.apply([update((20 + step, 0.02))])
    assert counts == [2 * 6 * len(DEMONSTRATIONS)] * 3
    single = ours.count.cached
    ours.score(Batch(batch.prompts[:1], batch.readout), PAIR)  # one example a probe shares with nobody
    assert ours.count.cached == single
    for engine in engines:
        engine.load_state(kept)


def test_generated_tokens_equal_the_torch_engine(engines):
    ours, reference = engines
    batch, end = words_batch(3), 2
    found, expected = (engine.generate(batch, [Probe(), *PAIR], 5) for engine in (ours, reference))
    pairs = [(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)]
    assert len(pairs) == 9
    for a, b in pairs:
        stop = b.index(end) if end in b else len(b)
        assert a[:stop] == b[:stop]


def test_the_plugin_adds_one_method_and_changes_nothing_else(engines):
    """Loaded by SGLang wherever mezzo is installed, it must be inert there."""
    from sglang.srt.managers.scheduler import Scheduler

    from mezzo.engines.sglang.inprocess.channel import METHOD
    from mezzo.engines.sglang.inprocess.plugin import register

    before = {name: value for name, value in vars(Scheduler).items() if name != METHOD}
    register()
    assert vars(Scheduler).keys() == before.keys() | {METHOD}
    assert all(vars(Scheduler)[name] is value for name, value in before.items())


def test_the_engine_describes_itself(engines):
    found = engines[0].describe()
    json.dumps(found)
    assert found["engine"] == "sglang" and found["sglang"].startswith("0.5.") and found["tp"] == 1
    assert UPDATES
