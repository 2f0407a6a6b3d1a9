"""Credentials in an address are refused, and stripped from what older files hold before it is shown or shared."""

from __future__ import annotations

import contextlib
import json

import pytest

from mezzo import api
from mezzo.cli import main
from mezzo.errors import ConfigError
from mezzo.journal.content import NAME
from mezzo.runs.folder import Folder
from mezzo.runs.reopen import open_journal
from mezzo.untrusted import without_credentials
from tests.hostile.files import copy_run, read_compact_header, read_json_lines, write_journal

URL = "http://user:hunter2@127.0.0.1:9"
KEY_URL = "http://127.0.0.1:9/?api_key=hunter2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (URL, "http://127.0.0.1:9"),
        (f'["{URL}/a","{URL}"]', '["http://127.0.0.1:9/a","http://127.0.0.1:9"]'),
        ("https://p@ss@host/x@y", "https://host/x@y"),
        ("ray://:token@host:1 and me@example.org", "ray://host:1 and me@example.org"),
        ("https://host/@user http://[::1]:3/?q=a@b", "https://host/@user http://[::1]:3/"),
        (KEY_URL, "http://127.0.0.1:9/"),
        (f"is it {KEY_URL}, or http://h#token=x?", "is it http://127.0.0.1:9/, or http://h"),
        (f"['{KEY_URL}', '{KEY_URL}']", "['http://127.0.0.1:9/', 'http://127.0.0.1:9/']"),
        (f'{{"url": "{KEY_URL}"}}', '{"url": "http://127.0.0.1:9/"}'),
        ("http:/h?key=hün'ter2", "http:/h"),
        ("a question? yes: 3/4 #1", "a question? yes: 3/4 #1"),
    ],
)
def test_credentials_are_stripped_from_addresses(text, expected):
    assert without_credentials(text) == expected


@pytest.mark.parametrize("url", [URL, "http://hunter2@h", "http://h/?api_key=hunter2", "http://h:1,http://u:hunter2@h"])
def test_address_with_credentials_is_refused_without_showing_them(url, expect_refusal, workspace):
    commands = [["train", "--engine", "sglang"], ["eval", "--engine", "sglang"]]
    for command in commands:
        message = expect_refusal(*command, "--url", url)
        assert "MEZZO_API_KEY" in message
        assert "hunter2" not in message
    with pytest.raises(ConfigError) as caught:
        api.finetune(engine="sglang", url=url, out=str(workspace / "run"))
    assert "hunter2" not in str(caught.value)
    assert not (workspace / "run").exists()


def test_ray_address_with_credentials_is_refused(expect_refusal):
    assert "hunter2" not in expect_refusal("train", "--workers", "1", "--ray-address", "ray://u:hunter2@h:1")


@pytest.mark.parametrize("arguments", [["--train", URL], ["--model", URL], ["--task", URL], [URL], ["--device", URL]])
def test_credentials_in_another_place_are_not_shown(arguments, capsys, workspace):
    with contextlib.suppress(SystemExit):  # by which the parser ends
        assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert "127.0.0.1" in error
    assert "hunter2" not in error


def test_addresses_without_an_end_take_no_time():
    assert without_credentials("a:/" * 300_000 + "?") == "a:/" * 300_000


@pytest.mark.parametrize("url", [URL, KEY_URL, "http://127.0.0.1:9/#hunter2"])
def test_credentials_in_an_old_run_are_neither_shown_nor_shared(url, valid_run, workspace, capsys):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    journal[0]["config"] |= {"url": [url], "engine": "sglang"}
    journal[0]["engine"] |= {"device": url}
    write_journal(run / NAME, journal)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"url": [url]}))
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"event": "command", "text": f"mezzo train --url {url}"}) + "\n")
        metrics.write(json.dumps({"event": "start", "device": url}) + "\n")
        metrics.write(json.dumps({"event": "failed", "text": f"the server at {url} failed"}) + "\n")
    assert main(["report", str(run), "--out", str(workspace / "run" / "r.html")]) == 0
    assert main(["runs", str(run), "--json"]) == 0
    assert main(["train", "--resume", str(run)]) == 2
    assert main(["export", str(run), "journal", "--out", str(run / "j.mezzo")]) == 0
    assert main(["export", str(run), "adapter", "--out", str(run / "adapter")]) == 0
    output = capsys.readouterr()
    assert "127.0.0.1:9" in output.out
    shared = [output.out, output.err, (run / "r.html").read_text(), json.dumps(read_compact_header(run / "j.mezzo"))]
    shared += [path.read_text(errors="replace") for path in (run / "adapter").iterdir()]
    for text in shared:
        assert "hunter2" not in text
    assert "127.0.0.1:9" in shared[2]
    assert api.verify(run / "j.mezzo").ok
    assert "hunter2" not in str(open_journal(run).header)
    with pytest.raises(ConfigError, match="this run used --url") as refused:
        api.finetune(resume=run)
    shared = [str(refused.value), str(Folder(run).read_config()), str(list(Folder(run).metrics()))]
    assert not [text for text in shared if "hunter2" in text]


def test_metrics_keep_no_credentials(tmp_path):
    folder = Folder(tmp_path)
    folder.note("failed", {"text": f"{URL} refused", "urls": [{"of": "http://h/?key=ü\\hunter2"}]})
    folder.close()
    assert "hunter2" not in (tmp_path / "metrics.jsonl").read_text()
