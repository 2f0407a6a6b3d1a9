"""Servers that answer nonsense, send the client elsewhere or echo its key: one line, no second host, no secret shown."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo import api
from mezzo.cli import main
from mezzo.engines.sglang.server import connection
from mezzo.engines.sglang.server.loader import DIGESTS, STATUS, digest_part
from mezzo.method import noise
from tests.conftest import scale_up_weights, train_tokenizer
from tests.hostile.fake_sglang import FakeServer
from tests.hostile.test_fuzz import DELETED, REPLACEMENTS, json_paths, replace_at


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A causal model of a few thousand parameters with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("tiny-llama"), train_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=1, **sizes)
    scale_up_weights(LlamaForCausalLM(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(folder) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def server(model, monkeypatch) -> Iterator[FakeServer]:
    monkeypatch.delenv("MEZZO_API_KEY", raising=False)
    with FakeServer(model) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def data(workspace: Path) -> Path:
    rows = [{"text": "a fine film", "label": "positive"}, {"text": "a dull and lifeless film", "label": "negative"}]
    path = workspace / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    return path


@pytest.fixture
def evaluation(server: FakeServer, folder: str, data: Path) -> list[str]:
    """The command that evaluates a model on the server."""
    model = ["--model", folder, "--task", "sst-2", "--engine", "sglang", "--url", server.url]
    return ["eval", *model, "--data", str(data), "--threads", "1"]


@pytest.fixture
def training(server: FakeServer, folder: str, data: Path, workspace: Path) -> list[str]:
    """The command that trains a model on the server."""
    model = ["--model", folder, "--task", "sst-2", "--engine", "sglang", "--url", server.url, "--batch-size", "2"]
    limits = ["--steps", "6", "--eval-every", "6", "--threads", "1", "--out", str(workspace / "run")]
    return ["train", *model, "--train", str(data), "--dev", str(data), *limits]


def change_at(server: FakeServer, path: str, change: Any) -> None:
    """Answer requests of that path by `change(value)` of the honest answer."""
    answer = server.change
    server.change = lambda at, data: (
        (200, {}, json.dumps(change(json.loads(data))).encode()) if at == path else answer(at, data)
    )


def test_honest_server_is_used(server, evaluation, training, folder, data):
    """The other tests would pass if every server were refused."""
    options = {"model": folder, "data": str(data), "task": "sst-2", "threads": 1}
    found = api.evaluate(engine="sglang", url=(server.url,), **options)
    assert found.loss == pytest.approx(api.evaluate(device="cpu", **options).loss, abs=1e-4)
    assert main([*evaluation, "--readout", "candidates"]) == 0
    assert main(training) == 0


# ---- nonsense

NONSENSE: dict[str, Any] = {
    "missing meta_info": lambda rows: [{} for _ in rows],
    "missing fields": lambda rows: [{"meta_info": {"weight_version": "default"}} for _ in rows],
    "short list": lambda rows: rows[:-1],
    "long list": lambda rows: [*rows, rows[0]],
    "no rows": lambda rows: [],
    "text": lambda rows: "all is well",
    "null": lambda rows: None,
    "number": lambda rows: 10**30,
    "rows of text": lambda rows: ["x"] * len(rows),
    "other version": lambda rows: [row | {"meta_info": row["meta_info"] | {"weight_version": 7}} for row in rows],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_scores_are_refused_in_one_line(name, server, evaluation, expect_refusal):
    change_at(server, "/generate", NONSENSE[name])
    assert server.url in expect_refusal(*evaluation)


@pytest.mark.parametrize("value", ["x", [], {}, True, 1e300, 10**400])
def test_scores_of_other_types_are_refused_in_one_line(value, server, evaluation, expect_refusal):
    def change(rows: Any) -> Any:
        for row in rows:
            row["meta_info"]["output_token_ids_logprobs"][0][0][0] = value
        return rows

    change_at(server, "/generate", change)
    assert server.url in expect_refusal(*evaluation)


def test_fewer_log_probabilities_than_tokens_are_refused(server, evaluation, run_command):
    """The sum over fewer tokens would pass for a good score."""

    def change(rows: Any) -> Any:
        for row in rows:
            row["meta_info"]["input_token_logprobs"] = row["meta_info"]["input_token_logprobs"][:-1]
        return rows

    change_at(server, "/generate", change)
    code, stderr = run_command(*evaluation, "--readout", "candidates")
    assert code == 1 and "log-probabilities of other tokens" in stderr


@pytest.mark.parametrize("path", ["/server_info", "/model_info", "/generate"])
@pytest.mark.parametrize("data_sent", [b"[" * 100_000, b"{", b"\xff\xfe", b"", b"NaN", b"[" * 900 + b"]" * 900])
def test_answers_that_are_no_json_are_refused_in_one_line(path, data_sent, server, evaluation, expect_refusal):
    honest = server.change
    server.change = lambda at, sent: (200, {}, data_sent) if at == path else honest(at, sent)
    assert server.url in expect_refusal(*evaluation)


@pytest.mark.parametrize(
    "headers", [{"Content-Length": "1000"}, {"Content-Length": "x"}, {"Transfer-Encoding": "chunked"}]
)
def test_broken_http_is_refused_in_one_line(headers, server, evaluation, expect_refusal):
    server.change = lambda path, sent: (200, headers, sent if path != "/generate" else b"zz\r\n")
    assert server.url in expect_refusal(*evaluation)


def test_endless_answer_is_refused(server, evaluation, expect_refusal, monkeypatch):
    monkeypatch.setattr(connection, "LARGEST_ANSWER", 100_000)
    change_at(server, "/generate", lambda rows: [*rows, "x" * 200_000])
    assert "more than 100,000 bytes" in expect_refusal(*evaluation)


def test_server_that_begins_an_answer_and_stops_is_given_up(monkeypatch):
    """As it looks on an encrypted connection, whose first bytes are none of the answer: those do not end the looking."""
    monkeypatch.setattr(connection, "LOOK_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/generate"
        waiting: list[socket.socket] = []
        threading.Thread(target=lambda: waiting.append(listener.accept()[0]), daemon=True).start()
        looks = [True, True, False]

        def still_there() -> bool:
            if len(looks) == 3:
                waiting[0].sendall(b"HTTP/1.1 200 OK\r\n")
            return looks.pop(0)

        with pytest.raises(connection.BadAnswer, match="it stopped answering") as caught:
            connection.send(url, {}, 60, still_there)
        assert caught.value.lost and not looks
        waiting[0].close()


DRIPS = {
    "head": (b"HTTP/1.1 200 OK\r\n", b"X"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n", b" "),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("first", DRIPS)
def test_server_that_answers_byte_by_byte_is_given_up(first):
    """Each byte starts a socket's own timeout again."""
    begin, drip = DRIPS[first]
    done = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as client:
            client.sendall(begin)
            while not done.wait(0.05):
                client.sendall(drip)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        try:
            with pytest.raises(connection.BadAnswer, match="it stopped answering") as error:
                connection.send(f"http://127.0.0.1:{listener.getsockname()[1]}/model_info", None, 1.0)
        finally:
            done.set()
    assert error.value.lost


