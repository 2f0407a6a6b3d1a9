"""Space `matrices` over HTTP: probes are uploads, updates are orders of (seed, coefficient) that the server's own ranks carry
out. The first server is split over two ranks; it is killed in the middle of a run, which ends on another of one rank."""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest

from mezzo import api
from mezzo.engines import open_engine
from mezzo.engines.sglang.server.loader import LOADER
from mezzo.errors import RunFailed
from mezzo.method.space import Space
from mezzo.types import Probe
from tests.sglang.conftest import MODEL, PAIR, UPDATES, distance, spec_of, words_batch
from tests.sglang.servers import Server
from tests.sglang.test_server import data  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MATRICES = Space("matrices", noise_rank=4)
OPTIONS = {
    "task": "sst-2",
    "space": "matrices",
    "noise": "lowrank",
    "noise_rank": 4,
    "steps": 8,
    "batch_size": 4,
    "eps": 1e-2,
    "lr": 1e-4,
    "seed": 1,
    "threads": 1,
    "eval_every": 4,
}


def started(folder, tp=1, loader=(LOADER,)):
    more = ("--custom-weight-loader", *loader) if loader else ()
    return Server(MODEL, folder / f"tp{tp}.log", targets=EVERY, tp=tp, more=more)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = started(tmp_path_factory.mktemp("server"), tp=2)
    try:
        yield server.ready()
    finally:
        server.kill()


def weights_of(server: Server, name: str) -> np.ndarray:
    """A Hugging Face matrix as SGLang itself reads it out; of one that is split by rows, the first rank's share."""
    body = json.dumps({"name": name, "truncate_size": 10**6}).encode()
    request = urllib.request.Request(
        f"{server.url}/get_weights_by_name", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return np.array(json.loads(answer.read()), dtype=np.float32)


def same_bits(server: Server, expected: dict[str, np.ndarray]) -> None:
    """Every matrix, or its first rows, of the first and the last layer: they are read as JSON, which takes its time."""
    names = list(expected)
    for name, whole in ((name, expected[name]) for name in (*names[:7], *names[-7:])):
        found = weights_of(server, name)
        assert found.size in (whole.size, whole.size // 2)
        np.testing.assert_array_equal(found, whole[: found.shape[0]], err_msg=name)


def test_scores_and_weights_equal_the_torch_engine(server):
    reference = open_engine("torch", spec_of(MATRICES))
    engine = open_engine("sglang", spec_of(MATRICES, urls=(server.url,)))
    same_bits(server, reference.state())
    for e in (engine, reference):
        e.apply(UPDATES)
    same_bits(server, reference.state())
    assert engine.digest() == reference.digest() and engine.base_digest == reference.base_digest
    for probes in (PAIR, (Probe(),)):
        assert distance(engine.score(words_batch(), probes), reference.score(words_batch(), probes)) < 1e-4
    kept = engine.state()
    for e in (engine, reference):
        e.apply(UPDATES)
        # The base weights have no adapter whose id would be new: their old keys and values must be gone.
        after = e.score(words_batch(), [Probe()])
        e.load_state(kept)
        if e is engine:
            found = after
    assert distance(found, after) < 1e-4
    same_bits(server, kept)
    engine.close()


def test_a_run_survives_its_server(server, data, tmp_path):  # noqa: F811
    whole = api.finetune(MODEL, train=data, dev=data, engine="torch", out=tmp_path / "whole", **OPTIONS)
    session = api.open_session(
        MODEL, train=data, dev=data, engine="sglang", url=(server.url,), out=tmp_path / "cut", **OPTIONS
    )
    records = session.records()
    assert [next(records).step for _ in range(3)] == [0, 1, 2]

    # Somebody else moves the server's weights: the run notices at its next question and stops.
    other = open_engine("sglang", spec_of(MATRICES, urls=(server.url,)))
    same_bits(server, other.state())
    with pytest.raises(RunFailed, match="no longer holds this run's weights"):
        next(records)
    other.close()

    server.kill()
    fresh = started(tmp_path)
    try:
        fresh.ready()
        run = api.finetune(resume=tmp_path / "cut", url=(fresh.url,))
        ours, theirs = api.records(tmp_path / "cut"), api.records(tmp_path / "whole")
        assert run.steps == len(ours) == len(theirs) == OPTIONS["steps"]
        np.testing.assert_allclose([r.losses for r in ours], [r.losses for r in theirs], atol=1e-4)
        assert api.verify(tmp_path / "cut").ok
        assert run.accuracy == whole.accuracy
        rebuilt, _ = api.rebuilt(tmp_path / "cut", at=run.best_step)
        same_bits(fresh, rebuilt.state())

        # The same server, evaluated as it came: a run's traces are gone.
        served = api.evaluate(tmp_path / "cut", data=data, at=0, engine="sglang", url=(fresh.url,))
        base = api.evaluate(model=MODEL, task="sst-2", data=data, engine="sglang", url=(fresh.url,))
        assert served.accuracy == base.accuracy == run.zero_shot
        assert base.calibrated == served.calibrated
    finally:
        fresh.kill()
