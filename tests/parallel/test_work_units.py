"""A work unit gives the same bits whoever computes it: parallel workers rely on it."""

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
def test_units_scored_alone_or_merged_equal_the_whole_batch(case, space):
    make_model, batch = CASES[case]
    micro_batch = MicroBatch(rows=3)
    engine = TorchEngine(make_model(), Space(space), micro_batch=micro_batch, pad_id=1)
    expected = engine.score(batch, PROBES)
    units = split_into_units(batch, len(PROBES), micro_batch)
    assert len(units) == 2 * 3
    for some, merge in ((units, False), (units, True), (units[1:2] + units[2:3], True), (units[::2], True)):
        out = np.full((len(PROBES), len(batch), candidate_count(batch)), -np.inf, dtype=np.float32)
        for call in group_calls(batch, PROBES, some, merge):
            scores = engine.score(call.batch, call.probes)
            for unit, _, rows in call.split():
                probes = slice(unit.probe_start, unit.probe_stop)
                out[probes, list(unit.example_indices), : scores.shape[2]] = scores[:, rows]
        for unit in some:
            index = np.ix_(range(unit.probe_start, unit.probe_stop), unit.example_indices)
            assert np.array_equal(out[index], expected[index])
    assert torch.get_num_threads() == 1


def test_units_cover_every_example_at_every_probe_once():
    batch = make_batch(11)
    units = split_into_units(batch, 5, MicroBatch(rows=4))
    pairs = [
        (probe, index) for u in units for probe in range(u.probe_start, u.probe_stop) for index in u.example_indices
    ]
    assert sorted(pairs) == [(probe, index) for probe in range(5) for index in range(11)]
