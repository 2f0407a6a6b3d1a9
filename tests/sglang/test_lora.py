"""LoRA on SGLang in process: both signs are adapters of one batch, written from seeds in the workers."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from mezzo.engines.token_rows import MIN_SHARED_TOKENS
from mezzo.errors import RunFailed
from mezzo.method.space import Space
from mezzo.types import Batch, Generation, MicroBatch, Probe
from tests.sglang.conftest import (
    PAIR,
    candidates_batch,
    distance,
    open_both_engines,
    spec_of,
    tokens,
    update,
    without_internals,
    words_batch,
)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TOLERANCE = 1e-4
MIXED = (Probe(((7, 0.02),)), Probe(), Probe(((9, 0.03), (7, -0.01))))


@pytest.fixture(scope="module")
def engines():
    yield from open_both_engines(spec_of(Space("lora", rank=4, alpha=8)))


BATCHES = {
    "words": words_batch(),
    "vocabulary": words_batch(vocabulary=True),
    "candidates": candidates_batch(),
    "candidates-sum": candidates_batch("sum"),
    "shared-prompts": candidates_batch(low=30, high=50),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("probes", [(Probe(),), PAIR, MIXED], ids=["base", "pair", "mixed"])
def test_scores_match_torch_engine(engines, batch, probes):
    ours, reference = engines
    assert distance(ours.score(batch, probes), reference.score(batch, probes)) < TOLERANCE


def test_perturbation_changes_scores(engines):
    plus, minus = engines[0].score(words_batch(), PAIR)
    assert np.abs(plus - minus).max() > 1e-3


def test_same_updates_give_same_digest_as_torch_engine(engines):
    ours, reference = engines
    assert ours.base_digest == reference.base_digest
    assert ours.trained == reference.trained
    assert ours.digest() == reference.digest()
    state = ours.state()
    for engine in engines:
        engine.apply([update((11, 0.003), (12, -0.001), keep=0.99), update()])
    assert ours.digest() == reference.digest()
    for name, value in ours.state().items():
        np.testing.assert_array_equal(value, reference.state()[name])
    for engine in engines:
        engine.load_state(state)
    assert ours.digest() == reference.digest()


def test_probe_leaves_weights_and_scores_unchanged(engines):
    ours, batch = engines[0], words_batch()
    before = ours.digest(), ours.score(batch, [Probe()])
    ours.score(batch, PAIR)
    assert ours.digest() == before[0]
    np.testing.assert_array_equal(ours.score(batch, [Probe()]), before[1])


@pytest.mark.parametrize("name", ["words", "candidates", "shared-prompts"])
def test_batched_scores_match_single_requests(engines, name):
    ours, batch = engines[0], BATCHES[name]
    assert distance(ours.score_by_requests(batch, PAIR), ours.score(batch, PAIR)) < TOLERANCE


def test_requests_are_used_where_sglang_refuses_built_batches(engines, monkeypatch, capsys):
    ours, reference = engines
    assert ours.builds_batches

    def fail(*_: object) -> None:
        raise RunFailed("SGLang's worker 0 failed: AttributeError: no such pool")

    with monkeypatch.context() as patch:
        patch.setattr(ours, "_score_in_one_call", fail)
        assert not ours._check_built_batches()
        assert "no such pool): using its requests" in capsys.readouterr().err
        patch.setattr(ours, "builds_batches", False)
        assert distance(ours.score(BATCHES["words"], PAIR), reference.score(BATCHES["words"], PAIR)) < TOLERANCE
    assert ours._check_built_batches()


def test_public_interface_gives_the_same_where_internals_fail(engines, capsys):
    ours, reference = engines
    with without_internals(ours):
        assert (
            "Scheduler has no such method. Is mezzo installed beside SGLang?): using its public"
            in capsys.readouterr().err
        )
        assert not ours.describe()["uses_internals"]
        for name in ("words", "candidates"):
            assert distance(ours.score(BATCHES[name], MIXED), reference.score(BATCHES[name], MIXED)) < TOLERANCE
        state = reference.state()
        for engine in engines:
            engine.apply([update((31, 0.01), keep=0.99)])
        assert ours.digest() == reference.digest()
        assert distance(ours.score(BATCHES["words"], PAIR), reference.score(BATCHES["words"], PAIR)) < TOLERANCE
        batch = words_batch(2)
        assert ours.generate(batch, PAIR, Generation(3)) == reference.generate(batch, PAIR, Generation(3))
        reference.load_state(state)
    assert ours.digest() == reference.digest() and ours.describe()["uses_internals"]


def test_slots_that_hold_something_else_are_noticed(engines, monkeypatch, capsys):
    ours, state = engines[0], engines[0].state()
    call = ours.channel.call

    def write_nothing(method, **values):
        return call(method, **values | ({"probes": (Probe(),)} if method == "write_probes" else {}))

    with monkeypatch.context() as patch:
        patch.setattr(ours.channel, "call", write_nothing)
        assert not ours._check_internals()
    assert "adapters that are written in place differ by" in capsys.readouterr().err
    assert ours._check_internals()
    ours.load_state(state)


def test_scores_do_not_depend_on_micro_batches_or_order(engines):
    ours, batch = engines[0], words_batch()
    scores = ours.score(batch, PAIR)
    order = np.random.default_rng(0).permutation(len(batch))
    shuffled = ours.score(Batch(tuple(batch.prompts[i] for i in order), batch.readout), PAIR)
    np.testing.assert_allclose(shuffled, scores[:, order], atol=1e-4)
    micro_batch = ours.micro_batch
    try:
        ours.micro_batch = MicroBatch(rows=3, members=1)
        np.testing.assert_allclose(ours.score(batch, PAIR), scores, atol=1e-4)
    finally:
        ours.micro_batch = micro_batch


def test_evicted_adapters_are_written_again(engines):
    """Other adapters evict mezzo's from SGLang's pool; SGLang would reload the zeros they were loaded with."""
    import torch

    from mezzo.engines.sglang.adapters import adapter_shape

    ours, batch = engines[0], words_batch()
    expected = ours.score(batch, PAIR)
    config = adapter_shape(ours.space, ours.trained).peft_config()
    tensors = {f"base_model.model.{name}": torch.full(value.shape, 0.1) for name, value in ours.state().items()}
    others = [f"other-{index}" for index in range(4)]
    for name in others:
        assert ours.engine.load_lora_adapter_from_tensors(name, tensors, config).success
        ours.engine.generate(
            input_ids=[[5, 6, 7]], sampling_params={"max_new_tokens": 1, "temperature": 0}, lora_path=[name]
        )
    assert not set(ours.channel.call("resident_adapters")) & set(ours.adapters), "they must have been evicted"
    assert distance(ours.score_by_requests(batch, PAIR), expected) < TOLERANCE
    np.testing.assert_array_equal(ours.score(batch, PAIR), expected)
    for name in others:
        assert ours.engine.unload_lora_adapter(name).success


# ---- prefix sharing

DEMONSTRATIONS = tokens(np.random.default_rng(8), 240, 241)


def test_shared_prefix_is_computed_once_per_probe(engines):
    ours, batch = engines[0], words_batch(16, prefix=DEMONSTRATIONS)
    results = {}
    for share in (False, True):
        ours.channel.call("set_min_shared_tokens", count=MIN_SHARED_TOKENS if share else 10**9)
        ours.score(batch, PAIR)
        before, start = ours.token_counts, time.perf_counter()
        results[share] = ours.score(batch, PAIR), time.perf_counter() - start
        cached = ours.token_counts.cached - before.cached
        computed = ours.token_counts.computed - before.computed
        if share:
            # Every prompt of a probe takes the demonstrations from the cache; each probe computed them itself.
            assert cached == 2 * 16 * len(DEMONSTRATIONS)
            assert computed == 2 * (
                len(DEMONSTRATIONS) + sum(_length_read(p) - len(DEMONSTRATIONS) for p in batch.prompts)
            )
        else:
            assert cached == 0
    np.testing.assert_allclose(results[True][0], results[False][0], atol=1e-5)
    assert results[True][1] < 0.7 * results[False][1], "sharing must save time"
    assert ours.describe()["cached_tokens"] > 0


def test_prompt_is_computed_once_for_its_candidates(engines):
    """Each sign computes a prompt once; its candidates take all but its last token from the cache."""
    ours, batch = engines[0], BATCHES["shared-prompts"]
    before, micro_batch = ours.token_counts, ours.micro_batch
    ours.micro_batch = MicroBatch(rows=16)  # one forward: the candidates of a prompt may otherwise be split over two
    ours.score(batch, PAIR)
    ours.micro_batch = micro_batch
    shared = [(len(p.ids) - 1, p.candidates) for p in batch.prompts if len(p.candidates) > 1]
    assert ours.token_counts.cached - before.cached == 2 * sum(
        length * len(candidates) for length, candidates in shared
    )
    total = sum(len(p.ids) + len(candidate) for p in batch.prompts for candidate in p.candidates)
    repeated = sum(length * (len(candidates) - 1) for length, candidates in shared)
    assert ours.token_counts.computed - before.computed == 2 * (total - repeated)


def _length_read(prompt):
    return prompt.position % len(prompt.ids) + 1


def test_cached_tokens_are_not_reused_across_probes_or_steps(engines):
    """The same prompts at other weights: with a stale cache, more tokens would be cached and scores would be wrong."""
    ours, reference = engines
    batch = words_batch(6, prefix=DEMONSTRATIONS)
    counts = []
    state = ours.state()
    for step in range(3):
        before = ours.token_counts.cached
        scores = ours.score(batch, PAIR)
        counts.append(ours.token_counts.cached - before)
        assert distance(scores, reference.score(batch, PAIR)) < TOLERANCE
        for engine in engines:
            engine.apply([update((20 + step, 0.02))])
    assert counts == [2 * 6 * len(DEMONSTRATIONS)] * 3
    before = ours.token_counts.cached
    ours.score(Batch(batch.prompts[:1], batch.readout), PAIR)  # a single example has nothing to share
    assert ours.token_counts.cached == before
    for engine in engines:
        engine.load_state(state)


def test_generated_tokens_match_torch_engine(engines):
    ours, reference = engines
    batch, end = words_batch(3), 2
    generated, expected = (engine.generate(batch, [Probe(), *PAIR], Generation(5)) for engine in (ours, reference))
    pairs = [(a, b) for x, y in zip(generated, expected, strict=True) for (a,), (b,) in zip(x, y, strict=True)]
    assert len(pairs) == 9
    for a, b in pairs:
        stop = b.index(end) if end in b else len(b)
        assert a[:stop] == b[:stop]


def test_plugin_adds_one_method_to_the_scheduler_and_changes_none(engines):
    """SGLang loads it wherever mezzo is installed, so it must be inert."""
    from sglang.srt.managers.scheduler import Scheduler

    from mezzo.engines.sglang.inprocess.channel import METHOD
    from mezzo.engines.sglang.inprocess.plugin import register

    before = {name: value for name, value in vars(Scheduler).items() if name != METHOD}
    register()
    assert vars(Scheduler).keys() == before.keys() | {METHOD}
    assert all(vars(Scheduler)[name] is value for name, value in before.items())


def test_description_is_json_with_version_and_ranks(engines):
    description = engines[0].describe()
    json.dumps(description)
    assert description["engine"] == "sglang" and description["sglang"].startswith("0.5.") and description["tp"] == 1
