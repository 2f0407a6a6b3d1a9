"""Space `matrices` over HTTP: probes are uploaded, updates are sent as (seed, coefficient) and applied by the server's ranks.

The first server has two ranks, the second one. The first is killed in the middle of a run, which is resumed on the second."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
import torch

from mezzo import api
from mezzo.engines import open_engine
from mezzo.engines.sglang.server import base_weights, connection, pool, replica, weights
from mezzo.engines.sglang.server.loader import LOADER, Order
from mezzo.engines.sglang.server.replica import Replica
from mezzo.errors import ConfigError, RunFailed
from mezzo.method import noise
from mezzo.method.space import Space
from mezzo.types import Probe
from tests.sglang.conftest import MODEL, PAIR, UPDATES, distance, spec_of, words_batch
from tests.sglang.servers import Server
from tests.sglang.test_server_lora import data, look_often  # noqa: F401  (data is a fixture)

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
SERVED = OPTIONS | {"exclusive_server": True, "server_timeout": 1.0}


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


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    server = start_server(tmp_path_factory.mktemp("second"))
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


def weight_version(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/model_info", timeout=60) as answer:
        return json.loads(answer.read())["weight_version"]


@pytest.fixture(scope="module")
def reference():
    """The torch engine after the updates that the tests of this file make, and the base weights."""
    engine = open_engine("torch", spec_of(MATRICES))
    base = engine.state()
    engine.apply(UPDATES)
    return engine, base


def open_on(server: Server, space: Space = MATRICES):
    return open_engine("sglang", spec_of(space, urls=(server.url,), exclusive_server=True))


def test_scores_and_weights_match_torch_engine(server, reference):
    reference, base = reference
    engine = open_on(server)
    assert_same_weights(server, base)
    engine.apply(UPDATES)
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
    assert weight_version(server).startswith("mezzo-")
    engine.close()
    assert weight_version(server) == "default"
    assert_same_weights(server, base)


def test_order_that_cannot_be_carried_out_changes_nothing(server, reference, monkeypatch):
    """An exception on one of its ranks would end the server, with the requests of all its clients."""
    engine = open_on(server)
    engine.apply(UPDATES)
    version = weight_version(server)
    with monkeypatch.context() as client:
        client.setattr(noise, "VERSION", "another")
        with pytest.raises(RunFailed, match=r"did not change its weights.*the run uses noise 'another'"):
            engine.apply(UPDATES)
    assert weight_version(server) == version
    assert_same_weights(server, reference[0].state())
    engine.close()
    with monkeypatch.context() as client:
        client.setattr(noise, "VERSION", "another")
        with pytest.raises(ConfigError, match="install the same version"):
            open_on(server)


def test_second_run_is_refused_while_the_first_is_heard_of(server, reference, monkeypatch):
    monkeypatch.setattr(weights, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(base_weights, "SILENCE_SECONDS", 2.0)
    engine = open_on(server)
    engine.apply(UPDATES)
    for space in (MATRICES, Space("lora", rank=4)):
        with pytest.raises(ConfigError, match="another run is training the weights of the server"):
            open_on(server, space)
    assert_same_weights(server, reference[0].state())
    engine.close()


def test_server_that_somebody_else_updated_is_brought_back(server, reference, monkeypatch):
    monkeypatch.setattr(base_weights, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(pool, "FIRST_LOOK", 0.1)
    engine = open_on(server)
    engine.apply(UPDATES[:1])
    (ours,) = engine.pool.live
    other = Replica(server.url, "m", None)
    other.connect()
    name = engine.trained[0].name
    order = Order(owner="other", expected=ours.loader_version, version="other-1", base_name="default")
    other.write_weights(order, [(name, torch.zeros(engine.trained[0].shape))])
    engine.apply(UPDATES[1:])
    expected = reference[0].score(words_batch(), PAIR)
    assert distance(engine.score(words_batch(), PAIR), expected) < 1e-4
    assert_same_weights(server, reference[0].state())
    engine.close()
    assert weight_version(server) == "default"


@pytest.mark.parametrize("thawed", [True, False])
def test_server_that_was_lost_at_the_end_is_put_back_too(server, reference, monkeypatch, capsys, thawed):
    """Where it does not answer, the user is told, and the next client does it."""
    for module, name in ((connection, "LOOK_SECONDS"), (replica, "LOOK_TIMEOUT"), (weights, "SHORT_LOOK")):
        monkeypatch.setattr(module, name, 0.5)
    engine = open_engine("sglang", spec_of(MATRICES, urls=(server.url,), exclusive_server=True, server_timeout=0.1))
    engine.apply(UPDATES)
    server.freeze()
    try:
        with pytest.raises(RunFailed, match="--resume"):
            engine.score(words_batch(), PAIR)
        if thawed:
            server.thaw()
        engine.close()
    finally:
        server.thaw()
    told = f"could not be put back to the untrained model ({server.url} does not answer)"
    assert (told in capsys.readouterr().err) == (not thawed)
    assert weight_version(server).startswith("mezzo-") == (not thawed)
    open_on(server, Space("lora", rank=4)).close()
    assert weight_version(server) == "default"
    assert_same_weights(server, reference[1])


def test_refused_order_of_another_client_is_not_taken_for_our_own(server, reference, monkeypatch):
    """It comes between our order and our question whether that was carried out."""
    engine = open_on(server)
    (ours,) = engine.pool.live
    ask, other = ours.weight_status, Replica(server.url, "m", None)
    other.connect()
    wrong = Order(owner="other", expected="of no server", version="other-1", base_name="default")

    def interrupted(client: str = ""):
        with monkeypatch.context() as patch:
            patch.setattr(ours, "weight_status", ask)
            with pytest.raises(ConfigError, match="did not change its weights"):
                other.write_weights(wrong)
        return ask(client)

    monkeypatch.setattr(ours, "weight_status", interrupted)
    engine.apply(UPDATES)
    monkeypatch.undo()
    assert_same_weights(server, reference[0].state())
    engine.close()
    assert weight_version(server) == "default"


KILLED_CLIENT = """
import sys, time
from mezzo.engines import open_engine
from tests.sglang.conftest import PAIR, UPDATES, spec_of
from tests.sglang.test_server_matrices import MATRICES
engine = open_engine("sglang", spec_of(MATRICES, urls=(sys.argv[1],), exclusive_server=True))
engine.apply(UPDATES)
with engine._uploaded_adapters(engine.pool.live[0], engine._adapters(PAIR, engine.pool.live[0])):
    print("in a step", flush=True)
    time.sleep(600)
