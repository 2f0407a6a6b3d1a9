"""Layers in host memory, copied to the device when they run: the same scores, adapters and exports."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mezzo
from mezzo.engines.torch.engine import TorchEngine
from mezzo.errors import ConfigError, SpaceError
from mezzo.method.space import Space
from mezzo.types import Generation, Probe, Update
from tests.conftest import make_batch, make_llama, make_roberta

PAIR = (Probe(((7, 1e-2),)), Probe(((7, -1e-2),)))


@pytest.mark.parametrize("make", [make_roberta, make_llama])
@pytest.mark.parametrize("space", [Space("lora", rank=2), Space("prefix"), Space("lora", rank=2, layers="1:")])
def test_offloaded_layers_compute_the_same(make, space):
    plain, offloaded = (TorchEngine(make(), space, offload=offload, cache_mb=1) for offload in (False, True))
    batch = make_batch(6)
    for engine in (plain, offloaded):
        engine.check(batch, 1e-2)
        engine.apply([Update(((5, 0.03125),))])
    np.testing.assert_array_equal(offloaded.score(batch, PAIR), plain.score(batch, PAIR))
    assert offloaded.digest() == plain.digest() and offloaded.base_digest == plain.base_digest
    stream = offloaded.layer_stream
    assert len(stream.slots) == 2 and stream.held != [None, None]
    for layer, host in zip(stream.parameters, stream.host, strict=True):
        assert all(p.data_ptr() == h.data_ptr() for p, h in zip(layer, host, strict=True)), "afterwards all are at home"
    if make is make_llama:
        assert offloaded.generate(batch, PAIR, Generation(3)) == plain.generate(batch, PAIR, Generation(3))
    if space.kind == "lora":
        pairs = zip(*(e.merged_model().named_parameters() for e in (offloaded, plain)), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
        assert np.isfinite(offloaded.score(batch, PAIR)).all(), "and it goes on"


def test_base_weights_cannot_be_trained_in_host_memory(tiny_run, tmp_path):
    with pytest.raises(SpaceError, match="lora or prefix"):
        TorchEngine(make_llama(), Space("full"), offload=True)
    with pytest.raises(ConfigError, match=r"with --offload: it goes with --space lora or prefix, not 'full'"):
        mezzo.finetune(**{**tiny_run, "space": "full"}, offload=True)
    run = mezzo.finetune(**tiny_run, steps=2, offload=True, out=str(tmp_path / "run"))
    assert mezzo.verify(run.out).ok
