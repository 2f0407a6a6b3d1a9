"""LoRA over HTTP: adapters are uploaded to running servers, replicas share a batch, a server dies in the middle of a run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from mezzo import api
from mezzo.engines import open_engine
from mezzo.engines.sglang.server import connection, pool, replica, weights
from mezzo.engines.sglang.server.loader import LOADER
from mezzo.engines.sglang.server.recipes import MOST_CLIENTS, encode_recipe
from mezzo.errors import ConfigError, RunFailed
from mezzo.method.space import Space
from mezzo.runs.folder import Folder
from mezzo.types import Generation, Probe
from tests.conftest import SENTENCES
from tests.sglang.conftest import MODEL, PAIR, UPDATES, candidates_batch, distance, spec_of, words_batch
from tests.sglang.servers import Server
from tests.test_rewards import QUICK, ROWS, commas

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
LORA = Space("lora", rank=4, alpha=8)
DRAWS = ("--enable-custom-logit-processor",)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers, of which the first can draw texts; the second wants a key and has no mezzo beside it."""
    folder = tmp_path_factory.mktemp("servers")
    keyed = ("--api-key", "secret", "--custom-weight-loader", LOADER)
    started = [Server(MODEL, folder / "0.log", more=DRAWS), Server(MODEL, folder / "1.log", more=keyed, plugins=False)]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEZZO_API_KEY", "secret")
            for server in started:
                server.ready()
            yield started  # a test may put another in a place of the list: it is ended, too
    finally:
        for server in started:
            server.kill()


@pytest.fixture(scope="module")
def reference():
    engine = open_engine("torch", spec_of(LORA))
    engine.apply(UPDATES)
    return engine


