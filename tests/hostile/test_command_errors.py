"""Names that no system takes, files that cannot be read, texts of megabytes: one line, and exit code 2."""

from __future__ import annotations

import errno
import http.client
import io
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from mezzo import api, reports
from mezzo.cli import main
from mezzo.cli.error_line import MAX_CHARACTERS, error_line
from mezzo.cli.rows import write_rows
from tests.hostile.files import copy_run, read_json_lines, write_journal

LONG = "a" * 5000


def deny(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int = errno.EACCES) -> None:
    """Make a folder fail as one without permission does; root may read everything."""
    real_stat, real_scandir, real_listdir = os.stat, os.scandir, os.listdir

    def guard(real):
        def call(path=".", *args, **kwargs):
            inside = os.fspath(path) if not isinstance(path, int) else ""
            if inside.startswith(f"{folder}/") or (inside == str(folder) and real is not real_stat):
                raise OSError(number, os.strerror(number), inside)
            return real(path, *args, **kwargs)

        return call

    for name, real in (("stat", real_stat), ("scandir", real_scandir), ("listdir", real_listdir)):
        monkeypatch.setattr(os, name, guard(real))


# ---- names of files


@pytest.mark.parametrize(
    "command",
    [
        ["predict", "This film was a delight. " * 20],
        ["eval", "--model", LONG],
        ["train", "--train", LONG],
        ["train", "--config", LONG],
        ["train", "--resume", LONG],
        ["report", LONG],
        ["runs", LONG],
        ["verify", LONG],
        ["tasks", "suggest", LONG],
    ],
    ids=lambda command: " ".join(command)[:20],
)
def test_a_name_that_is_too_long_is_refused_in_one_line(command, expect_refusal, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a text\n"))
    message = expect_refusal(*command)
    assert len(message) < MAX_CHARACTERS + 100


def test_the_reason_stays_when_a_name_is_shortened(expect_refusal):
    assert expect_refusal("runs", LONG).endswith(": File name too long\n")


def test_a_long_model_name_in_a_journal_is_refused_in_one_line(valid_run, workspace, expect_refusal):
    run = copy_run(valid_run, workspace)
    lines = read_json_lines(run / "journal.jsonl")
    lines[0]["config"]["model"] = LONG
    write_journal(run / "journal.jsonl", lines)
    for command in (["verify"], ["train", "--resume"]):
        message = expect_refusal(*command, str(run))
        assert message.count("\n") == 1 and len(message) < MAX_CHARACTERS + 100


def test_export_to_a_name_that_is_too_long_is_refused(valid_run, workspace, expect_refusal):
    run = copy_run(valid_run, workspace)
    assert "File name too long" in expect_refusal("export", str(run), "journal", "--out", LONG)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(workspace, capsys, monkeypatch):
    (workspace / "closed").mkdir()
    deny(monkeypatch, workspace / "closed", errno.EIO)
    assert main(["eval", str(workspace / "closed")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mezzo: ") and err.count("\n") == 1
    assert "/closed/" in err and err.endswith(": Input/output error\n")


def test_an_error_of_the_system_without_a_name_is_one_line(capsys, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(api, "verify", fail)
    assert main(["verify", "run"]) == 1
    assert capsys.readouterr().err == "mezzo: the operating system cannot read or write: Input/output error\n"


def test_a_folder_is_refused_where_a_file_is_to_be_written(valid_run, workspace, expect_refusal):
    run = copy_run(valid_run, workspace)
    for command in (["report", str(run)], ["export", str(run), "journal"]):
        assert "--out . is a folder; name a file" in expect_refusal(*command, "--out", ".")


# ---- several runs


@pytest.fixture
def two_folders(valid_run, workspace):
    """A folder of a good run and, beside it, another folder."""
    shutil.copytree(valid_run, workspace / "run" / "good")
    (workspace / "run" / "odd").mkdir()
    return workspace / "run"


@pytest.mark.parametrize("command", ["runs", "report"])
def test_an_unreadable_folder_does_not_hide_other_runs(command, two_folders, capsys, monkeypatch):
    deny(monkeypatch, two_folders / "odd")
    assert main([command, str(two_folders)]) == 0
    out, err = capsys.readouterr()
    assert "good" in out
    assert err.count("\n") == 1 and "left out: " in err and "Permission denied" in err


def test_an_unreadable_folder_that_is_named_is_an_error(two_folders, expect_refusal, monkeypatch):
    deny(monkeypatch, two_folders / "odd")
    assert "Permission denied" in expect_refusal("runs", str(two_folders / "odd"))


def test_files_without_a_time_do_not_hide_a_run(valid_run, two_folders, capsys, monkeypatch):
    (two_folders / "good" / "dangling.jsonl").symlink_to("nowhere")
    assert main(["runs", str(two_folders)]) == 0
    assert " 20" in capsys.readouterr().out  # the year of its other files
    monkeypatch.setattr("time.localtime", lambda _: (_ for _ in ()).throw(OSError(75, "Value too large")))
    assert main(["runs", str(two_folders)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("–")


# ---- texts


def test_long_errors_keep_their_beginning_and_their_end():
    line = error_line("beginning " + "x" * 15_000_000 + " end")
    assert len(line) < MAX_CHARACTERS + 10
    assert line.startswith("beginning ") and line.endswith(" end")


def test_a_password_is_not_cut_in_two():
    line = error_line("http://user:" + "secret" * 500 + "@host is not found")
    assert "secret" not in line and "host is not found" in line


def test_a_long_option_name_in_a_journal_gives_a_short_error(valid_run, workspace, expect_refusal):
    run = copy_run(valid_run, workspace)
    lines = read_json_lines(run / "journal.jsonl")
    lines[0]["config"]["o" * 1_000_000] = 1
    write_journal(run / "journal.jsonl", lines)
    assert len(expect_refusal("train", "--resume", str(run))) < MAX_CHARACTERS + 100


def test_an_unknown_option_is_shown_without_its_terminal_codes(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["runs", "--\x1b[31mred"])
    assert exit.value.code == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("format", ["csv", "tsv"])
def test_column_names_of_a_table_are_escaped_like_its_cells(format):
    file = io.StringIO()
    write_rows([{"a\x1b[31m": "b\x1b[31m"}], format, file)
    assert file.getvalue() == "a\\u001b[31m\nb\\u001b[31m\n"


# ---- the live page


@pytest.fixture
def server(valid_run):
    with reports.make_server([valid_run]) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_address_that_cannot_be_read_is_answered_with_400(server, capsys):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as connection:
        connection.sendall(b"GET http://[x HTTP/1.1\r\nHost: 127.0.0.1:1\r\nConnection: close\r\n\r\n")
        answer = connection.makefile("rb").readline()
    assert b" 400 " in answer
    assert capsys.readouterr().err == ""


def test_a_page_that_cannot_be_made_is_one_line_and_no_traceback(server, capsys, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("\x1b[31mboom")

    monkeypatch.setattr("mezzo.reports.live.compare", fail)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    connection.request("GET", server.url.split(str(server.server_port))[1])
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.getresponse()
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "boom" in err and "\x1b" not in err


# ---- exports


@pytest.mark.parametrize("place", [("config", "model"), ("task", "name")])
def test_a_model_card_does_without_what_the_header_does_not_say(valid_run, place):
    from mezzo.journal.content import read
    from mezzo.runs.model_card import model_card

    content = read(valid_run)
    table, name = place
    del getattr(content.header, table)[name]
    assert "unknown" in model_card("adapter", content.header, content.events, 4, 4)
