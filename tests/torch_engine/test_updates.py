"""Updates to the last bit: the engine leaves what the contract says, written down here in NumPy."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch

from mezzo.config import RunConfig
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.weights import flat_buffer, reference_ops
from mezzo.errors import SpaceError
from mezzo.method import noise, rounding
from mezzo.method.space import USUAL_NOISE_RANK, Space
from mezzo.types import Probe, TrainedTensor, Update
from tests.conftest import make_batch, make_llama, make_roberta
from tests.reference import plain_model, plain_scores

SPACES = {
    "full": Space("full", decay="matrices"),
    "full-lowrank": Space("full", noise_rank=3),
    "matrices": Space("matrices"),
    "lora": Space("lora", rank=4),
    "head": Space("head"),
}


@pytest.fixture(params=[64 * 1024, 0], ids=["flat", "one-by-one"])
def small(request, monkeypatch):
    """Tensors in the flat buffer, and on their own."""
    monkeypatch.setattr(flat_buffer, "MAX_SMALL_ELEMENTS", request.param)


def update_in_numpy(
    value: np.ndarray, trained: TrainedTensor, kind: noise.Kind, update: Update, dtype: str = "float32"
) -> np.ndarray:
    """acc = fl(θ·keep); for each term acc = fl(acc − fl(c·z)); all in float32, rounded once to the stored dtype."""
    acc = value.astype(np.float32)
    if trained.decay and update.keep != 1.0:
        acc = acc * np.float32(update.keep)
    for seed, coef in update.terms:
        if coef == 0.0:
            continue
        if trained.rank:
            left, right = noise.factors(seed, trained.name, trained.shape, trained.rank)
            z = left @ right.T
            c = np.float32(np.float32(coef) * np.float32(1 / np.sqrt(trained.rank)))
        else:
            z = noise.dense(kind, seed, trained.name, 0, value.size).reshape(value.shape)
            c = np.float32(coef)
        acc = acc - c * z
    if dtype == "float32" or "lora" in trained.kind:
        return acc
    bits = rounding.random_bits(rounding.first_seed(update), trained.name, 0, value.size)
    return rounding.to_float32(rounding.round_stochastic(acc.ravel(), bits, dtype), dtype).reshape(value.shape)


@pytest.mark.parametrize("dtype", ["float32", *rounding.DTYPES])
@pytest.mark.parametrize("kind", noise.KINDS)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_updates_are_exact(space, kind, small, dtype, monkeypatch):
    monkeypatch.setattr(reference_ops, "CPU_CHUNK_ELEMENTS", 640)  # the seams between chunks must not show
    engine = TorchEngine(make_roberta().to(getattr(torch, dtype)), space, noise_kind=kind)
    rng = np.random.default_rng(0)
    state = engine.state()
    for _ in range(5):
        terms = tuple((int(rng.integers(2**63)), float(np.float32(rng.normal() * 1e-2))) for _ in range(2))
        update = Update((*terms, (3, 0.0)), keep=float(np.float32(1 - 1e-3)))
        engine.apply([update])
        state = {t.name: update_in_numpy(state[t.name], t, kind, update, dtype) for t in engine.trained}
    found = engine.state()
    for name, expected in state.items():
        np.testing.assert_array_equal(found[name].view(np.uint32), expected.view(np.uint32), err_msg=name)


def test_subnormal_steps_are_not_flushed_to_zero():
    engine = TorchEngine(make_roberta(), Space("lora", rank=4))
    tiny = float(np.float32(1e-40))
    engine.apply([Update(((1, tiny),))])
    b = next(t for t in engine.trained if t.kind == "lora_B")
    assert set(np.abs(engine.state()[b.name]).ravel().tolist()) == {tiny}


def test_minus_zero_is_unchanged():
    engine = TorchEngine(make_roberta(), Space("lora", rank=4))
    engine.load_state({name: np.full_like(value, -0.0) for name, value in engine.state().items()})
    before = engine.digest()
    engine.apply([Update(((1, 0.0), (2, -0.0)))])
    assert engine.digest() == before


@pytest.mark.parametrize("make", [make_roberta, make_llama])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_large_tensors_are_perturbed_like_those_in_the_flat_buffer(make, space, monkeypatch):
    """By way of scratch memory and gathered rows."""
    monkeypatch.setattr(flat_buffer, "MAX_SMALL_ELEMENTS", 0)
    if make is make_llama and space.kind == "head":
        pytest.skip("Llama's head is tied to its embeddings")
    model = make()
    pristine, batch = copy.deepcopy(model), make_batch()
    engine = TorchEngine(model, space)
    probes = (Probe(((5, 0.02),)), Probe(((5, -0.02),)))
    scores = engine.score(batch, probes)
    for index, probe in enumerate(probes):
        expected = plain_scores(
            plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, space), batch
        )
        np.testing.assert_allclose(scores[index], expected, rtol=1e-5, atol=1e-5)


def test_a_space_that_cannot_learn_is_refused():
    batch = make_batch()
    engine = TorchEngine(make_roberta(), Space("lora", only=("*lora_A*",)))
    with pytest.raises(SpaceError, match="A alone changes nothing while B is zero"):
        engine.check(batch, 1e-3)
    with pytest.raises(SpaceError, match="match"):
        TorchEngine(make_roberta(), Space("lora", only=("*no_such_name*",)))
    with pytest.raises(SpaceError, match="selects no tensor"):
        TorchEngine(make_roberta(), Space("*no_such_name*"))
    with pytest.raises(SpaceError, match="match no linear layer"):
        TorchEngine(make_roberta(), Space("lora", targets=("q_proj",)))
    TorchEngine(make_roberta(), Space("lora", only=("*lora_B*",))).check(batch, 1e-3)


def test_a_noise_rank_that_fits_no_matrix_is_refused():
    with pytest.raises(SpaceError, match="noise of rank 100000 fits no trained matrix; lower --noise-rank below 32"):
        TorchEngine(make_roberta(), Space("matrices", noise_rank=100_000))
    with pytest.raises(SpaceError, match="fits no trained matrix"):
        TorchEngine(make_roberta(), Space("matrices", noise_rank=32))
    some = TorchEngine(make_roberta(intermediate_size=16), Space("matrices", noise_rank=20)).trained
    assert {t.rank for t in some} == {0, 20}, "matrices narrower than the rank keep dense noise"
    TorchEngine(make_roberta(), Space("*.bias", noise_rank=100_000))  # no matrix, nothing to fit
    TorchEngine(make_roberta(), Space("lora", noise_rank=100_000))  # whose noise is dense
    usual = RunConfig().noise_rank
    assert usual == USUAL_NOISE_RANK
    narrow = TorchEngine(make_roberta(hidden_size=8), Space("matrices", noise_rank=usual))
    assert {t.rank for t in narrow.trained} == {0}, "the default rank is never refused"


def test_the_self_check_names_a_module_that_differs(monkeypatch):
    engine = TorchEngine(make_roberta(), Space("full"))
    broken = engine.model.roberta.encoder.layer[1].output.dense
    kept = broken.forward
    broken.forward = lambda x: kept(x) * (1.01 if engine.population.members else 1)
    from mezzo.errors import ModelError

    with pytest.raises(ModelError, match=r"first in roberta\.encoder\.layer\.1\.output\.dense; try another --space"):
        engine.check(make_batch(), 1e-2)


def test_the_self_check_names_a_module_beside_norms_inside_a_vmap():
    """Trained norms of a Llama run inside a vmap, whose tensors must not be kept."""
    from mezzo.errors import ModelError

    engine = TorchEngine(make_llama(), Space("full"))
    broken = engine.model.model.layers[1].mlp.up_proj
    kept = broken.forward
    broken.forward = lambda x: kept(x) * (1.01 if engine.population.members else 1)
    cache, graphs = engine.frozen_cache, engine.graphs
    with pytest.raises(ModelError, match=r"first in model\.layers\.1\.mlp\.up_proj; try another --space"):
        engine.check(make_batch(), 1e-2)
    assert engine.forward.trim_last_layer and (engine.frozen_cache, engine.graphs) == (cache, graphs), "as they were"


def test_a_merged_model_holds_no_reference_to_the_engine():
    """An engine holds graphs and events, which cannot be copied."""
    engine = TorchEngine(make_roberta(), Space("lora", rank=2))
    engine.apply([Update(((7, 2.0**-6),))])
    engine.held = threading.Lock()  # it can be copied as little as a CUDA event
    twin = engine.merged_model()
    assert not any(
        getattr(hook, "__self__", None) is engine for m in twin.modules() for hook in m._forward_hooks.values()
    )
    batch = make_batch(3)
    np.testing.assert_allclose(plain_scores(twin, batch), engine.score(batch, (Probe(),))[0], rtol=1e-4, atol=1e-5)
