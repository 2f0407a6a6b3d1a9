"""A unit of work gives the same bits whoever computes it: the promise that parallel workers rest on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mezzo.engines.microbatch import candidate_count, group_calls, split_into_units
from mezzo.engines.torch.engine import TorchEngine
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout
from tests.conftest import make_batch, make_llama, make_roberta

PROBES = tuple(Probe(((seed, sign * 1e-2),)) for seed in (3, 4) for sign in (1, -1))


def causal_batch() -> Batch:
    rng = np.random.default_rng(1)
    draw = lambda low, high: tuple(int(t) for t in rng.integers(5, 100, size=rng.integers(low, high)))  # noqa: E731
    prompts = (Prompt(draw(3, 12), 0, candidates=tuple(draw(1, 5) for _ in range(2 + n % 2))) for n in range(7))
    return Batch(tuple(prompts), Readout("candidates"))


CASES = {
    "words": (make_roberta, make_batch(7)),
    "words of a causal model": (make_llama, make_batch(7)),
    "candidates": (make_llama, causal_batch()),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("space", ["lora", "full"])
def test_units_computed_apart_or_together_are_those_of_the_whole_batch(case, space):
    make, batch = CASES[case]
    unit = MicroBatch(rows=3)
    engine = TorchEngine(make(), Space(space), micro_batch=unit, pad_id=1)
    whole = engine.score(batch, PROBES)
    works = split_into_units(batch, len(PROBES), unit)
    assert len(works) == 2 * 3
    for chosen, joined in ((works, False), (works, True), (works[1:2] + works[2:3], True), (works[::2], True)):
        out = np.full((len(PROBES), len(batch), candidate_count(batch)), -np.inf, dtype=np.float32)
        for piece in group_calls(batch, PROBES, chosen, joined):
            found = engine.score(piece.batch, piece.probes)
            for work, _, rows in piece.parts():
                out[work.first : work.last, list(work.places), : found.shape[2]] = found[:, rows]
        for work in chosen:
            at = np.ix_(range(work.first, work.last), work.places)
            assert np.array_equal(out[at], whole[at])
    assert torch.get_num_threads() == 1


def test_units_cover_every_example_at_every_probe_once():
    batch = make_batch(11)
    works = split_into_units(batch, 5, MicroBatch(rows=4))
    seen = [(probe, place) for w in works for probe in range(w.first, w.last) for place in w.places]
    assert sorted(seen) == [(probe, place) for probe in range(5) for place in range(11)]
