"""A masked language model on SGLang: this package's own model, read at the mask and trained through SGLang's adapters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mezzo.method.space import Space
from mezzo.types import Batch, Probe, Prompt, Readout
from tests.sglang.conftest import PAIR, distance, open_both_engines, spec_of, tokens, update

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
MODEL = "mezzo/roberta-mini"
SPACES = {
    "lora": Space("lora", rank=4, alpha=8),
    "matrices-tp2": Space("matrices", noise_rank=4),
}


@pytest.fixture(scope="module", params=SPACES)
def engines(request):
    tp = 2 if "tp2" in request.param else 1
    yield from open_both_engines(
        dataclasses.replace(spec_of(SPACES[request.param], tp=tp), model=MODEL, family="masked")
    )


def batch_of(vocabulary: bool = False) -> Batch:
    rng = np.random.default_rng(2)
    prompts = []
    for index in range(11):
        ids = tokens(rng, 4, 40)
        prompts.append(Prompt(ids, label=index % 2, position=int(rng.integers(len(ids)))))
    return Batch(tuple(prompts), Readout("words", words=(300, 900, 41), vocabulary=vocabulary))


@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize("probes", [(Probe(),), PAIR], ids=["base", "pair"])
def test_scores_match_torch_engine(engines, probes, vocabulary):
    ours, reference = engines
    batch = batch_of(vocabulary)
    scores = ours.score(batch, probes)
    assert distance(scores, reference.score(batch, probes)) < 1e-4
    if len(probes) > 1:
        assert np.abs(scores[0] - scores[1]).max() > 1e-3


def test_same_updates_give_same_digest_as_torch_engine(engines):
    ours, reference = engines
    assert ours.base_digest == reference.base_digest and ours.trained == reference.trained
    for step in range(20):
        for engine in engines:
            engine.apply([update((30 + step, 1e-3), keep=0.9999)])
    assert ours.digest() == reference.digest()
    assert distance(ours.score(batch_of(), PAIR), reference.score(batch_of(), PAIR)) < 1e-4


def test_encoder_takes_no_tokens_from_the_cache(engines):
    engines[0].score(batch_of(), PAIR)
    assert engines[0].token_counts.cached == 0
