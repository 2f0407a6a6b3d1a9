"""Scores of one population forward equal those of plain models that really have the perturbed weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from mezzo.engines.torch.engine import TorchEngine
from mezzo.method.space import Space
from mezzo.types import Batch, Generation, MicroBatch, Probe, Prompt, Readout
from tests.conftest import make_batch, make_llama, make_roberta
from tests.reference import plain_model, plain_scores

SPACES = {
    "full": Space("full"),
    "full-lowrank": Space("full", noise_rank=3),
    "matrices": Space("matrices"),
    "matrices-lowrank": Space("matrices", noise_rank=4),
    "lora": Space("lora", rank=4, alpha=8),
    "lora-all": Space("lora", rank=2, alpha=8, targets=("all-linear",)),
    "pattern": Space("*layer*1*"),
    "head": Space("head"),
    "tied": Space("*embed*"),  # only the table that the decoder shares: both use the same noise
}
PLAIN = ("full", "full-lowrank", "matrices-lowrank", "lora", "tied")
PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))
MIXED = (Probe(), Probe(((7, 0.02), (9, -0.01))), Probe(((9, 0.03),)))


def engine_for(
    model: torch.nn.Module, space: Space, kind: str = "rademacher", rows: int = 64, members: int = 2
) -> TorchEngine:
    engine = TorchEngine(model, space, noise_kind=kind, micro_batch=MicroBatch(rows=rows, members=members), seed=3)
    rng = np.random.default_rng(1)  # LoRA's B starts at zero, which would hide mistakes in A
    engine.load_state({n: (v + rng.normal(0, 0.05, v.shape)).astype(np.float32) for n, v in engine.state().items()})
    return engine


def engine_is_tied(model: torch.nn.Module) -> bool:
    return "Llama" in type(model).__name__


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_scores_equal_a_plain_model_with_perturbed_weights(model, pristine, space, kind):
    if space.kind == "head" and engine_is_tied(model):
        pytest.skip("Llama's head is tied to its embeddings")
    engine, batch = engine_for(model, space, kind), make_batch()
    for probes in (PAIR, MIXED):
        scores = engine.score(batch, probes)
        for index, probe in enumerate(probes):
            expected = plain_scores(plain_model(pristine, engine.trained, engine.state(), kind, probe, space), batch)
            np.testing.assert_allclose(scores[index], expected, rtol=1e-5, atol=1e-5)
    assert np.abs(scores[0] - scores[1]).max() > 1e-3, "the perturbation changes the scores"


@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize("tie", [True, False])
def test_untied_heads_and_whole_vocabulary(tie, vocabulary):
    model = make_llama(tie=tie)
    pristine = copy.deepcopy(model)
    engine, batch = engine_for(model, Space("full")), make_batch()
    batch = Batch(batch.prompts, Readout("words", words=(11, 47, 3), vocabulary=vocabulary))
    scores = engine.score(batch, PAIR)
    for index, probe in enumerate(PAIR):
        expected = plain_scores(
            plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, engine.space), batch
        )
        np.testing.assert_allclose(scores[index], expected, rtol=1e-5, atol=1e-5)


def test_tied_weights_are_one_trained_tensor():
    engine = TorchEngine(make_roberta(), Space("full"))
    names = [t.name for t in engine.trained]
    assert "roberta.embeddings.word_embeddings.weight" in names
    assert not any("decoder" in name for name in names)
    batch = make_batch()
    before = engine.score(batch, [Probe()])
    head, embeddings = engine.model.lm_head.decoder.weight, engine.model.roberta.embeddings.word_embeddings.weight
    assert head is embeddings
    assert before.shape == (1, 6, 2)


@pytest.mark.parametrize("space", [SPACES[name] for name in PLAIN], ids=PLAIN)
def test_padding_order_and_micro_batches_do_not_change_scores(model, space):
    engine, batch = engine_for(copy.deepcopy(model), space), make_batch(9)
    scores = engine.score(batch, PAIR)
    shuffled = np.random.default_rng(0).permutation(9)
    again = engine.score(Batch(tuple(batch.prompts[i] for i in shuffled), batch.readout), PAIR)
    np.testing.assert_allclose(again, scores[:, shuffled], atol=1e-5)
    for unit in (MicroBatch(1), MicroBatch(2), MicroBatch(4, pad_to=16), MicroBatch(64, pad_to=32)):
        other = TorchEngine(copy.deepcopy(model), space, micro_batch=unit, seed=3)
        other.load_state(engine.state())
        np.testing.assert_allclose(other.score(batch, PAIR), scores, atol=1e-5)


@pytest.mark.parametrize("space", [Space("lora", rank=4), Space("full")], ids=["lora", "full"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_candidate_continuations_equal_teacher_forcing(reduce, shared, space):
    model = make_llama()
    pristine = copy.deepcopy(model)
    engine = engine_for(model, space, rows=3)
    engine.share_prompts = shared
    rng = np.random.default_rng(5)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(5, 120, size=rng.integers(low, high)))

    prompts = [
        Prompt(tokens(2, 12), label=0, candidates=tuple(tokens(1, 5) for _ in range(count))) for count in (2, 3, 1, 2)
    ]
    batch = Batch(tuple(prompts), Readout("candidates", reduce=reduce))
    scores = engine.score(batch, PAIR)
    assert scores.shape == (2, 4, 3)
    for index, probe in enumerate(PAIR):
        twin = plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, engine.space)
        for row, prompt in enumerate(prompts):
            expected = plain_scores(twin, Batch((prompt,), batch.readout))[0]
            np.testing.assert_allclose(scores[index, row, : len(expected)], expected, rtol=1e-5, atol=1e-5)
            assert np.isneginf(scores[index, row, len(expected) :]).all()


def test_probes_do_not_change_weights(model):
    engine, batch = engine_for(model, Space("full")), make_batch()
    before = engine.digest(), engine.score(batch, [Probe()])
    for _ in range(3):
        engine.score(batch, PAIR)
    assert engine.digest() == before[0]
    np.testing.assert_array_equal(engine.score(batch, [Probe()]), before[1])


@pytest.mark.parametrize("space", [Space("lora", rank=4), Space("full")], ids=["lora", "full"])
def test_generation_equals_that_of_a_plain_model(space):
    model = make_llama()
    pristine = copy.deepcopy(model)
    engine, batch = engine_for(model, space, rows=4), make_batch(7)
    found = engine.generate(batch, PAIR, Generation(6))
    assert found[0] != found[1], "the signs differ somewhere, else this test shows nothing"
    for index, probe in enumerate(PAIR):
        twin = plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, engine.space)
        for row, prompt in enumerate(batch.prompts):
            ids = torch.tensor([prompt.ids])
            plain = twin.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
            assert found[index][row][0] == tuple(plain[0, ids.shape[1] :].tolist()), "up to its end token"


def test_context_lasts_for_one_forward():
    population = TorchEngine(make_roberta(), Space("full")).population
    idle = population.context
    positions = torch.zeros((6, 1), dtype=torch.long)
    with population.at(PAIR):
        with population.forward(3, 8, positions=positions, trim_last_layer=False) as context:
            assert population.context is context and (context.rows, context.length) == (3, 8)
            assert population.members == 2 and population.perturbed and not context.trim_last_layer
            assert context.claim_positions() is positions and context.claim_positions() is None
        assert population.members == 2 and population.context.rows == 0
        with pytest.raises(ValueError, match="inside"), population.forward(3, 8):
            raise ValueError("inside")
        assert population.context.rows == 0
    assert population.context == idle and not population.members
