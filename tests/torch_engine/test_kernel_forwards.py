"""Kernels and graphs give what plain torch gives: on a GPU, or interpreted (TRITON_INTERPRET=1, without graphs) on a CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.weights import flat_buffer
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Question, Readout, Update
from tests.conftest import MODELS, VOCAB, make_batch, make_llama, make_roberta
from tests.reference import plain_model, plain_scores
from tests.torch_engine.test_families import DECODER, make
from tests.torch_engine.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")

SPACES = {
    "full": Space("full"),
    "full-lowrank": Space("full", noise_rank=3),
    "matrices-lowrank": Space("matrices", noise_rank=8),
    "lora": Space("lora", rank=4, alpha=8),
    "lora-all": Space("lora", rank=8, alpha=8, targets=("all-linear",)),
}
PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))


@pytest.fixture(params=[64 * 1024, 0], ids=["flat", "one-by-one"])
def small(request, monkeypatch):
    """Tensors in the flat buffer, and each on its own."""
    monkeypatch.setattr(flat_buffer, "MAX_SMALL_ELEMENTS", request.param)


def engine_of(model: torch.nn.Module, space: Space, kind: str = "rademacher", **extra) -> TorchEngine:
    engine = TorchEngine(model, space, noise_kind=kind, seed=3, pad_id=1, device=DEVICE, **extra)
    assert engine.population.ops.uses_kernels, "kernels are what is tested"
    rng = np.random.default_rng(1)  # LoRA's B starts at zero, which would hide mistakes in A
    engine.load_state({n: (v + rng.normal(0, 0.05, v.shape)).astype(np.float32) for n, v in engine.state().items()})
    return engine


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_scores_equal_a_plain_model_with_perturbed_weights(make, space, kind, small):
    model = make()
    pristine, batch = copy.deepcopy(model), make_batch(4)
    engine = engine_of(model, space, kind)
    expected = [
        plain_scores(plain_model(pristine, engine.trained, engine.state(), kind, probe, space), batch) for probe in PAIR
    ]
    for _ in range(1 if INTERPRETED else 3):  # as it comes, captured, replayed
        np.testing.assert_allclose(engine.score(batch, PAIR), expected, rtol=1e-4, atol=2e-5)
    engine.check(batch, 1e-2)


QWEN2 = {**DECODER, "num_key_value_heads": 4}
del QWEN2["head_dim"]


@pytest.mark.parametrize("space", ["lora-all", "matrices-lowrank"])
@pytest.mark.parametrize(("kind", "options"), [("Llama", DECODER), ("Qwen2", QWEN2), ("Mistral", DECODER)])
def test_no_low_rank_product_is_computed_twice(kind, options, space, monkeypatch):
    """Layers with inputs of equal width that differ (`o_proj` beside query, key and value), with biases or not."""
    from mezzo.engines.torch.gpu.lowrank_layers import LowRankGroup

    computed: list[tuple[str, int]] = []
    real = LowRankGroup._compute

    def counted(self, first, rows):
        computed.extend((layer.path, rows.shape[1]) for layer in self.layers[first:])
        return real(self, first, rows)

    monkeypatch.setattr(LowRankGroup, "_compute", counted)
    model = make(f"{kind}ForCausalLM", options)
    pristine, batch = copy.deepcopy(model), make_batch(4)
    engine = engine_of(model, SPACES[space])
    found = engine.score(batch, PAIR)
    assert len(computed) >= 7 * 2
    assert len(set(computed)) == len(computed), "nothing twice from equally many positions"
    expected = [
        plain_scores(plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, SPACES[space]), batch)
        for probe in PAIR
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_embedding_rows_have_the_noise_of_the_whole_table(kind):
    from mezzo.engines.torch.forward.probe_point import words_on
    from mezzo.engines.torch.gpu.kernels.noise_buffer import perturb_rows
    from mezzo.method import noise

    rng = np.random.default_rng(0)
    table = rng.normal(size=(50, 192)).astype(np.float32)
    ids, seed = np.array([[3, 49, 0], [3, 7, 7]]), 2**63 + 11
    key, bits = words_on(DEVICE, [noise.name_hash("w")]), words_on(DEVICE, [seed])
    scales = torch.tensor([0.1, -0.1, 0.03], device=DEVICE)
    tensors = (torch.from_numpy(values).to(DEVICE) for values in (table, ids))
    found = perturb_rows(*tensors, key, bits, scales, kind).cpu().numpy()
    z = noise.dense(kind, seed, "w", 0, table.size).reshape(table.shape)
    expected = [(table + scale * z)[ids] for scale in scales.tolist()]
    np.testing.assert_allclose(found, np.array(expected, dtype=np.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("inner", [96, 1040], ids=["whole", "in-pieces"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "low-rank"])
def test_low_rank_products_equal_float64(lora, dtype, inner):
    from mezzo.engines.torch.gpu.kernels import lowrank

    rng = np.random.default_rng(0)
    members, rows, outer, rank, modules = 2, 40, 160, 8, 2
    x, scales, factor = rng.normal(size=(members * rows, inner)), (1e-2, -1e-2), 2.0

    def signs(*shape: int) -> np.ndarray:
        return rng.choice([-1.0, 1.0], size=shape)

    down, up = (rng.normal(size=size) * 0.03 for size in ((modules, rank, inner), (modules, outer, rank)))
    down_z, up_z = signs(modules, rank, inner), signs(modules, outer, rank)
    if not lora:
        down, up = 0 * down, 0 * up
    flat = torch.from_numpy(np.concatenate([down.ravel(), up.ravel()])).float()
    laid = down_z if lora else down_z.transpose(0, 2, 1)
    z = torch.from_numpy(np.concatenate([laid.ravel(), up_z.ravel()])).to(dtype)
    high = flat.to(dtype)
    parts = (torch.stack([high, (flat - high.float()).to(dtype), z]) if lora else z[None]).to(DEVICE)
    at = torch.arange(modules, device=DEVICE)
    bias = torch.from_numpy(rng.normal(size=(modules, outer))).to(DEVICE, dtype)
    given = torch.from_numpy(x).to(DEVICE, dtype)
    places = tuple(rank * inner * number for number in range(modules))
    factors = lowrank.Factors(rank, factor, parts, places, modules * rank * inner + at * outer * rank)
    on_device = torch.tensor(scales, device=DEVICE)
    t = lowrank.project_down(given, factors, on_device)
    y = torch.empty((modules, members * rows, outer), device=DEVICE, dtype=dtype)
    lowrank.project_up(y, lowrank.LowRankTerm(t, factors, on_device), bias)
    exact = given.double().cpu().numpy().reshape(members, rows, inner)
    for module in range(modules):
        for member, scale in enumerate(scales):
            own = (up[module] + scale * up_z[module]) if lora else up_z[module]
            expected = factor * exact[member] @ (down[module] + scale * down_z[module]).T @ own.T
            expected = expected + bias[module].double().cpu().numpy()
            found = y[module, member * rows : (member + 1) * rows].double().cpu().numpy()
            assert np.linalg.norm(found - expected) < (1e-6 if dtype == torch.float32 else 1e-3) * np.linalg.norm(
                expected
            )


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_replayed_graphs_follow_seeds_scales_and_tokens(model, space, dtype, small):
    """A replay gives exactly the scores of the kernels launched again."""
    engine = engine_of(model().to(dtype), space)
    kept = engine.graphs
    for step in range(4):
        batch = make_batch(6, seed=step, lengths=(9, 16))
        probes = (Probe(((2**63 + step, 0.01 * (step + 1)),)), Probe(((2**63 + step, -0.02),)))
        for pair in (probes, (Probe(), Probe())):
            engine.graphs = kept
            replayed = engine.score(batch, pair)
            engine.graphs = None
            np.testing.assert_array_equal(replayed, engine.score(batch, pair))
    assert all(one.graph is not None for one in kept.forwards.values()) and len(kept.forwards) <= 4


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_replayed_updates_give_the_weights_of_a_cpu(space, dtype, small):
    engine = engine_of(make_roberta().to(dtype), space)
    twin = TorchEngine(make_roberta().to(dtype), space, seed=3, pad_id=1)
    twin.load_state(engine.state())
    rng = np.random.default_rng(0)
    for count in (1, 1, 1, 2, 2, 2, 1):
        terms = tuple((int(rng.integers(2**63)), float(np.float32(rng.normal() * 1e-2))) for _ in range(count))
        update = Update((*terms, (3, 0.0)), keep=float(np.float32(1 - 1e-3)))
        engine.apply([update, Update()])
        twin.apply([update, Update()])
    assert engine.digest() == twin.digest()


@on_a_gpu
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_steps_with_graphs_equal_steps_without(space):
    """An update that waits for the next forward is applied when that runs, and before the weights are read."""
    engine, plain = (engine_of(make_roberta(), space) for _ in range(2))
    plain.graphs = None
    batches = [make_batch(6, seed=seed, lengths=(9, 16)) for seed in range(2)]
    for step in range(12):
        batch, probes = batches[step % 5 == 4], (Probe(((2**63 + step, 0.01),)), Probe(((2**63 + step, -0.01),)))
        coming = Question(batches[(step + 1) % 5 == 4], (Probe(((2**64 - 1, 0.01),)), Probe(((2**64 - 1, -0.01),))))
        engine.pipeline.prefetch(lambda found=coming: found)  # not what will come: what was sent ahead must not be used
        np.testing.assert_array_equal(engine.score(batch, probes), plain.score(batch, probes))
        update = Update(((2**63 + step, float(np.float32(1e-3))),))
        for one in (engine, plain):
            one.apply([update])
        if step in (3, 9):
            assert engine.digest() == plain.digest()
        if step == 7:
            np.testing.assert_array_equal(
                engine.score(batch, (Probe(), Probe())), plain.score(batch, (Probe(), Probe()))
            )
    waits = not engine.population.large
    assert bool(any(one.joint_graphs for one in engine.graphs.forwards.values())) == waits
    assert engine.digest() == plain.digest()


@on_a_gpu
def test_number_of_graphs_is_limited(monkeypatch):
    monkeypatch.setattr("mezzo.engines.torch.gpu.graphs.MAX_SHAPES", 3)
    engine = engine_of(make_roberta(), SPACES["lora"], micro_batch=MicroBatch(4, pad_to=8))
    for length in (5, 12, 20, 28, 5, 12, 20, 28):
        for _ in range(3):
            engine.score(make_batch(4, lengths=(length, length + 1)), PAIR)
        assert len(engine.graphs.forwards) <= 3


@on_a_gpu
def test_candidates_without_shared_prompts():
    engine = engine_of(make_llama(), SPACES["lora"], micro_batch=MicroBatch(8))
    rng = np.random.default_rng(5)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(5, VOCAB, size=rng.integers(low, high)))

    prompts = tuple(Prompt(tokens(4, 12), label=0, candidates=(tokens(1, 4), tokens(1, 4))) for _ in range(4))
    batch = Batch(prompts, Readout("candidates"))
    shared = engine.score(batch, PAIR)
    engine.share_prompts = False
    for _ in range(3):
        np.testing.assert_allclose(engine.score(batch, PAIR), shared, rtol=1e-4, atol=1e-4)


@on_a_gpu
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_16_bit_slopes_are_close_to_those_of_float32(space):
    """The difference of both signs survives 16-bit activations."""
    batch, probes = make_batch(32), (Probe(((7, 0.01),)), Probe(((7, -0.01),)))
    exact = engine_of(make_roberta().to(torch.bfloat16).float(), space).score(batch, probes)
    found = engine_of(make_roberta().to(torch.bfloat16), space).score(batch, probes)
    wanted, seen = (s[0] - s[1] for s in (exact, found))
    assert np.linalg.norm(seen - wanted) < 0.35 * np.linalg.norm(wanted)