"""


def test_next_client_puts_back_what_a_killed_one_left(server, reference):
    """Its weights and its adapters, also if the next one trains LoRA, which would take moved 16-bit weights for the base."""
    killed = subprocess.Popen([sys.executable, "-c", KILLED_CLIENT, server.url], stdout=subprocess.PIPE)
    try:
        assert killed.stdout.readline() == b"in a step\n"
    finally:
        killed.kill()
        killed.wait()
    assert weight_version(server).startswith("mezzo-")
    open_on(server, Space("lora", rank=4)).close()
    assert weight_version(server) == "default"
    assert_same_weights(server, reference[1])
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
        assert len(json.loads(answer.read())["data"]) == 1, "the model, and no adapter"


def test_two_servers_are_trained_at_once(server, second, reference, monkeypatch):
    """Both get every update, one that was lost in between gets what it missed, and both are put back."""
    look_often(monkeypatch)
    servers, (trained, base) = (server, second), reference
    urls = tuple(each.url for each in servers)
    engine = open_engine("sglang", spec_of(MATRICES, urls=urls, exclusive_server=True))
    engine.apply(UPDATES[:1])
    second.freeze()
    try:
        engine.score(words_batch(), PAIR)
        assert [each.url for each in engine.pool.live] == [server.url]
        engine.apply(UPDATES[1:])
    finally:
        second.thaw()
    expected = trained.score(words_batch(), PAIR)
    assert distance(engine.score(words_batch(), PAIR), expected) < 1e-4
    while len(engine.pool.live) < 2:
        time.sleep(0.5)
        engine.pool.servers()
    assert distance(engine.score(words_batch(), PAIR), expected) < 1e-4
    assert engine.digest() == trained.digest()
    for each in servers:
        assert_same_weights(each, trained.state())
    engine.close()
    for each in servers:
        assert weight_version(each) == "default"
        assert_same_weights(each, base)


def test_matrices_on_a_shared_server_are_refused(server):
    with pytest.raises(ConfigError, match="--exclusive-server"):
        open_engine("sglang", spec_of(MATRICES, urls=(server.url,)))


def test_run_resumes_on_another_server_after_kill(server, second, data, tmp_path):  # noqa: F811
    uninterrupted = api.finetune(MODEL, train=data, dev=data, engine="torch", out=tmp_path / "uninterrupted", **OPTIONS)
    session = api.open_session(
        MODEL, train=data, dev=data, engine="sglang", url=(server.url,), out=tmp_path / "cut", **SERVED
    )
    records = session.records()
    assert [next(records).step for _ in range(3)] == [0, 1, 2]
    server.kill()
    with pytest.raises(RunFailed, match="--resume"):
        next(records)
    run = api.finetune(resume=tmp_path / "cut", url=(second.url,), exclusive_server=True)
    ours, theirs = api.records(tmp_path / "cut"), api.records(tmp_path / "uninterrupted")
    assert run.steps == len(ours) == len(theirs) == OPTIONS["steps"]
    np.testing.assert_allclose([r.losses for r in ours], [r.losses for r in theirs], atol=1e-4)
    assert api.verify(tmp_path / "cut").ok
    assert run.accuracy == uninterrupted.accuracy

    # Evaluated at the base model, the same server shows no trace of the run.
    assert weight_version(second) == "default"
    served = api.evaluate(tmp_path / "cut", data=data, at=0, engine="sglang", url=(second.url,), exclusive_server=True)
    base = api.evaluate(model=MODEL, task="sst-2", data=data, engine="sglang", url=(second.url,))
    assert served.accuracy == base.accuracy == run.zero_shot
    assert base.calibrated == served.calibrated
