"""bfloat16 on a GPU: weights equal the torch engine's bit for bit, scores as far as rounding allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mezzo.method.space import Space
from tests.sglang.conftest import PAIR, open_both_engines, spec_of, update, words_batch

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.gpu]
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
SPACES = {"lora": Space("lora", rank=4, alpha=8), "matrices": Space("matrices", noise_rank=4)}


@pytest.fixture(scope="module", params=SPACES)
def engines(request):
    yield from open_both_engines(spec_of(SPACES[request.param], rows=16, device="cuda", dtype="bfloat16"))


def test_same_updates_give_same_digest_as_torch_engine(engines):
    for step in range(20):
        for engine in engines:
            engine.apply([update((100 + step, 1e-3 * (-1) ** step), (200 + step, 5e-4), keep=0.9999)])
    assert engines[0].digest() == engines[1].digest()


def test_sign_differences_match_torch_engine(engines):
    batch = words_batch(16, prefix=tuple(range(100, 140)))
    ours, theirs = (engine.score(batch, PAIR) for engine in engines)
    ours, theirs = (scores - scores.mean(-1, keepdims=True) for scores in (ours, theirs))
    assert np.abs(ours - theirs).max() < 0.25
    assert np.corrcoef((ours[0] - ours[1]).ravel(), (theirs[0] - theirs[1]).ravel())[0, 1] > 0.99


def test_batched_scores_match_single_requests(engines):
    ours, batch = engines[0], words_batch(16)
    batched, single = ours.score(batch, PAIR), ours.score_by_requests(batch, PAIR)
    batched, single = (scores - scores.mean(-1, keepdims=True) for scores in (batched, single))
    assert np.abs(batched - single).max() < 1e-4
