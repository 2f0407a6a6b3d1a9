"""How a batch is laid out for forwards: little padding, a pure function of the batch, and ready before it is asked for."""

from __future__ import annotations

import numpy as np

from mezzo.engines.base import Foresighted
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.forward.inputs import pack
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Question, Readout
from tests.conftest import make_batch, make_roberta

PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))


def batch_of(*lengths: int) -> Batch:
    return Batch(tuple(Prompt((9,) * n, label=0, position=1) for n in lengths), Readout("words", words=(11, 47)))


def test_units_that_would_be_mostly_padding_are_halved():
    shapes = [tuple(rows.ids.shape) for rows in pack(batch_of(4, 5, 20, 19), MicroBatch(4, waste=0.1), 1)]
    assert shapes == [(2, 5), (2, 20)]
    assert [len(r.ids) for r in pack(batch_of(18, 19, 20, 19), MicroBatch(4, waste=0.1), 1)] == [4]
    assert [len(r.ids) for r in pack(batch_of(4, 5, 20, 19), MicroBatch(4), 1)] == [4]


def test_every_row_comes_back_to_its_example():
    batch = make_batch(13, lengths=(3, 40))
    groups = pack(batch, MicroBatch(5, waste=0.05, pad_to=4), 1)
    places = [int(example) for rows in groups for example in rows.places[0]]
    assert sorted(places) == list(range(13))
    for rows in groups:
        assert rows.padded == bool((rows.mask == 0).any())
        for ids, mask, example in zip(rows.ids, rows.mask, rows.places[0], strict=True):
            assert tuple(ids[mask.bool()].tolist()) == batch.prompts[example].ids


def test_a_batch_laid_out_ahead_is_used_only_for_itself():
    engine = TorchEngine(make_roberta(), Space("lora", rank=2), micro_batch=MicroBatch(4), pad_id=1)
    assert isinstance(engine, Foresighted)
    batches = make_batch(6, seed=1), make_batch(6, seed=2)
    expected = [engine.score(batch, PAIR) for batch in batches]
    for asked in (0, 1):
        engine.expect(lambda: Question(batches[0], PAIR))
        engine.prepare_expected()
        np.testing.assert_array_equal(engine.score(batches[asked], PAIR), expected[asked])
