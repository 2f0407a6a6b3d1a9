"""LoRA on vLLM: probes are adapters of one call, and their slots are written in place."""

from __future__ import annotations

import numpy as np
import pytest

from mezzo.method.space import Space
from mezzo.types import Batch, Generation, Probe
from tests.sglang.conftest import PAIR, candidates_batch, distance, spec_of, tokens, update, words_batch
from tests.vllm.conftest import open_both_engines

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
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
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("probes", [PAIR, MIXED], ids=["pair", "mixed"])
def test_scores_match_torch_engine(engines, batch, probes):
    ours, reference = engines
    assert distance(ours.score(batch, probes), reference.score(batch, probes)) < TOLERANCE


def test_directions_are_adapters_of_one_call(engines):
    """As many as there are adapters; one more is another call."""
    ours, reference = engines
    batch, calls, generate = words_batch(4), [], ours.llm.generate
    ours.llm.generate = lambda prompts, *args, **options: (
        calls.append(len(prompts)) or generate(prompts, *args, **options)
    )
    try:
        probes = tuple(Probe(((seed, 0.02),)) for seed in range(17))
        assert distance(ours.score(batch, probes), reference.score(batch, probes)) < TOLERANCE
    finally:
        del ours.llm.generate
    assert calls == [16 * 4, 4]


def test_shared_prompts_are_cached_within_a_probe_and_never_across(engines):
    """The same prompts at other weights: with a stale cache, more tokens would be cached and scores would be wrong."""
    ours, reference = engines
    batch, state, counts = words_batch(6, prefix=tokens(np.random.default_rng(8), 240, 241)), ours.state(), []
    for step in range(2):
        before = ours.token_counts.cached
        assert distance(ours.score(batch, PAIR), reference.score(batch, PAIR)) < TOLERANCE
        counts.append(ours.token_counts.cached - before)
        for engine in engines:
            engine.apply([update((20 + step, 0.02))])
    assert counts[0] == counts[1] > 0
    assert ours.describe()["cached_tokens"] > 0
    before = ours.token_counts.cached
    ours.score(Batch(batch.prompts[:1], batch.readout), PAIR)  # a single example has nothing to share
    assert ours.token_counts.cached == before
    for engine in engines:
        engine.load_state(state)
    assert ours.digest() == reference.digest()


def test_generated_texts_match_torch_engine(engines):
    generated, expected = (each.generate(words_batch(3), [Probe(), *PAIR], Generation(5)) for each in engines)
    assert generated == expected


def test_dropped_adapter_is_noticed(engines):
    """vLLM would load it again from a folder that is gone, or another adapter would have its slot."""
    from mezzo.errors import RunFailed

    ours = engines[0]
    slots = ours.slots.manager.lora_index_to_id
    kept, slots[0] = slots[0], 99
    try:
        with pytest.raises(RunFailed, match="dropped an adapter"):
            ours.score(words_batch(2), PAIR)
    finally:
        slots[0] = kept


def test_the_process_keeps_its_settings(engines):
    import os

    import torch

    assert torch.set_num_threads.__name__ == "set_num_threads"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
