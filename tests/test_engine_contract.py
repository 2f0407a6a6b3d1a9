"""What every engine promises, run over every registered engine, over SGLang as a server and over an engine made of workers.

SGLang and vLLM are skipped where they are not installed; `make test-sglang` and `make test-vllm` run this file in their
environments too. The tests share one engine of each kind: those that move the weights come last.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator

import numpy as np
import pytest

from mezzo.config import from_mapping
from mezzo.engines import ENGINES
from mezzo.engines.arrays import to_tensor
from mezzo.engines.base import Engine, Workers
from mezzo.engines.torch import catalog
from mezzo.errors import JournalError, RunFailed
from mezzo.method.objectives import get_objective
from mezzo.parallel.setup import open_workers
from mezzo.runs.resolve import resolve_setup
from mezzo.runs.setup import Setup
from mezzo.types import Batch, Generation, MicroBatch, Probe, Prompt, Readout, Scores, Update

PAIR = (Probe(((7, 1e-2),)), Probe(((7, -1e-2),)))
# More than any engine takes at once: directions, sums of several, and the weights themselves.
MANY = (*(Probe(((seed, 1e-2),)) for seed in range(18)), Probe(), Probe(((7, 1e-2), (9, -2e-2))))
UPDATES = (Update(((7, 2**-6),)), Update(((8, -(2**-7)),), keep=float(np.float32(0.99))), Update())
NEEDS = {"sglang": "sglang", "sglang server": "sglang", "vllm": "vllm"}


@pytest.fixture(scope="module", params=[*ENGINES, "sglang server", "workers"])
def setup(request, tmp_path_factory) -> Iterator[Setup]:
    if (package := NEEDS.get(request.param)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    name, workers = ("torch", 2) if request.param == "workers" else (request.param.split()[0], None)
    options = {"model": "mezzo/llama-mini", "engine": name, "space": "lora", "threads": 1, "batch_size": 4}
    config = from_mapping({**options, "train_limit": 4, "workers": workers, "device": "cpu"})
    if not request.param.endswith("server"):
        yield resolve_setup(config)
        return
    from tests.sglang.servers import Server

    server = Server(config.model, tmp_path_factory.mktemp("server") / "log")
    try:
        yield resolve_setup(config.replace(url=(server.ready().url,)))
    finally:
        server.kill()


@pytest.fixture(scope="module")
def engine(setup) -> Iterator[Engine]:
    engine = open_workers(setup.config, setup.engine_spec) or setup.open_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(setup) -> Engine:
    """The torch engine in this process."""
    return resolve_setup(setup.config.replace(engine="torch", workers=None, url=())).open_engine()


@pytest.fixture(params=["words", "candidates"])
def batch(setup, request) -> Batch:
    """Label words; or continuations of one or two tokens, of which the last example has fewer than the others."""
    if request.param == "words":
        return words_batch(setup)
    candidates = [((20, 30), (40,))] * 3 + [((50, 60),)]
    prompts = (
        dataclasses.replace(prompt, candidates=each, label=0)
        for prompt, each in zip(words_batch(setup).prompts, candidates, strict=True)
    )
    return Batch(tuple(prompts), Readout("candidates"))


def words_batch(setup: Setup) -> Batch:
    """The ends of four prompts, of different lengths."""
    prompts = (
        Prompt(prompt.ids[-20 + 3 * index :], label=prompt.label) for index, prompt in enumerate(setup.train_prompts)
    )
    return Batch(tuple(prompts), setup.readout)


def assert_close(ours: Scores, theirs: Scores) -> None:
    """Equal up to rounding, and up to the constant per probe and example that scores of label words leave open."""
    finite = np.isfinite(theirs)
    np.testing.assert_array_equal(np.isfinite(ours), finite)
    ours, theirs = (np.where(finite, scores, 0).astype(np.float64) for scores in (ours, theirs))
    if finite.all():
        ours, theirs = (scores - scores.mean(-1, keepdims=True) for scores in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_engine_describes_itself(engine, reference, setup):
    assert isinstance(engine.micro_batch, MicroBatch)
    assert engine.base_digest == reference.base_digest and engine.trained == reference.trained
    described = json.loads(json.dumps(engine.describe()))
    assert described["parameters"] > described["trained_parameters"] > 0
    assert described["engine"] == setup.config.engine and described["device"] and described["dtype"] == "float32"
    assert engine.pipeline is None, "on a CPU no engine runs steps ahead"


def test_scores_have_the_declared_shape_and_leave_no_trace(engine, batch):
    before = engine.digest()
    scores = engine.score(batch, PAIR)
    assert scores.shape == (2, 4, len(batch.readout.words) or 2) and scores.dtype == np.float32
    missing = np.array([len(prompt.candidates) == 1 for prompt in batch.prompts])
    assert np.isfinite(scores[:, ~missing]).all() and np.isneginf(scores[:, missing, 1]).all()
    assert not np.array_equal(scores[0], scores[1]), "a perturbation must reach the scores"
    assert engine.digest() == before
    np.testing.assert_array_equal(engine.score(batch, PAIR), scores, "the same question has the same answer")


@pytest.mark.parametrize("probes", [(Probe(),), PAIR, MANY], ids=["base", "pair", "many"])
def test_scores_equal_those_of_the_torch_engine(engine, reference, batch, probes):
    assert_close(engine.score(batch, probes), reference.score(batch, probes))


def test_probes_and_examples_are_answered_in_their_order(engine, batch):
    loss = get_objective("cross_entropy").losses
    forward, backward = engine.score(batch, PAIR), engine.score(batch, PAIR[::-1])
    np.testing.assert_allclose(loss(forward, batch), loss(backward, batch)[::-1], rtol=1e-6)
    turned = dataclasses.replace(batch, prompts=batch.prompts[::-1])
    np.testing.assert_allclose(engine.score(turned, PAIR), forward[:, ::-1], atol=1e-4)


def test_check_accepts_a_space_that_can_be_trained(engine, batch):
    engine.check(batch, 1e-2)


def test_state_is_a_copy_and_the_digest_is_its_own(engine):
    before, state = engine.digest(), engine.state()
    assert list(state) == [t.name for t in engine.trained]
    assert catalog.digest_of((name, to_tensor(values)) for name, values in state.items()) == before
    for values in state.values():
        values += 1
    assert engine.digest() == before


def test_state_of_other_tensors_is_refused(engine):
    state, name = engine.state(), engine.trained[0].name
    others = (
        {"no.such.tensor": np.zeros((2, 2), dtype=np.float32)},
        {**state, name: state[name][:1]},
        {**state, name: np.full_like(state[name], np.nan)},
    )
    for tensors in others:
        with pytest.raises((JournalError, RunFailed)):
            engine.load_state(tensors)
    assert engine.digest() == catalog.digest_of((name, to_tensor(values)) for name, values in state.items())


def test_continuations_are_those_of_the_torch_engine(engine, reference, setup):
    few = Batch(words_batch(setup).prompts[:2], setup.readout)
    end = setup.tokenizer.eos_token_id
    ours, theirs = (each.generate(few, [Probe(), *PAIR], Generation(3)) for each in (engine, reference))
    assert [[len(draws) for draws in examples] for examples in ours] == [[1, 1]] * 3
    for found, expected in zip(ours, theirs, strict=True):
        for (mine,), (other,) in zip(found, expected, strict=True):
            length = other.index(end) if end in other else 3
            assert len(mine) <= 3 and mine[:length] == other[:length]


def test_updates_give_the_bits_of_the_torch_engine_and_reach_the_scores(engine, reference, setup):
    """It moves the weights. Every engine must follow a journal to the same digest."""
    assert engine.digest() == reference.digest()
    before, batch = engine.state(), words_batch(setup)
    for each in (engine, reference):
        each.apply(UPDATES)
    assert engine.digest() == reference.digest()
    state = engine.state()
    assert all(np.array_equal(state[name], value) for name, value in reference.state().items())
    assert_close(engine.score(batch, PAIR), reference.score(batch, PAIR))
    if not isinstance(engine, Workers):  # which replay instead
        engine.load_state(before)
        assert all(np.array_equal(value, before[name]) for name, value in engine.state().items())
        assert engine.digest() != reference.digest()
