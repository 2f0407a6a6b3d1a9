"""Codes that a terminal obeys are shown, not sent, wherever they come from a file: by every command and on every page."""

from __future__ import annotations

import io
import json
import re
import tomllib
from dataclasses import replace

import pytest

from mezzo.cli import main
from mezzo.cli.progress import event_line, say
from mezzo.journal.content import NAME, read
from mezzo.runs.model_card import model_card
from mezzo.untrusted import printable
from tests.hostile.files import copy_run, read_json_lines, write_journal

# A window title, a colour, the same by an 8-bit code, a line that runs backwards, half a character.
CODES = "a\x1b]0;owned\x07b\x1b[31mc\x9b31md\u202ee\ud800f\x7f"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def assert_harmless(shown: str) -> None:
    assert "\\u001b]0;owned" in shown
    assert not OBEYED.search(shown)


def test_printable_text_is_unchanged():
    for text in ("two\nlines\tand a tab", "naïve → 日本語 😀 👩‍💻\u00a0!", ""):
        assert printable(text) == text
    assert printable("\x1b[0m") == "\\u001b[0m"


def test_report_shows_codes_in_a_failure(valid_run, workspace, capsys):
    run = copy_run(valid_run, workspace)
    (run / "metrics.jsonl").write_text(json.dumps({"event": "failed", "text": CODES}) + "\n")
    assert main(["report", str(run)]) == 0
    assert_harmless(capsys.readouterr().out)
    assert_harmless((run / "report.html").read_text())


def test_charts_show_codes_and_formulas_as_text(valid_run, workspace):
    run = copy_run(valid_run, workspace)
    path = run / "metrics.jsonl"
    events = read_json_lines(path)
    for event in events:
        event |= {"metric": CODES + r"$\frac$"} if "metric" in event else {}
        event |= {"tested_on": CODES + r"$\frac$"} if event["event"] == "result" else {}
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["report", str(run), "--plots", str(run / "plots")]) == 0
    assert (run / "plots" / "metric.svg").is_file()
    other = run.rename(workspace / r"run$\frac$")
    assert (
        main(["report", str(valid_run), str(other), "--out", str(other / "r.html"), "--plots", str(other / "p")]) == 0
    )


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_task_file_with_codes_is_shown_or_refused(suffix, workspace, capsys):
    codes = CODES.replace("\ud800", "")
    task = {
        "name": codes,
        "columns": ["text"],
        "template": "{text} [MASK]",
        "labels": ["a", "b"],
        "words": [codes, "b"],
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in task.items()]
    (workspace / f"task.{suffix}").write_text(json.dumps(task) if suffix == "json" else "\n".join(lines))
    assert main(["tasks", "show", str(workspace / f"task.{suffix}")]) == 0
    assert_harmless(capsys.readouterr().out)


def test_model_path_in_a_journal_is_shown(valid_run, workspace, capsys):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    journal[0]["config"]["model"] = "/" + CODES.replace("\ud800", "")
    write_journal(run / NAME, journal)
    for command in (["verify", str(run)], ["train", "--resume", str(run)], ["eval", str(run)]):
        assert main(command) == 2
        assert_harmless(capsys.readouterr().err)


def test_verify_shows_codes_in_a_digest(valid_run, workspace, capsys):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    for line in journal:
        line |= {"digest": "\x1b]0;owned"} if "mark" in line else {}
    write_journal(run / NAME, journal)
    assert main(["verify", str(run)]) == 1
    assert_harmless(capsys.readouterr().out)


def test_predictions_are_printed_as_harmless_json(tiny_folder, workspace, capsys):
    codes = CODES.replace("\ud800", "")
    (workspace / "data.jsonl").write_text(json.dumps({"text": codes}) + "\n")
    command = ["predict", "--model", tiny_folder, "--task", "sst-2", "--data", str(workspace / "data.jsonl")]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert_harmless(shown)
    assert json.loads(shown)["text"] == codes


