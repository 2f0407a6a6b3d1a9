"""The last layer at the readout only: the same scores as the whole layer, from fewer positions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mezzo.engines.torch.engine import TorchEngine
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout
from tests.conftest import VOCAB, make_batch, scale_up_weights
from tests.reference import plain_model
from tests.torch_engine.test_families import DECODER, SMALL

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SMALL, "type_vocab_size": 2}),
    "roberta": ("Roberta", {**SMALL, "max_position_embeddings": 66}),
    "xlm-roberta": ("XLMRoberta", {**SMALL, "max_position_embeddings": 66}),
    "electra": ("Electra", {**SMALL, "embedding_size": 16}),
    "llama": ("Llama", DECODER),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 6}),
    "qwen2": ("Qwen2", {k: v for k, v in DECODER.items() if k != "head_dim"}),
    "qwen3": ("Qwen3", DECODER),
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "electra")
PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))


def make(name: str, head: str = "", **extra: Any) -> torch.nn.Module:
    family, options = FAMILIES[name]
    torch.manual_seed(0)
    kind = getattr(transformers, family + (head or ("ForMaskedLM" if name in ENCODERS else "ForCausalLM")))
    return scale_up_weights(kind(kind.config_class(**options, **extra)))


def both(engine: TorchEngine, batch: Batch) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Scores with and without trimming, and how many positions the last layer's feed-forward computed each time."""
    seen: list[int] = []
    layers = dict(engine.model.named_modules())
    last = [n for n in layers if n.endswith((".intermediate.dense", ".mlp.up_proj"))][-1]
    hook = layers[last].register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1]))
    found = []
    for engine.forward.trim_last_layer in (True, False):
        found.append(engine.score(batch, PAIR))
    hook.remove()
    return found[0], found[1], seen[0], seen[-1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "unit", [MicroBatch(8), MicroBatch(3), MicroBatch(8, pad_to=8)], ids=["one", "parts", "padded"]
)
@pytest.mark.parametrize("space", [Space("full"), Space("lora", rank=2, targets=("all-linear",))], ids=["full", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_equal_those_of_the_whole_layer(name, space, unit, attention):
    engine = TorchEngine(make(name, attn_implementation=attention), space, micro_batch=unit, pad_id=1)
    batch = make_batch(8)
    trimmed, whole, few, all_of_them = both(engine, batch)
    np.testing.assert_allclose(trimmed, whole, rtol=1e-5, atol=1e-5)
    assert (few, all_of_them > 1) == (1, True), "fewer positions are computed"
    assert np.abs(trimmed[0] - trimmed[1]).max() > 1e-3


@pytest.mark.parametrize("name", ENCODERS)
def test_classification_head_reads_the_first_token(name):
    model = make(name, "ForSequenceClassification", num_labels=3)
    pristine = copy.deepcopy(model)
    engine = TorchEngine(model, Space("full"), micro_batch=MicroBatch(4), pad_id=1)
    batch = Batch(make_batch(6).prompts, Readout("head", classes=3))
    trimmed, whole, few, _ = both(engine, batch)
    np.testing.assert_allclose(trimmed, whole, rtol=1e-5, atol=1e-5)
    assert few == 1
    for index, probe in enumerate(PAIR):
        twin = plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, engine.space)
        with torch.no_grad():
            expected = [twin(input_ids=torch.tensor([p.ids])).logits[0].numpy() for p in batch.prompts]
        np.testing.assert_allclose(trimmed[index], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ENCODERS])
def test_candidates_read_several_positions(name, shared):
    rng = np.random.default_rng(3)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(5, VOCAB, size=rng.integers(low, high)))

    prompts = tuple(Prompt(tokens(6, 14), label=0, candidates=(tokens(1, 5), tokens(2, 4))) for _ in range(5))
    engine = TorchEngine(make(name), Space("full"), micro_batch=MicroBatch(3), pad_id=1)
    engine.share_prompts = shared
    trimmed, whole, few, all_of_them = both(engine, Batch(prompts, Readout("candidates")))
    np.testing.assert_allclose(trimmed, whole, rtol=1e-5, atol=1e-5)
    assert few < all_of_them


def test_last_layer_of_other_models_is_not_trimmed():
    torch.manual_seed(0)
    options = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = scale_up_weights(transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)))
    engine = TorchEngine(model, Space("full"))
    assert "forward" not in vars(engine.model.transformer.h[-1])
