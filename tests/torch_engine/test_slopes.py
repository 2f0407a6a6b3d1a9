"""Slopes are directional derivatives, and their average converges to the gradient at the rate theory gives."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from mezzo.engines.torch.engine import TorchEngine
from mezzo.method.estimators import Spsa
from mezzo.method.objectives import cross_entropy
from mezzo.method.space import Space
from tests.conftest import make_batch, make_llama, make_roberta
from tests.reference import z_of
from tests.torch_engine.test_published_step import loss_of


def gradient(model: torch.nn.Module, names: list[str], batch) -> dict[str, np.ndarray]:
    """Autograd's gradient of the same loss, on an ordinary copy of the model."""
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    for name in names:
        parameters[name].requires_grad_(True)
    loss_of(twin, batch).backward()
    return {name: parameters[name].grad.numpy().astype(np.float64) for name in names}


@pytest.mark.parametrize("make", [make_roberta, make_llama])
@pytest.mark.parametrize(
    "space", [Space("full"), Space("matrices"), Space("matrices", noise_rank=4)], ids=["full", "matrices", "lowrank"]
)
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_slopes_agree_with_autograd(make, space, kind):
    pristine, batch = make(), make_batch(8)
    engine = TorchEngine(copy.deepcopy(pristine), space, noise_kind=kind)
    grads = gradient(pristine, [t.name for t in engine.trained], batch)
    estimator = Spsa(seed=1, eps=1e-3, samples=8)
    probes = estimator.ask(0)
    slopes = estimator.tell(probes, cross_entropy(engine.score(batch, probes), batch))
    expected = [sum((grads[t.name] * z_of(t, kind, s.seed)).sum() for t in engine.trained) for s in slopes]
    scale = np.sqrt(np.mean(np.square(expected)))
    np.testing.assert_allclose([s.value for s in slopes], expected, rtol=0.01, atol=0.01 * scale)


@pytest.mark.parametrize("make", [make_roberta, make_llama])
def test_lora_slopes_agree_with_autograd(make):
    pristine, batch, space = make(), make_batch(8), Space("lora", rank=4, alpha=8)
    engine = TorchEngine(copy.deepcopy(pristine), space)
    rng = np.random.default_rng(0)
    engine.load_state({n: rng.normal(0, 0.1, v.shape).astype(np.float32) for n, v in engine.state().items()})
    factors = {name: torch.tensor(value, requires_grad=True) for name, value in engine.state().items()}
    weights = {}
    for name, parameter in pristine.named_parameters():
        down = name.replace(".weight", ".lora_A.weight")
        if down in factors:
            weights[name] = (
                parameter.detach() + space.scaling * factors[down.replace("lora_A", "lora_B")] @ factors[down]
            )

    def adapted(**inputs):
        return torch.func.functional_call(pristine, weights, (), inputs)

    loss_of(adapted, batch).backward()
    estimator = Spsa(seed=1, eps=1e-3, samples=8)
    probes = estimator.ask(0)
    slopes = estimator.tell(probes, cross_entropy(engine.score(batch, probes), batch))
    grads = {name: tensor.grad.numpy().astype(np.float64) for name, tensor in factors.items()}
    expected = [sum((grads[t.name] * z_of(t, "rademacher", s.seed)).sum() for t in engine.trained) for s in slopes]
    scale = np.sqrt(np.mean(np.square(expected)))
    np.testing.assert_allclose([s.value for s in slopes], expected, rtol=0.01, atol=0.01 * scale)


def test_average_slope_converges_to_the_gradient():
    """With d values and n directions, the cosine to the gradient is √(n/(n+d))."""
    pristine, batch = make_roberta(), make_batch(4, lengths=(4, 8))
    space = Space("*layer.1.*bias")
    engine = TorchEngine(copy.deepcopy(pristine), space)
    grads = gradient(pristine, [t.name for t in engine.trained], batch)
    d = sum(g.size for g in grads.values())
    assert d <= 2000
    n = 5 * d
    estimator = Spsa(seed=2, eps=1e-2, samples=1)
    total = {t.name: np.zeros(t.shape) for t in engine.trained}
    for step in range(n):
        probes = estimator.ask(step)
        (slope,) = estimator.tell(probes, cross_entropy(engine.score(batch, probes), batch))
        for t in engine.trained:
            total[t.name] += slope.value * z_of(t, "rademacher", slope.seed)
        engine.population.source.clear_cache()
    a = np.concatenate([total[name].ravel() for name in grads])
    b = np.concatenate([grads[name].ravel() for name in grads])
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert cosine == pytest.approx(np.sqrt(n / (n + d)), abs=0.03)
