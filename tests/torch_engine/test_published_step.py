"""The published step is the published algorithm bit for bit, and the engine follows it when given the same directions."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from mezzo.bench import published_step
from mezzo.engines.torch.engine import TorchEngine
from mezzo.method.estimators import Spsa
from mezzo.method.objectives import cross_entropy
from mezzo.method.optimizers import Sgd
from mezzo.method.space import Space
from mezzo.types import Batch, Probe
from tests.conftest import make_batch, make_roberta

STEPS, EPS, LR = 20, 1e-3, 1e-4


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy over the label words at the mask, in plain torch, padded as a collator would."""
    longest = max(len(p.ids) for p in batch.prompts)
    ids = torch.tensor([list(p.ids) + [1] * (longest - len(p.ids)) for p in batch.prompts])
    logits = model(input_ids=ids, attention_mask=(ids != 1).long()).logits
    picked = logits[torch.arange(len(ids)), torch.tensor([p.position for p in batch.prompts])][
        :, list(batch.readout.words)
    ]
    return torch.nn.functional.cross_entropy(picked, torch.tensor(batch.labels))


def published(model: torch.nn.Module, batches: list[Batch], decay: float) -> list[tuple[float, float, float]]:
    """The released step, written from its description: redraw from the seed, four passes, in place."""
    np.random.seed(42)
    seen = []
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for batch in batches:
        seed = np.random.randint(1000000000)

        def move(scale: int, seed: int = seed) -> None:
            torch.manual_seed(seed)
            for _, p in named:
                z = torch.normal(mean=0, std=1, size=p.data.size(), device=p.data.device, dtype=p.data.dtype)
                p.data = p.data + scale * z * EPS

        with torch.no_grad():
            move(1)
            loss1 = loss_of(model, batch)
            move(-2)
            loss2 = loss_of(model, batch)
            g = ((loss1 - loss2) / (2 * EPS)).item()
            move(1)
            torch.manual_seed(seed)
            for _, p in named:
                z = torch.normal(mean=0, std=1, size=p.data.size(), device=p.data.device, dtype=p.data.dtype)
                p.data = p.data - LR * (g * z + decay * p.data)
        seen.append((loss1.item(), loss2.item(), g))
    return seen


@pytest.fixture
def batches() -> list[Batch]:
    return [make_batch(8, seed=step) for step in range(STEPS)]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_published_step_equals_its_description_bit_for_bit(batches, decay):
    one, two = make_roberta(), make_roberta()
    expected = published(one, batches, decay)
    np.random.seed(42)
    steps = [
        published_step.step(
            two, lambda b=batch: loss_of(two, b), seed=np.random.randint(1000000000), eps=EPS, lr=LR, weight_decay=decay
        )
        for batch in batches
    ]
    assert [(s.loss_plus, s.loss_minus, s.slope) for s in steps] == expected
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), make_roberta().parameters(), strict=True))


class PublishedNoise:
    """The published directions behind the engine's interface, so that both move along the same ones."""

    kind = "rademacher"

    def __init__(self, model: torch.nn.Module) -> None:
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.device = torch.device("cpu")
        self.drawn: dict[int, dict[str, torch.Tensor]] = {}

    def on(self, device: torch.device) -> PublishedNoise:
        return self

    def z(self, seed: int, name: str) -> torch.Tensor:
        if seed not in self.drawn:
            torch.manual_seed(seed)
            self.drawn = {seed: {n: torch.normal(mean=0, std=1, size=s) for n, s in self.shapes.items()}}
        return self.drawn[seed][name]

    def dense(self, seed: int, name: str, count: int, start: int, stop: int) -> torch.Tensor:
        return self.z(seed, name).flatten()[start:stop].clone()

    def rows(self, seed: int, name: str, shape: object, ids: torch.Tensor) -> torch.Tensor:
        return self.z(seed, name)[ids]

    def packed(self, seed: int, name: str, count: int) -> torch.Tensor:
        flat = self.z(seed, name).flatten()
        return torch.nn.functional.pad(flat, (0, -len(flat) % 64))

    def flat_packed_bits(self, seed: int, tensors: list[tuple[str, int]]) -> torch.Tensor:
        return torch.cat([self.packed(seed, *tensor) for tensor in tensors])

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.clone()

    def clear_cache(self) -> None:
        pass


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_engine_follows_the_published_step(batches, decay):
    model = make_roberta()
    engine = TorchEngine(copy.deepcopy(model), Space("full"))
    engine.population.ops.source = PublishedNoise(model)
    optimizer = Sgd(lambda _: LR, decay)
    np.random.seed(42)
    for batch in batches:
        seed = np.random.randint(1000000000)
        probes = (Probe(((seed, EPS),)), Probe(((seed, -EPS),)))
        losses = cross_entropy(engine.score(batch, probes), batch)
        slopes = Spsa(0, EPS).tell(probes, losses)
        step = published_step.step(
            model, lambda b=batch: loss_of(model, b), seed=seed, eps=EPS, lr=LR, weight_decay=decay
        )
        np.testing.assert_allclose(losses, [step.loss_plus, step.loss_minus], rtol=1e-5)
        assert slopes[0].value == pytest.approx(step.slope, rel=0.02, abs=1e-3)
        engine.apply([optimizer.update(slopes, 0)])
    state = engine.state()
    # What is left is the recipe's own drift: +ε, −2ε, +ε in place rounds each weight three times a step.
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(state[name], parameter.detach().numpy(), rtol=1e-6, atol=1e-6, err_msg=name)
