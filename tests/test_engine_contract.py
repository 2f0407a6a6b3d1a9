"""What every engine promises, run over every registered engine and over an engine made of workers.

SGLang is skipped where it is not installed; `make test-sglang` runs this file in its environment too.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

from mezzo.config import from_mapping
from mezzo.engines import ENGINES
from mezzo.engines.base import Engine
from mezzo.errors import JournalError, RunFailed
from mezzo.method.objectives import get_objective
from mezzo.parallel.setup import open_workers
from mezzo.runs.setup import Setup, resolve_setup
from mezzo.types import Batch, Generation, MicroBatch, Probe, Update

PAIR = (Probe(((7, 1e-2),)), Probe(((7, -1e-2),)))
UPDATES = (Update(((7, 0.5),)), Update(((8, -0.25),), keep=float(np.float32(0.99))), Update())


@pytest.fixture(scope="module", params=[*ENGINES, "workers"])
def setup(request) -> Setup:
    if request.param == "sglang" and importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    name, workers = ("torch", 2) if request.param == "workers" else (request.param, None)
    options = {"model": "mezzo/llama-mini", "engine": name, "space": "lora", "threads": 1, "batch_size": 6}
    return resolve_setup(from_mapping({**options, "train_limit": 6, "workers": workers, "device": "cpu"}))


@pytest.fixture(scope="module")
def engine(setup) -> Iterator[Engine]:
    engine = open_workers(setup.config, setup.engine_spec) or setup.open_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def batch(setup) -> Batch:
    return Batch(setup.train_prompts, setup.readout)


def reference_engine(setup: Setup) -> Engine:
    """The torch engine in this process, at the base."""
    return resolve_setup(setup.config.replace(engine="torch", workers=None)).open_engine()


def test_engine_describes_itself(engine, setup):
    assert isinstance(engine.micro_batch, MicroBatch) and len(engine.base_digest) == 64
    assert {t.kind for t in engine.trained} == {"lora_A", "lora_B"}
    described = engine.describe()
    assert described["parameters"] > described["trained_parameters"] > 0
    assert engine.pipeline is None, "on a CPU no engine runs steps ahead"


def test_scores_have_the_declared_shape_and_leave_no_trace(engine, batch):
    before = engine.digest()
    scores = engine.score(batch, PAIR)
    assert scores.shape == (2, len(batch), len(batch.readout.words)) and scores.dtype == np.float32
    assert np.isfinite(scores).all()
    assert not np.array_equal(scores[0], scores[1]), "a perturbation must reach the scores"
    assert engine.digest() == before


def test_scores_equal_those_of_the_torch_engine(engine, setup, batch):
    reference = reference_engine(setup)
    for probes in ((Probe(),), PAIR):
        ours, theirs = (each.score(batch, probes).astype(np.float64) for each in (engine, reference))
        ours, theirs = ours - ours.mean(-1, keepdims=True), theirs - theirs.mean(-1, keepdims=True)
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_probes_are_answered_in_their_order(engine, batch):
    loss = get_objective("cross_entropy").losses
    forward, backward = engine.score(batch, PAIR), engine.score(batch, PAIR[::-1])
    np.testing.assert_allclose(loss(forward, batch), loss(backward, batch)[::-1], rtol=1e-6)


def test_check_accepts_a_space_that_can_be_trained(engine, batch):
    engine.check(batch, 1e-2)


def test_state_of_other_tensors_is_refused(engine):
    with pytest.raises((JournalError, RunFailed)):
        engine.load_state({"no.such.tensor": np.zeros((2, 2), dtype=np.float32)})


def test_continuations_have_the_requested_length(engine, setup, batch):
    few = dataclasses.replace(batch, prompts=batch.prompts[:2])
    answers = engine.generate(few, [Probe()], Generation(3))
    assert len(answers) == 1 and [len(ids) <= 3 for (ids,) in answers[0]] == [True, True]


def test_updates_give_the_bits_of_the_torch_engine(engine, setup):
    """Last: it moves the weights. Every engine must follow a journal to the same digest."""
    reference = reference_engine(setup)
    assert engine.digest() == reference.digest()
    engine.apply(UPDATES)
    reference.apply(UPDATES)
    assert engine.digest() == reference.digest()
    state = engine.state()
    assert all(np.array_equal(state[name], value) for name, value in reference.state().items())
