"""On a GPU: prefixes, the frozen cache, classification heads and quantised bases give what they give on a CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from mezzo.engines.torch.engine import TorchEngine
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Readout, Update
from tests.conftest import make_batch, make_llama, make_roberta
from tests.torch_engine.test_families import FAMILIES, make

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

PAIR = (Probe(((7, 0.05),)), Probe(((7, -0.05),)))
UPDATES = [Update(((11, 2.0**-9),), keep=1 - 2.0**-10), Update(((12, -(2.0**-8)), (13, 2.0**-9)))]
SPACES = {
    "prefix": Space("prefix", tokens=3),
    "upper-prefix": Space("prefix", tokens=3, layers="1:"),
    "upper-full": Space("full", layers="1:"),
    "upper-lora": Space("lora", rank=4, layers="1:"),
    "upper-lowrank": Space("matrices", layers="1:", noise_rank=8),
}
MAKERS = {"roberta": make_roberta, "llama": make_llama, "gpt2": lambda: make(*FAMILIES["gpt2"])}


@pytest.mark.parametrize("cache_mb", [0, 1], ids=["whole", "cached"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("family", MAKERS)
def test_scores_and_weights_are_those_of_a_cpu(family, space, cache_mb):
    """Scores to float32's precision before and after updates, weights to the bit."""
    model, batch = MAKERS[family](), make_batch(6)
    engines = [
        TorchEngine(
            copy.deepcopy(model), space, micro_batch=MicroBatch(3), seed=3, pad_id=1, device=device, cache_mb=cache_mb
        )
        for device in ("cpu", "cuda")
    ]
    rng = np.random.default_rng(1)
    state = {n: (v + rng.normal(0, 0.05, v.shape)).astype(np.float32) for n, v in engines[0].state().items()}
    for engine in engines:
        assert (engine.frozen_cache is not None) == bool(cache_mb and space.layers)
        engine.load_state(state)
        engine.check(batch, 1e-2)
    for _ in range(3):  # launched one by one, captured, replayed
        expected, found = (engine.score(batch, PAIR) for engine in engines)
        assert np.abs(expected[0] - expected[1]).max() > 1e-3
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
        for engine in engines:
            engine.apply(UPDATES)
    assert engines[0].digest() == engines[1].digest()


def test_a_classification_head():
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=66, type_vocab_size=1, num_labels=3,
    )  # fmt: skip
    model = RobertaForSequenceClassification(config).eval()
    batch = Batch(make_batch(5).prompts, Readout("head", classes=3))
    engines = [TorchEngine(copy.deepcopy(model), Space("full"), pad_id=1, device=d) for d in ("cpu", "cuda")]
    for _ in range(3):
        expected, found = (engine.score(batch, PAIR) for engine in engines)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_a_quantised_base_stays_packed_and_follows_its_adapter(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    from mezzo.engines.torch import quantized
    from mezzo.engines.torch.loading import load_model

    make_roberta().save_pretrained(tmp_path)
    device = torch.device("cuda")
    model = load_model(str(tmp_path), "masked", quantize=quantized.loading_options(kind, device))
    engine = TorchEngine(model, Space("lora", rank=4), pad_id=1, device=device)
    batch = make_batch(6)
    engine.check(batch, 1e-2)
    before = engine.score(batch, PAIR)
    engine.apply(UPDATES)
    after = engine.score(batch, PAIR)
    assert np.abs(after - before).max() > 1e-4
    assert {p.dtype for p in engine.model.parameters() if p.ndim == 2} & {torch.int8, torch.uint8}