def test_redirect_is_not_followed(server, model, evaluation, expect_refusal):
    with FakeServer(model) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        for path in ("/server_info", "/generate"):
            for status in (301, 302, 303, 307, 308):
                server.change = lambda at, sent, path=path, status=status: (
                    (status, {"Location": other.url + at}, b"") if at == path else (200, {}, sent)
                )
                expect_refusal(*evaluation)
        other.shutdown()
        assert not other.requests


@settings(max_examples=60)
@given(path=st.sampled_from(["/server_info", "/model_info", "/generate"]), pick=st.integers(0, 10**6), new=REPLACEMENTS)
def test_answers_with_a_changed_value_never_crash(server, evaluation, run_command, path, pick, new):
    def change(value: Any) -> Any:
        paths = json_paths(value)
        chosen = paths[pick % len(paths)]
        return replace_at(value, chosen, new) if chosen else None if new is DELETED else copy.copy(new)

    server.change = lambda at, sent: (200, {}, sent)
    change_at(server, path, change)
    code, stderr = run_command(*evaluation)
    assert code in (0, 1, 2), stderr


MOVED = "model.layers.0.self_attn.q_proj.weight"


@settings(max_examples=30)
@given(question=st.sampled_from([STATUS, DIGESTS]), pick=st.integers(0, 10**6), new=REPLACEMENTS | st.just("load"))
def test_answers_of_the_loader_with_a_changed_value_never_crash(
    server, model, evaluation, run_command, question, pick, new
):
    """It says that a dead run has changed a matrix, which the client then puts back and compares."""
    names = {"version": "mezzo-x.1", "owner": "mezzo-x", "base_name": "default", "error": "", "noise": noise.VERSION}
    status = {**names, "moved": [MOVED], "silent_seconds": 1e9, "makes_adapters": False}
    digest = digest_part(model.get_parameter(MOVED))
    server.loader = {STATUS: [status], DIGESTS: [[[MOVED, [0, 16], [0, 16], "float32", digest]]]}
    paths = json_paths(server.loader[question])
    chosen = paths[pick % len(paths)]
    if chosen and isinstance(changed := replace_at(server.loader[question], chosen, new), list):
        server.loader[question] = changed
    code, stderr = run_command(*evaluation)
    assert code in (0, 1, 2), stderr


def test_server_that_turns_bad_ends_the_run_and_keeps_its_journal(server, training, workspace, capsys):
    out = workspace / "run"
    honest = server.change

    def change(path: str, sent: bytes) -> tuple[int, dict[str, str], bytes]:
        done = (out / "journal.jsonl").exists() and (out / "journal.jsonl").read_bytes().count(b'{"step":') > 2
        return (200, {}, b"[{}]") if done and path == "/generate" else honest(path, sent)

    server.change = change
    assert main(training) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "The journal holds the run up to here" in error.splitlines()[-1]
    assert len(api.records(out)) >= 3


# ---- keys


def test_api_key_is_sent_and_never_stored_or_shown(server, training, workspace, monkeypatch, capsys):
    server.api_key = "secret-key-123"
    assert main(training) == 2
    assert "MEZZO_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("MEZZO_API_KEY", "secret-key-123")
    assert main(training) == 0
    assert main(["report", str(workspace / "run")]) == 0
    assert main(["export", str(workspace / "run"), "journal"]) == 0
    output = capsys.readouterr()
    assert "secret" not in output.out + output.err
    for path in (workspace / "run").rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path


@pytest.mark.parametrize("key", ["secret\nkey", "secret\x1bkey", "sécret"])
def test_impossible_api_key_is_refused_without_showing_it(key, server, evaluation, expect_refusal, monkeypatch):
    monkeypatch.setenv("MEZZO_API_KEY", key)
    message = expect_refusal(*evaluation)
    assert "MEZZO_API_KEY" in message
    assert "cret" not in message


def test_key_that_a_server_echoes_is_not_shown(server, evaluation, expect_refusal, monkeypatch):
    monkeypatch.setenv("MEZZO_API_KEY", "secret-key-123")
    server.change = lambda path, sent: (
        (200, {}, sent) if path != "/generate" else (500, {}, b"Bearer secret-key-123 failed")
    )
    message = expect_refusal(*evaluation)
    assert "HTTP 500" in message
    assert "secret" not in message
