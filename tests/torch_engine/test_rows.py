"""How a batch becomes padded rows: with little padding, and as a pure function of the batch."""

from __future__ import annotations

import numpy as np

from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.forward.inputs import make_rows
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout
from tests.conftest import make_batch, make_roberta

PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))


def batch_of(*lengths: int) -> Batch:
    return Batch(tuple(Prompt((9,) * n, label=0, position=1) for n in lengths), Readout("words", words=(11, 47)))


def test_micro_batch_with_much_padding_is_halved():
    shapes = [tuple(rows.ids.shape) for rows in make_rows(batch_of(4, 5, 20, 19), MicroBatch(4, waste=0.1), 1)]
    assert shapes == [(2, 5), (2, 20)]
    assert [len(r.ids) for r in make_rows(batch_of(18, 19, 20, 19), MicroBatch(4, waste=0.1), 1)] == [4]
    assert [len(r.ids) for r in make_rows(batch_of(4, 5, 20, 19), MicroBatch(4), 1)] == [4]


def test_every_row_belongs_to_its_example():
    batch = make_batch(13, lengths=(3, 40))
    groups = make_rows(batch, MicroBatch(5, waste=0.05, pad_to=4), 1)
    places = [int(example) for rows in groups for example in rows.places[0]]
    assert sorted(places) == list(range(13))
    for rows in groups:
        assert rows.has_padding == bool((rows.mask == 0).any())
        for ids, mask, example in zip(rows.ids, rows.mask, rows.places[0], strict=True):
            assert tuple(ids[mask.bool()].tolist()) == batch.prompts[example].ids


def test_rows_that_were_kept_are_used_for_the_same_batch_only():
    engine = TorchEngine(make_roberta(), Space("lora", rank=2), micro_batch=MicroBatch(4), pad_id=1)
    batches = make_batch(6, seed=1), make_batch(6, seed=2)
    expected = [engine.score(batch, PAIR) for batch in batches]
    for number in (0, 1):
        engine.padded_rows(batches[0])
        np.testing.assert_array_equal(engine.score(batches[number], PAIR), expected[number])
