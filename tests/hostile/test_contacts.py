"""Nothing that a file names leaves this machine: no hub, no tracker, no server is contacted unless the user names it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mezzo import api
from mezzo.cli import main
from mezzo.engines.hf_hub import locate, needs_hub
from mezzo.journal.content import NAME
from tests.hostile.files import copy_run, eval_command, read_json_lines, write_journal
from tests.processes import patience

# A module of this name in the current folder notes that it was used.
FAKES = {
    "wandb": "def init(**_): open('contacted', 'w')\ndef log(*_, **__): ...\ndef finish(): ...\n",
    "datasets": "def load_dataset(*_, **__):\n    open('contacted', 'w')\n    raise ValueError('no such data')\n",
}


def change_settings(run: Path, **settings: object) -> Path:
    """Change the configuration in both the journal and config.json."""
    journal = read_json_lines(run / NAME)
    journal[0]["config"] |= settings
    write_journal(run / NAME, journal)
    stored = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(stored | settings))
    return run


@pytest.fixture
def contacted(workspace, monkeypatch) -> Path:
    """The file that exists once a tracker or the data set library was used."""
    for name, code in FAKES.items():
        (workspace / "here" / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(workspace / "here"))
    yield workspace / "here" / "contacted"
    for name in FAKES:
        sys.modules.pop(name, None)


class Hub(ThreadingHTTPServer):
    """In place of the model hub: has nothing, and counts connections."""

    daemon_threads = True
    connections = 0

    class RequestHandlerClass(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)

    def get_request(self) -> tuple[socket.socket, object]:
        self.connections += 1
        return super().get_request()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run_online(hub: Hub, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that takes `hub` for the model hub."""
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    online = {name: value for name, value in os.environ.items() if name not in offline}
    online |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(cache)}
    command = [sys.executable, "-m", "mezzo", *arguments]
    return subprocess.run(command, env=online, capture_output=True, text=True, timeout=patience(300))


# ---- trackers and data sets


@pytest.mark.parametrize("source", ["--resume", "--config"])
@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"track": ["wandb"]}, "--track NAMES"),
        ({"train": "hub:somebody/x"}, "--train DATA"),
        ({"dev": "hub:somebody/x"}, "--dev DATA"),
        ({"test": "hub:somebody/x"}, "--test DATA"),
    ],
)
def test_tracker_or_data_set_in_a_file_is_not_used(
    setting, flag, source, valid_run, expect_refusal, workspace, contacted
):
    run = change_settings(copy_run(valid_run, workspace), **setting)
    message = expect_refusal("train", source, str(run), *(["--steps", "6"] if source == "--resume" else []))
    assert flag in message
    assert not contacted.exists()


def test_tracker_named_again_is_used(valid_run, workspace, contacted):
    run = change_settings(copy_run(valid_run, workspace), track=["wandb"])
    assert main(["train", "--resume", str(run), "--steps", "5", "--track", "wandb"]) == 0
    assert contacted.exists()


def test_data_set_must_be_the_same_when_it_is_named_again(valid_run, expect_refusal, workspace, contacted):
    run = change_settings(copy_run(valid_run, workspace), dev="hub:somebody/x")
    resume = ["train", "--resume", str(run), "--steps", "6", "--dev"]
    assert "dev cannot change" in expect_refusal(*resume, "hub:somebody/other")
    assert not contacted.exists()
    assert main([*resume, "hub:somebody/x"]) == 2  # asked for, and not found
    assert contacted.exists()


def test_eval_does_not_load_a_data_set_of_the_journal(valid_run, tiny_data, expect_refusal, workspace, contacted):
    run = change_settings(copy_run(valid_run, workspace), train="hub:somebody/x")
    assert api.verify(run).ok
    assert main(["eval", str(run), "--data", tiny_data]) == 0
    run = change_settings(run, demonstrations=1)
    assert "--train DATA" in expect_refusal("eval", str(run), "--data", tiny_data)
    assert not contacted.exists()


@pytest.mark.parametrize(
    ("group", "hidden"),
    [
        ("run", {"track": ["wandb"]}),
        ("method", {"objective": "evil:loss"}),
        ("workers", {"ray_address": "127.0.0.1:9"}),
        ("model", {"model": "TINY", "url": ["http://127.0.0.1:9"]}),
    ],
)
def test_table_in_a_run_folder_hides_no_option(
    group, hidden, valid_run, tiny_folder, expect_refusal, workspace, contacted
):
    (workspace / "here" / "evil.py").write_text(
        "open('contacted', 'w')\ndef loss(scores, batch): return scores.sum((1, 2))\n"
    )
    hidden = {name: tiny_folder if value == "TINY" else value for name, value in hidden.items()}
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    others = {name: value for name, value in journal[0]["config"].items() if name not in hidden}
    journal[0]["config"] = others | {group: hidden}
    write_journal(run / NAME, journal)
    (run / "config.json").unlink()
    name = list(hidden)[-1].replace("_", "-")
    assert f"--{name}" in expect_refusal("train", "--resume", str(run), "--steps", "6")
    assert not contacted.exists()


# ---- the model hub


@pytest.mark.parametrize(
    "command", ["verify RUN", "eval RUN", "export RUN adapter", "train --resume RUN", "train --config RUN"]
)
def test_model_in_a_file_is_not_asked_for_at_the_hub(command, valid_run, workspace, hub):
    run = change_settings(copy_run(valid_run, workspace), model="somebody/model")
    done = run_online(hub, workspace / "cache", *command.replace("RUN", str(run)).split())
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("continuing ")]
    assert len(said) == 1 and "--model" in said[0], done.stderr
    assert not hub.connections


def test_model_on_the_command_line_is_asked_for_at_the_hub(workspace, hub):
    """The other tests would pass if this server were not taken for the hub."""
    done = run_online(hub, workspace / "cache", "eval", "--model", "somebody/model")
    assert done.returncode == 2, done.stderr
    assert hub.connections


def test_cached_model_in_a_file_is_used_without_the_hub(valid_run, tiny_folder, workspace, hub):
    snapshot = workspace / "cache" / "hub" / "models--somebody--model" / "snapshots" / "0123"
    shutil.copytree(tiny_folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    run = change_settings(copy_run(valid_run, workspace), model="somebody/model")
    done = run_online(hub, workspace / "cache", "verify", str(run))
    assert done.returncode == 0, done.stderr
    (snapshot / "model.safetensors").unlink()
    assert run_online(hub, workspace / "cache", "verify", str(run)).returncode == 2
    assert not hub.connections


def test_local_model_that_refers_to_the_hub_does_not_contact_it(tiny_folder, tiny_data, workspace, hub):
    folder = workspace / "model"
    shutil.copytree(tiny_folder, folder)
    for name, values in {
        "config.json": {"_name_or_path": "somebody/x", "auto_map": {"AutoConfig": "somebody/x--code.Config"}},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["somebody/x--code.Tokenizer", None]}},
        "adapter_config.json": {"base_model_name_or_path": "somebody/x", "peft_type": "LORA"},
    }.items():
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | values))
    run_online(hub, workspace / "cache", *eval_command(folder, tiny_data))
    assert not hub.connections


def test_only_hub_names_need_the_hub(tiny_folder):
    assert needs_hub("roberta-large") and needs_hub("somebody/model")
    for name in ("mezzo/roberta-mini", "mezzo/nothing", tiny_folder, "/nowhere", "./nowhere", "a/b/c"):
        assert not needs_hub(name)
    assert locate("somebody/model") == "somebody/model"
