"""16-bit weights: empty steps change nothing, small steps are not lost, and training follows float32."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.weights import reference_ops
from mezzo.method import rounding
from mezzo.method.estimators import Spsa
from mezzo.method.objectives import cross_entropy
from mezzo.method.optimizers import Sgd
from mezzo.method.space import Space
from mezzo.types import Batch, Probe, Prompt, Readout
from tests.conftest import make_batch, make_llama, make_roberta, scale_up_weights
from tests.reference import plain_scores

EPS = 1e-2


def make_engine(dtype: str, space: Space | None = None) -> TorchEngine:
    return TorchEngine(make_roberta().to(getattr(torch, dtype)), space or Space("full"))


def make_tiny_engine(dtype: str) -> TorchEngine:
    """One layer, for thousands of steps."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = RobertaConfig(vocab_size=120, max_position_embeddings=16, type_vocab_size=1, **sizes)
    return TorchEngine(scale_up_weights(RobertaForMaskedLM(config)).to(getattr(torch, dtype)), Space("full"))


def make_learnable_batch(count: int) -> Batch:
    """Short prompts whose label depends on one token, read at that token."""
    rng = np.random.default_rng(0)
    prompts = []
    for index in range(count):
        ids = [int(token) for token in rng.integers(20, 120, size=5)]
        ids[2] = (11, 12, 13, 14)[index % 4]
        prompts.append(Prompt(tuple(ids), label=index % 2, position=2))
    return Batch(tuple(prompts), Readout("words", words=(11, 47)))


def loss_curve(engine: TorchEngine, batch: Batch, steps: int, lr: float) -> np.ndarray:
    """Training losses, the mean of both signs, averaged over a tenth of the run at a time."""
    estimator, optimizer = Spsa(seed=5, eps=EPS), Sgd(lambda _: lr)
    losses = []
    for step in range(steps):
        probes = estimator.ask(step)
        values = cross_entropy(engine.score(batch, probes), batch)
        engine.apply([optimizer.update(estimator.tell(probes, values), step)])
        losses.append(values.mean())
    return np.array(losses).reshape(10, -1).mean(axis=1)


@pytest.mark.parametrize("dtype", rounding.DTYPES)
def test_a_thousand_steps_with_a_rate_of_zero_change_nothing(dtype):
    engine, batch = make_tiny_engine(dtype), make_batch(2, lengths=(4, 6))
    estimator, optimizer = Spsa(seed=1, eps=EPS), Sgd(lambda _: 0.0)
    before = engine.digest()
    for step in range(1000):
        probes = estimator.ask(step)
        slopes = estimator.tell(probes, cross_entropy(engine.score(batch, probes), batch))
        assert slopes[0].value != 0.0
        update = optimizer.update(slopes, step)
        engine.apply([update])
        engine.population.apply(update)  # `apply` skips an empty update; its rounding changes nothing either
    assert engine.digest() == before


@pytest.mark.slow
def test_two_thousand_small_steps_follow_float32_but_not_with_rounding_to_nearest(monkeypatch):
    """Steps are far smaller than half the distance of neighbouring weights: rounded to nearest, they are lost."""
    batch, steps, lr = make_learnable_batch(4), 2000, 3e-6
    exact = loss_curve(make_tiny_engine("float32"), batch, steps, lr)
    learned = exact[0] - exact[-1]
    assert learned > 0.03, exact

    def distance(dtype: str) -> float:
        """Largest distance from the float32 curve, as a share of what float32 learned."""
        return float(np.abs(loss_curve(make_tiny_engine(dtype), batch, steps, lr) - exact).max() / learned)

    for dtype in rounding.DTYPES:
        assert distance(dtype) < 0.2, dtype
    monkeypatch.setattr(reference_ops, "store_rounded", lambda target, values, random: target.copy_(values))
    for dtype in rounding.DTYPES:
        assert distance(dtype) > 0.4, dtype


@pytest.mark.parametrize("dtype", rounding.DTYPES)
def test_tensors_of_the_model_are_stored_in_16_bits_and_lora_factors_are_not(dtype):
    """Tensors of the model keep its dtype; LoRA factors are float32, as PEFT trains them."""
    short = getattr(torch, dtype)
    full = make_engine(dtype)
    assert {full.population.value(t.name).dtype for t in full.trained} == {short}
    assert {p.dtype for p in full.model.parameters()} == {short}
    lora = make_engine(dtype, Space("lora"))
    assert {lora.population.value(t.name).dtype for t in lora.trained} == {torch.float32}


@pytest.mark.parametrize("dtype", rounding.DTYPES)
@pytest.mark.parametrize("space", [Space("full"), Space("lora"), Space("matrices", noise_rank=4)], ids=lambda s: s.kind)
def test_state_digest_and_merged_model_agree(dtype, space):
    pristine = make_llama().to(getattr(torch, dtype))
    engine, twin = (TorchEngine(copy.deepcopy(pristine), space) for _ in range(2))
    batch = make_batch()
    loss_curve(engine, batch, 10, 1e-3)
    twin.load_state(engine.state())
    assert twin.digest() == engine.digest() != TorchEngine(copy.deepcopy(pristine), space).digest()
    np.testing.assert_array_equal(twin.score(batch, [Probe()]), engine.score(batch, [Probe()]))
    merged = engine.merged_model()
    assert {p.dtype for p in merged.parameters()} == {getattr(torch, dtype)}
    allowed = 1e-5 if space.kind != "lora" else 0.2  # merging rounds W + B·A to what the model stores
    np.testing.assert_allclose(
        plain_scores(merged.float(), batch), engine.score(batch, [Probe()])[0], atol=allowed, rtol=allowed
    )


def test_a_small_perturbation_changes_gains_near_one():
    """In bfloat16 the neighbours of 1 are 4e-3 and 8e-3 away: vectors must be perturbed in float32."""
    engine = make_engine("bfloat16", Space("*LayerNorm.weight"))
    batch = make_batch()
    plus, minus = engine.score(batch, [Probe(((1, 1e-4),)), Probe(((1, -1e-4),))])
    assert np.abs(plus - minus).max() > 1e-5