def look_often(monkeypatch):
    """Lost servers are noticed, and looked for, within a second."""
    for module, name in ((connection, "LOOK_SECONDS"), (replica, "LOOK_TIMEOUT"), (pool, "FIRST_LOOK")):
        monkeypatch.setattr(module, name, 0.5)
    monkeypatch.setattr(pool, "LONGEST_LOOK", 0.5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_scores_match_torch_engine(servers, reference, replicas):
    engine = open_engine("sglang", spec_of(LORA, urls=tuple(server.url for server in servers[:replicas])))
    assert [each.makes_adapters for each in engine.pool.live] == [True, False][:replicas], "seeds or factors travel"
    engine.score(words_batch(2), PAIR)
    engine.apply(UPDATES)
    assert engine.digest() == reference.digest() and engine.base_digest == reference.base_digest
    for batch in (words_batch(), words_batch(vocabulary=True), candidates_batch(), candidates_batch(low=30, high=50)):
        for probes in (PAIR, (Probe(),)):
            assert distance(engine.score(batch, probes), reference.score(batch, probes)) < 1e-4
    asked = (words_batch(3), [Probe(), *PAIR, Probe(((4, 0.05),))], Generation(5, stop_ids=(323,)))
    assert engine.generate(*asked) == reference.generate(*asked)
    engine.close()


def test_es_over_a_url_equals_the_run_in_process(servers, tmp_path):
    """Texts are drawn by the server, and those of a prompt differ."""
    run = {"samples": 2, "batch_size": 3, "steps": 2, "rank": 4, "eval_every": 2, "temperature": 1.0, "draws": 2}
    run |= {"train": ROWS[:8], "dev": ROWS[8:12], "eps": 0.05, "objective": commas}
    found = {}
    for name, where in (("torch", {"engine": "torch"}), ("served", {"engine": "sglang", "url": (servers[0].url,)})):
        found[name] = api.finetune(MODEL, **QUICK, **run, **where, out=str(tmp_path / name))
    assert found["served"].digest == found["torch"].digest and api.verify(tmp_path / "served").ok
    records = [api.records(tmp_path / name) for name in found]
    assert [each.losses for each in records[0]] == [each.losses for each in records[1]]
    assert len({loss for each in records[0] for loss in each.losses}) > 1
    refused = {"engine": "sglang", "url": (servers[1].url,), "out": str(tmp_path / "refused")}
    with pytest.raises(ConfigError, match=r"cannot draw texts.*--enable-custom-logit-processor"):
        api.finetune(MODEL, **QUICK, **run, **refused)
    assert not (tmp_path / "refused").exists()


def test_es_loses_nothing_when_a_server_is_killed(servers, tmp_path, monkeypatch):
    """The other one writes what it should have written, and the run ends with the bits of one that was never disturbed."""
    look_often(monkeypatch)
    run = {"samples": 2, "batch_size": 4, "steps": 3, "rank": 4, "eval_every": 3, "eps": 0.05}
    run |= {"train": ROWS[:8], "dev": ROWS[8:12], "objective": commas}
    whole = api.finetune(MODEL, **QUICK, **run, engine="torch", out=str(tmp_path / "torch"))
    where = {"engine": "sglang", "url": tuple(server.url for server in servers), "server_timeout": 1.0}
    session = api.open_session(MODEL, **QUICK, **run, **where, out=str(tmp_path / "served"))
    records = session.records()
    next(records)
    assert len(session.engine.pool.live) == 2
    servers[0].kill()
    try:
        assert [record.step for record in records] == [1, 2]
        assert [each.url for each in session.engine.pool.live] == [servers[1].url]
        assert session.engine.digest() == whole.digest
        session.close()
        assert api.verify(tmp_path / "served").ok
        ours, theirs = (api.records(tmp_path / name) for name in ("served", "torch"))
        assert [record.losses for record in ours] == [record.losses for record in theirs]
    finally:
        servers[0] = Server(MODEL, tmp_path / "again.log", port=servers[0].port, more=DRAWS)
        servers[0].ready()


def test_adapters_are_uploaded_where_recipes_fail(servers, reference, monkeypatch, capsys):
    """As in a version of SGLang that reads adapters elsewhere than mezzo's plugin expects: its answer is an error."""

    def encode(recipe, values=None):
        return encode_recipe(dataclasses.replace(recipe, noise_kind="of another version"), values)

    monkeypatch.setattr(weights, "encode_recipe", encode)
    engine = open_engine("sglang", spec_of(LORA, urls=(servers[0].url,)))
    assert re.search(r"does not make adapters from seeds \(.*\): they are uploaded", capsys.readouterr().err)
    engine.apply(UPDATES)
    batch = words_batch(4)
    assert distance(engine.score(batch, PAIR), reference.score(batch, PAIR)) < 1e-4
    engine.close()


def test_many_probes_share_a_request(servers, reference):
    """As many as the server takes adapters in a batch, beside the model itself."""
    engine = open_engine("sglang", spec_of(LORA, urls=(servers[0].url,), many_probes=True))
    requests, send = [], engine._score_share
    engine._score_share = lambda *asked: requests.append(len(asked[2])) or send(*asked)
    engine.apply(UPDATES)
    probes = [Probe(), *(Probe(((seed, 0.01),)) for seed in range(6))]
    for batch in (words_batch(), candidates_batch()):
        assert distance(engine.score(batch, probes), reference.score(batch, probes)) < 1e-4
    assert requests == [3, 3, 1] * 2
    engine.close()


def test_run_goes_on_after_many_other_clients(servers, reference, monkeypatch):
    """A server keeps the factors of those that it heard of last: a client that it has forgotten sends its own again."""
    monkeypatch.setattr(pool, "FIRST_LOOK", 0.1)
    engine = open_engine("sglang", spec_of(LORA, urls=(servers[0].url,)))
    engine.apply(UPDATES)
    expected = reference.score(words_batch(4), PAIR)
    (server,) = engine.pool.live
    for round_ in range(2):
        for number in range(MOST_CLIENTS):
            other = weights.UploadedLora(engine.spec, engine.facts, f"mezzo-other-{round_}-{number}")
            other.attach(server)
            (adapter,) = other.adapters(PAIR[:1], server)
            server.load_adapter(other.client, adapter, engine.adapter_shape)
            server.unload_adapter(other.client)
            if not round_:  # one that is in use is not forgotten
                assert distance(engine.score(words_batch(4), PAIR), expected) < 1e-4
    told = []
    engine.report = told.append
    assert distance(engine.score(words_batch(4), PAIR), expected) < 1e-4
    assert told[0].startswith("lost ") and told[-1] == f"{servers[0].url} is back"
    engine.close()


def test_prefixes_are_shared_only_within_a_probe(servers, reference):
    """The shared prefix is sent first; the same prompts at the next step have new adapters and reuse nothing."""
    engine = open_engine("sglang", spec_of(LORA, urls=(servers[0].url,)))
    engine.apply(UPDATES)
    prefix = tuple(range(100, 300))
    batch = words_batch(8, prefix=prefix)
    for _ in range(2):
        before = engine.token_counts.cached
        assert distance(engine.score(batch, PAIR), reference.score(batch, PAIR)) < 1e-4
        assert engine.token_counts.cached - before == 2 * 8 * len(prefix)
    engine.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"text": text, "label": label} for label, texts in SENTENCES.items() for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


OPTIONS = {
    "task": "sst-2",
    "steps": 8,
    "batch_size": 4,
    "rank": 4,
    "alpha": 8.0,
    "eps": 1e-2,
    "lr": 1e-3,
    "seed": 1,
    "threads": 1,
    "eval_every": 4,
}


