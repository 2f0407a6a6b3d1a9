"""Space `matrices` over HTTP: probes are uploaded, updates are sent as (seed, coefficient) and applied by the server's ranks.

The first server has two ranks; it is killed in the middle of a run, which is resumed on another with one rank."""

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
from tests.sglang.test_server_lora import data  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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


def start_server(folder, tp=1, loader=(LOADER,)):
    more = ("--custom-weight-loader", *loader) if loader else ()
    return Server(MODEL, folder / f"tp{tp}.log", targets=PROJECTIONS, tp=tp, more=more)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = start_server(tmp_path_factory.mktemp("server"), tp=2)
    try:
        yield server.ready()
    finally:
        server.kill()


def weights_of(server: Server, name: str) -> np.ndarray:
    """A Hugging Face matrix as SGLang returns it: if it is split by rows, the first rank's share."""
    body = json.dumps({"name": name, "truncate_size": 10**6}).encode()
    request = urllib.request.Request(
        f"{server.url}/get_weights_by_name", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return np.array(json.loads(answer.read()), dtype=np.float32)


def assert_same_weights(server: Server, expected: dict[str, np.ndarray]) -> None:
    """Compare the matrices, or their first rows, of the first and last layer only: SGLang sends them as JSON, which is slow."""
    names = list(expected)
    for name in (*names[:7], *names[-7:]):
        matrix, weights = expected[name], weights_of(server, name)
        assert weights.size in (matrix.size, matrix.size // 2)
        np.testing.assert_array_equal(weights, matrix[: weights.shape[0]], err_msg=name)


def test_scores_and_weights_match_torch_engine(server):
    reference = open_engine("torch", spec_of(MATRICES))
    engine = open_engine("sglang", spec_of(MATRICES, urls=(server.url,)))
    assert_same_weights(server, reference.state())
    for e in (engine, reference):
        e.apply(UPDATES)
    assert_same_weights(server, reference.state())
    assert engine.digest() == reference.digest() and engine.base_digest == reference.base_digest
    for probes in (PAIR, (Probe(),)):
        assert distance(engine.score(words_batch(), probes), reference.score(words_batch(), probes)) < 1e-4
    state = engine.state()
    scores = []
    for e in (engine, reference):
        e.apply(UPDATES)
        # The base weights have no adapter whose id would be new: their old keys and values must be gone.
        scores.append(e.score(words_batch(), [Probe()]))
        e.load_state(state)
    assert distance(*scores) < 1e-4
    assert_same_weights(server, state)
    engine.close()


def test_run_resumes_on_another_server_after_kill(server, data, tmp_path):  # noqa: F811
    uninterrupted = api.finetune(MODEL, train=data, dev=data, engine="torch", out=tmp_path / "uninterrupted", **OPTIONS)
    session = api.open_session(
        MODEL, train=data, dev=data, engine="sglang", url=(server.url,), out=tmp_path / "cut", **OPTIONS
    )
    records = session.records()
    assert [next(records).step for _ in range(3)] == [0, 1, 2]

    # Another run changes the server's weights: this run stops at its next request.
    other = open_engine("sglang", spec_of(MATRICES, urls=(server.url,)))
    assert_same_weights(server, other.state())
    with pytest.raises(RunFailed, match="no longer holds this run's weights"):
        next(records)
    other.close()

    server.kill()
    second = start_server(tmp_path)
    try:
        second.ready()
        run = api.finetune(resume=tmp_path / "cut", url=(second.url,))
        ours, theirs = api.records(tmp_path / "cut"), api.records(tmp_path / "uninterrupted")
        assert run.steps == len(ours) == len(theirs) == OPTIONS["steps"]
        np.testing.assert_allclose([r.losses for r in ours], [r.losses for r in theirs], atol=1e-4)
        assert api.verify(tmp_path / "cut").ok
        assert run.accuracy == uninterrupted.accuracy
        rebuilt, _ = api.open_run(tmp_path / "cut", at=run.best_step)
        assert_same_weights(second, rebuilt.state())

        # Evaluated at the base model, the same server shows no trace of the run.
        served = api.evaluate(tmp_path / "cut", data=data, at=0, engine="sglang", url=(second.url,))
        base = api.evaluate(model=MODEL, task="sst-2", data=data, engine="sglang", url=(second.url,))
        assert served.accuracy == base.accuracy == run.zero_shot
        assert base.calibrated == served.calibrated
    finally:
        second.kill()