def test_events_are_shown_without_codes():
    assert_harmless(event_line("warning", {"text": CODES}))


def test_what_is_said_has_no_codes_and_no_passwords(capsys):
    say(f"{CODES} http://user:password@host/", colour=31)
    shown = capsys.readouterr().out
    assert shown.startswith("\x1b[31m") and shown.endswith("\x1b[0m\n")
    assert_harmless(shown.removeprefix("\x1b[31m").removesuffix("\x1b[0m\n"))
    assert shown.removesuffix("\x1b[0m\n").endswith(" http://host/")


def test_summary_shows_codes_of_examples_and_labels(tiny_folder, workspace, capsys):
    codes = CODES.replace("\ud800", "")
    rows = [{"text": f"{codes} {n}", "label": ("bad", codes)[n % 2]} for n in range(12)]
    (workspace / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "name": codes,
        "columns": ["text"],
        "template": "{text} [MASK]",
        "labels": ["bad", codes],
        "words": ["terrible", "great"],
    }
    (workspace / "task.json").write_text(json.dumps(task))
    data, out = str(workspace / "data.jsonl"), str(workspace / "run")
    command = ["train", "--model", tiny_folder, "--task", str(workspace / "task.json"), "--train", data, "--test", data]
    assert main([*command, "--method", "spsa", "--steps", "2", "--threads", "1", "--device", "cpu", "--out", out]) == 0
    shown = capsys.readouterr()
    assert_harmless(shown.out)
    assert not OBEYED.search(shown.err)


def test_proposed_task_is_shown_without_codes(tiny_folder, workspace, capsys):
    codes = CODES.replace("\ud800", "")
    rows = [{"text": f"{codes} number {n}", "label": ("bad", codes)[n % 2]} for n in range(40)]
    (workspace / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = workspace / "task.toml"
    assert main(["tasks", "new", str(workspace / "data.jsonl"), "--model", tiny_folder, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert not OBEYED.search(shown.out + shown.err)
    assert not OBEYED.search(out.read_text())
    assert main(["tasks", "show", str(out)]) == 0


def test_printed_configuration_is_harmless_and_can_be_read_again(tiny_folder, tiny_data, workspace, capsys):
    template = "{text} 😀" + CODES.replace("\ud800", "") + " [MASK]"
    command = ["train", "--model", tiny_folder, "--task", "sst-2", "--train", tiny_data, "--print-config"]
    assert main([*command, "--template", template]) == 0
    shown = capsys.readouterr().out
    assert_harmless(shown)
    (workspace / "c.toml").write_text(shown)
    assert main(["train", "--config", str(workspace / "c.toml"), "--print-config"]) == 0
    assert capsys.readouterr().out == shown


def test_configuration_printed_in_ascii_can_be_read_again(tiny_folder, tiny_data, workspace, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", shown)
    command = ["train", "--model", tiny_folder, "--task", "sst-2", "--train", tiny_data, "--print-config"]
    assert main([*command, "--template", "{text} 😀é [MASK]"]) == 0
    printed = shown.buffer.getvalue().decode("ascii")
    assert tomllib.loads(printed)["task"]["template"] == "{text} 😀é [MASK]"


def test_task_of_a_journal_cannot_write_the_model_card(valid_run):
    header = read(valid_run).header
    name = "x\n\n![](http://127.0.0.1/seen)\n```python\nimport evil\n```\n" + CODES
    task = {**header.task, "name": name, "words": [name, "b"], "template": "{text} [MASK]\n```\n" + CODES}
    text = model_card("adapter", replace(header, task=task), [], 1, 2)
    assert not OBEYED.search(text)
    outside = re.sub(r"^    .*$|`[^`\n]*`", "", text.replace("```", ""), flags=re.M)
    assert "![](" not in outside
    assert text.count("\n```python\n") == 1
