"""Encoder layers in few kernels give what plain torch gives: on a GPU, or interpreted (TRITON_INTERPRET=1) on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.weights import flat_buffer
from mezzo.method.space import Space
from mezzo.types import Probe
from tests.conftest import make_batch, make_encoder
from tests.reference import plain_model, plain_scores
from tests.torch_engine.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))
TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
SPACES = {
    "full": Space("full"),
    "biases": Space("*.bias"),
    "matrices-lowrank": Space("matrices", noise_rank=8),
    "lora": Space("lora", rank=8, alpha=8),
    "lora-all": Space("lora", rank=4, alpha=8, targets=("all-linear",)),
}


def make_three_layers(family: str = "Roberta") -> torch.nn.Module:
    """Two layers before the last, which is computed at the readout only; wide enough for joint matrices."""
    return make_encoder(family, hidden_size=128, num_hidden_layers=3, intermediate_size=192)


@pytest.fixture
def layers(monkeypatch) -> list[int]:
    """Every tensor on its own, and a record of the layers that kernels computed."""
    from mezzo.engines.torch.gpu import encoder

    monkeypatch.setattr(flat_buffer, "MAX_SMALL_ELEMENTS", 0)
    found: list[int] = []
    forward = encoder.EncoderLayer.forward

    def counted(self: Any, *args: Any) -> Any:
        found.append(1)
        return forward(self, *args)

    monkeypatch.setattr(encoder.EncoderLayer, "forward", counted)
    return found


def engine_of(model: torch.nn.Module, space: Space, kind: str) -> TorchEngine:
    engine = TorchEngine(model, space, noise_kind=kind, seed=3, pad_id=1, device=DEVICE)
    rng = np.random.default_rng(1)  # LoRA's B starts at zero, which would hide mistakes in A
    engine.load_state({n: (v + rng.normal(0, 0.05, v.shape)).astype(np.float32) for n, v in engine.state().items()})
    return engine


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("lengths", [(4, 20), (16, 17)], ids=["padded", "even"])
def test_scores_equal_a_plain_model_with_perturbed_weights(layers, space, kind, lengths):
    if space.kind == "matrices" and kind == "gaussian":
        pytest.skip("low-rank noise has ±1 factors whatever the kind")
    model, batch = make_three_layers(), make_batch(3, lengths=lengths)
    pristine = copy.deepcopy(model)
    engine = engine_of(model, space, kind)
    layers.clear()
    for pair in (PAIR, (Probe(), Probe())):
        expected = [
            plain_scores(plain_model(pristine, engine.trained, engine.state(), kind, probe, space), batch)
            for probe in pair
        ]
        np.testing.assert_allclose(engine.score(batch, pair), expected, rtol=1e-4, atol=2e-5)
    assert len(layers) == (2 if space.kind == "lora" else 4), "kernels are what is tested"


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta", "Electra"])
def test_other_families(layers, family):
    model, batch = make_three_layers(family), make_batch(3)
    pristine = copy.deepcopy(model)
    engine = engine_of(model, SPACES["full"], "rademacher")
    layers.clear()
    expected = [
        plain_scores(plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, SPACES["full"]), batch)
        for probe in PAIR
    ]
    np.testing.assert_allclose(engine.score(batch, PAIR), expected, rtol=1e-4, atol=2e-5)
    assert len(layers) == 2


def test_stacked_weights_are_saved_and_exported_one_by_one(layers):
    """Query, key and value are views of one tensor, which state and exports do not show."""
    model = make_three_layers()
    pristine = copy.deepcopy(model)
    engine = TorchEngine(model, SPACES["full"], device=DEVICE)
    own = dict(pristine.named_parameters())
    assert {t.name for t in engine.trained} <= set(own)
    for name, value in engine.state().items():
        np.testing.assert_array_equal(value, own[name].detach().numpy())
    for (name, parameter), other in zip(engine.merged_model().named_parameters(), own.values(), strict=True):
        assert torch.equal(parameter.cpu(), other), name


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("length", [5, 32, 64, 100])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_attention_of_short_rows(dtype, length, masked):
    from mezzo.engines.torch.gpu.kernels.encoder import MAX_TOKENS, attend

    if length > MAX_TOKENS[dtype]:
        pytest.skip("left to torch")
    rng = np.random.default_rng(0)
    rows, heads, size = 4, 2, 40
    width = heads * size
    y = torch.from_numpy(rng.normal(size=(rows * length, 3 * width))).to(DEVICE, dtype)
    biases = tuple(torch.from_numpy(rng.normal(size=(2, width))).to(DEVICE, torch.float32) for _ in range(3))
    mask = None
    if masked:
        lengths = torch.tensor([length, 1, length - 1, 3], device=DEVICE)
        mask = (torch.arange(length, device=DEVICE) < lengths[:, None])[:, None, None, :]
    found = attend(y, biases, length, heads, 0.3, members=2, mask=mask)
    member = torch.arange(rows, device=DEVICE) // 2
    wide = y.double().view(rows, length, 3, width) + torch.stack(biases, 1).double()[member][:, None]
    q, k, v = wide.to(dtype).double().view(rows, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    expected = expected.transpose(1, 2).reshape(rows * length, width)
    allowed = 1e-6 if dtype == torch.float32 else 4e-3 if dtype == torch.float16 else 2e-2
    assert (found.double() - expected).norm() < allowed * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("each", [24, 7])
def test_low_rank_terms_beside_a_product(dtype, each):
    """x·V is in the product's last columns; GELU and norm add (x·V)·Uᵀ with each member's scale."""
    from mezzo.engines.torch.gpu.kernels import encoder, lowrank, norms

    rng = np.random.default_rng(0)
    rank, width, scales, factor, rows = 8, 96, (0.02, -0.03), 0.35, 2 * each
    longer, residual = (torch.from_numpy(rng.normal(size=(rows, n))).to(DEVICE, dtype) for n in (width + 16, width))
    up = torch.from_numpy(rng.choice([-1.0, 1.0], size=(width, rank))).to(DEVICE, dtype)
    bias, gain, shift = (torch.from_numpy(rng.normal(size=(2, width))).float().to(DEVICE) for _ in range(3))
    factors = lowrank.Factors(rank, factor, up.view(1, -1), (0,), torch.zeros(1, dtype=torch.int64, device=DEVICE))
    t = longer[:, width : width + rank][None]
    on_device = torch.tensor(scales, device=DEVICE).view(-1, 1)
    term = lowrank.LowRankTerm(t, factors, on_device, transposed_up=up.T.contiguous()[None])
    member = torch.arange(rows, device=DEVICE) // each
    wide = longer.double()
    own = torch.tensor(scales, device=DEVICE).double()[member, None] * factor
    moved = wide[:, :width] + own * (wide[:, width : width + rank] @ up.double().T) + bias.double()[member]
    normed = torch.nn.functional.layer_norm(moved + residual.double(), (width,), eps=1e-5)
    expected = torch.nn.functional.gelu(moved), normed * gain.double()[member] + shift.double()[member]
    found = norms.norm(longer[:, :width], gain, shift, 1e-5, residual, bias, term=term)
    encoder.gelu(longer[:, :width], bias, 2, term)
    allowed = 1e-6 if dtype == torch.float32 else 1e-3
    for one, wanted in zip((longer[:, :width], found), expected, strict=True):
        assert (one.double() - wanted).norm() < allowed * wanted.norm()
    assert torch.equal(longer[:, width:].double(), wide[:, width:]), "what lies beside is left alone"


def test_gelu_in_16_bits():
    from mezzo.engines.torch.gpu.kernels import norms

    values = torch.linspace(-9, 9, 2**14, device=DEVICE).to(torch.float16).view(64, 256)
    none = torch.zeros((1, 256), device=DEVICE)
    found = norms.add_bias(values.clone(), none, gelu=True)
    expected = torch.nn.functional.gelu(values.double())
    assert ((found.double() - expected).abs() <= 3e-7 + expected.abs() * 2.0**-11).all()


def test_plan_of_an_encoder(layers):
    """Kernels for every layer but the last, which is trimmed; the forwards of its modules remain for other points."""
    engine = TorchEngine(make_three_layers(), SPACES["lora"], device=DEVICE)
    lines = {(line.module, line.forward): (line.count, line.reason) for line in engine.plan.lines()}
    assert lines["RobertaLayer", "encoder kernels"] == (2, "")
    assert lines["RobertaLayer", "trimmed last layer"] == (1, "no encoder kernels: it is the last layer")
    assert lines["Linear", "low-rank kernels, else population linear (LoRA)"] == (6, "")


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (Space("lora", rank=3), "attention.self.query: rank 3 is not a power of two up to 32"),
        (Space("*.query.weight"), "some weights of query, key and value are trained densely and some are not"),
        (Space("*.key.bias"), "some biases of query, key and value are trained and some are not"),
        (Space("prefix"), "its attention is 'mezzo_prefix_sdpa'"),
    ],
    ids=["rank", "weights", "biases", "prefix"],
)
def test_plan_says_why_a_layer_has_no_kernels(layers, space, reason):
    engine = TorchEngine(make_three_layers(), space, device=DEVICE)
    lines = [line for line in engine.plan.lines() if (line.module, line.forward) == ("RobertaLayer", "own forward")]
    assert f"no encoder kernels: {reason}" in lines[0].reason