def post(server: Server, path: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def assert_same_run(a, b):
    assert len(a) == len(b) == OPTIONS["steps"]
    np.testing.assert_allclose([r.losses for r in a], [r.losses for r in b], atol=1e-5)
    assert [[seed for seed, _ in r.update.terms] for r in a] == [[seed for seed, _ in r.update.terms] for r in b]


def test_servers_come_and_go(servers, data, tmp_path, monkeypatch):
    """One is frozen, one killed and started again, one renamed by somebody: the others go on, and it is taken back. When none
    is left, the run waits and then stops; resumed, it equals one that was never interrupted."""
    look_often(monkeypatch)
    options = {"train": data, "dev": data, **OPTIONS}
    uninterrupted = api.finetune(MODEL, engine="torch", out=tmp_path / "uninterrupted", **options)
    urls, out = tuple(server.url for server in servers), tmp_path / "served"
    session = api.open_session(MODEL, engine="sglang", url=urls, server_timeout=1.0, out=out, **options)
    live, records = session.engine.pool.live, session.records()

    def step_until(*expected: Server) -> None:
        """At least one step, and more until these are the servers that are used."""
        next(records)
        while {each.url for each in live} != {server.url for server in expected}:
            time.sleep(1)
            session.engine.pool.servers()

    step_until(*servers)
    asked = (words_batch(4), PAIR, Generation(4))
    texts = session.engine.generate(*asked)
    servers[1].freeze()
    assert session.engine.generate(*asked) == texts, "what a lost server should have written, the others write"
    step_until(servers[0])
    servers[1].thaw()
    step_until(*servers)
    servers[0].kill()
    servers[0] = Server(MODEL, tmp_path / "again.log", port=servers[0].port, more=DRAWS)
    step_until(servers[1])
    servers[0].ready()
    step_until(*servers)
    post(servers[0], "/update_weight_version", {"new_version": "renamed", "abort_all_requests": False})
    step_until(*servers)
    assert [next(records).step for _ in range(1)] == [6]
    servers[0].freeze()
    servers[1].freeze()
    with pytest.raises(RunFailed, match="--resume"):
        next(records)
    for server in servers:
        server.thaw()
    told = [event["text"] for event in Folder.open(out).metrics() if event["event"] == "worker"]
    for text in (f"lost {urls[0]}: 1 of 2", f"lost {urls[1]}: 1 of 2", f"{urls[0]} is back", "waiting up to 1 seconds"):
        assert any(text in line for line in told), (text, told)

    shutil.rmtree(out / "snapshots", ignore_errors=True)  # the journal alone must be enough
    run = api.finetune(resume=out, url=urls)
    assert run.accuracy == uninterrupted.accuracy
    assert_same_run(api.records(out), api.records(tmp_path / "uninterrupted"))
    assert api.verify(out).ok


def test_other_clients_get_the_same_answers(servers, data, tmp_path):
    """A tenant sends ordinary requests, without an adapter, while LoRA is trained on the server."""
    body = {"input_ids": list(range(100, 124)), "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    answers, done = [post(servers[1], "/generate", body)["output_ids"]], threading.Event()

    def tenant() -> None:
        while not done.is_set():
            answers.append(post(servers[1], "/generate", body)["output_ids"])

    thread = threading.Thread(target=tenant)
    thread.start()
    try:
        options = {"train": data, "dev": data, **OPTIONS, "lr": 1.0, "steps": 4}
        api.finetune(MODEL, engine="sglang", url=(servers[1].url,), out=tmp_path / "run", **options)
    finally:
        done.set()
        thread.join()
    assert len(answers) > 4 and all(answer == answers[0] for answer in answers)


def test_server_without_mezzo_cannot_train_matrices(servers):
    """Its loader could not be imported, which would end the server."""
    space = Space("matrices", noise_rank=4, only=("*.q_proj.*", "*.k_proj.*", "*.v_proj.*"))
    with pytest.raises(ConfigError, match="mezzo is not installed beside the server"):
        open_engine("sglang", spec_of(space, urls=(servers[1].url,), exclusive_server=True))


def test_example_takes_demonstrations_from_the_cache(servers, tmp_path):
    """The run's metrics and report tell how many tokens, by SGLang's own count."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "sglang_server.py", servers[1].url], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Folder.open(tmp_path / "runs" / "sglang-server")
    (line,) = [entry for entry in folder.metrics() if entry["event"] == "engine"]
    assert line["cached_tokens"] > 2 * line["computed_tokens"] > 0
    assert f"{line['cached_tokens']} tokens came from the prefix cache" in done.stdout
    assert f"{line['cached_tokens']:,} tokens of" in api.report(folder.path, out=tmp_path / "r.html").read_text()


def test_server_with_other_weights_is_refused(servers, tmp_path):
    """The same shapes and other weights, which only scores can tell."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mezzo.engines.hf_hub import locate
    from mezzo.errors import ModelError

    model = AutoModelForCausalLM.from_pretrained(locate(MODEL))
    model.model.layers[0].self_attn.q_proj.weight.data.neg_()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(locate(MODEL)).save_pretrained(tmp_path)
    spec = dataclasses.replace(spec_of(LORA, urls=(servers[1].url,)), model=str(tmp_path))
    with pytest.raises(ModelError, match="another model"):
        open_engine("sglang", spec)
