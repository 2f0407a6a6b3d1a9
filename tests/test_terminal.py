"""What a person sees: a live line in a real terminal, plain lines in a log, one object for a program."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo.cli import main, progress
from tests.conftest import SENTENCES

SPSA = ["--steps", "30", "--batch-size", "4", "--eval-every", "10", "--threads", "1", "--lr", "1e-3"]
SOLVE = ["--budget", "9k", "--eval-every", "1", "--threads", "1", "--space", "head"]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def train(tiny_folder, tiny_data, tmp_path):
    """Arguments that train the tiny model into a folder with a space in its name."""
    data = ["--train", tiny_data, "--dev", tiny_data, "--out", str(tmp_path / "my run")]
    return ["train", "--model", tiny_folder, "--task", "sst-2", *data]


def in_a_terminal(arguments: list[str]) -> str:
    """Everything the command writes to a terminal of 160 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "160", "LINES": "40", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "mezzo", *arguments]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait() == 0, said.decode()[-3000:]
    return said.decode()


def log_of(monkeypatch, *arguments: str, encoding: str = "utf-8", terminal: bool = False) -> tuple[str, str]:
    """Standard output and error of a command whose streams are not a terminal, or one that cannot do more than a pipe."""
    streams = [Stream(io.BytesIO(), encoding, errors) for errors in ("strict", "backslashreplace")]
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        stream.terminal = terminal
        monkeypatch.setattr(sys, name, stream)
    assert main(list(arguments)) == 0
    monkeypatch.undo()
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams)
    assert "\x1b" not in out + err
    return out, err


class Stream(io.TextIOWrapper):
    terminal = False

    def isatty(self) -> bool:
        return self.terminal


FIRST_LINE = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            sys.exit("importing " + name)
sys.meta_path.insert(0, Watch())
from mezzo.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "fine-tuning mezzo/roberta-mini on questions, solving for each move; loading"),
        (
            ["--task", "sst-2", "--lr", "1"],
            "fine-tuning mezzo/roberta-mini on sst-2, by slopes along random directions",
        ),
        (["--resume", "nothing"], "continuing nothing; loading"),
    ],
)
def test_the_first_line_comes_before_torch_is_imported(options, words):
    done = subprocess.run([sys.executable, "-c", FIRST_LINE, "train", *options], capture_output=True, text=True)
    first, second = done.stderr.splitlines()[:2]
    assert first.startswith(words)
    assert second.startswith("importing " if "--resume" not in options else "mezzo: nothing is not a run folder")


def test_a_terminal_shows_pace_loss_dev_zero_slopes_and_memory(train):
    said = in_a_terminal([*train, *SPSA])
    plain = CODES.sub("", said)
    lines = [line for line in re.split(r"[\r\n]+", plain) if "steps/s" in line]
    assert lines, plain[-2000:]
    assert re.search(r"\d+/30", lines[-1])
    for what in (r"[\d.]+ steps/s", r"loss \d\.\d+", r"dev \d+\.\d%", r"zero slopes \d+%", r"[\d,]+ MiB"):
        assert re.search(what, lines[-1]), (what, lines[-1])
    assert any(re.search(r"\d+ (s|min) left", line) for line in lines)
    assert re.search(r"^verdict +\w", plain, re.M)
    assert re.search(r"\x1b\[3[1-3]mverdict", said), "in colour"


def test_a_terminal_shows_the_loss_before_and_after_a_move(train):
    plain = CODES.sub("", in_a_terminal([*train, *SOLVE]))
    lines = [line for line in re.split(r"[\r\n]+", plain) if "k/9k" in line]
    assert lines, plain[-2000:]
    assert re.search(r"\dk/9k  dev \d+\.\d%  loss \d\.\d+( → ≈\d\.\d+|, not moved)", lines[-1])
    assert any("left" in line for line in lines)
    assert "zero slopes" not in plain


def test_a_log_gets_plain_lines(train, monkeypatch):
    out, err = log_of(monkeypatch, *train, *SPSA)
    lines = [line for line in err.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert re.search(r"step +20 +dev accuracy .*  loss \d.* left  .*steps/s  zero slopes \d+%  .*MiB$", lines[2])
    assert re.search(r"^digest +[0-9a-f]{16}$", out, re.M)


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "TERM=dumb"])
def test_plain_lines_of_solve_have_loss_and_time_left(train, terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    _, said = log_of(monkeypatch, *train, *SOLVE, terminal=terminal)
    steps = re.findall(r"^step +(\d+)  (\d+)k/9k  loss (.+)$", said, re.M)
    assert [int(step) for step, _, _ in steps] == list(range(1, len(steps) + 1))
    assert len(steps) >= 2
    assert all("s left" in figures for *_, figures in steps[:-1])
    assert re.search(r"^step +1  dev accuracy \d", said, re.M)
    assert "zero slopes" not in said


def test_the_end_shows_a_curve_labels_examples_and_commands(train, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text, _ = log_of(monkeypatch, *train, *SOLVE)
    assert re.search(r"^dev accuracy\n[\d.]+% │", text, re.M)
    assert "example-forwards" in text
    assert re.search(r"^right label +negative +positive +recall", text, re.M)
    (matrix,) = re.findall(r"^negative +(\d+) +(\d+) .*\npositive +(\d+) +(\d+) ", text, re.M)
    assert sum(map(int, matrix)) == 16
    shown = re.findall(r"^  (negative|positive) +→ (negative|positive) +(right|wrong)  (.+)$", text, re.M)
    assert len(shown) == 5
    label = {text: label for label, texts in SENTENCES.items() for text in texts}
    assert all((label[text] == after) == (judged == "right") for _, after, judged, text in shown)
    commands = [shlex.split(line) for line in text.split("go on with\n")[1].splitlines()]
    out = str(tmp_path / "my run")
    assert commands[0] == ["echo", "A sentence of your own.", "|", "mezzo", "predict", out]
    assert commands[1:] == [["mezzo", "report", out], ["mezzo", "train", "--train", "YOUR.csv"]]


def test_an_output_that_is_not_unicode_gets_plain_characters(train, tmp_path, monkeypatch):
    rows = [{"text": f"{text} → 🙂", "label": label} for label, texts in SENTENCES.items() for text in texts]
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    out, err = log_of(monkeypatch, *train, *SOLVE, "--test", str(test), encoding="latin-1")
    assert re.search(r"^dev accuracy\n[\d.]+% \|", out, re.M)
    assert re.search(r"(negative|positive) +-> (negative|positive) +(right|wrong)  .+ -> \?$", out, re.M)
    assert re.search(r"loss \d\.\d+( -> ~\d|, not moved)", err)
    out, _ = log_of(monkeypatch, "predict", str(tmp_path / "my run"), "--data", str(test), encoding="ascii")
    assert [json.loads(line)["text"] for line in out.splitlines()] == [row["text"] for row in rows], (
        "JSON loses nothing"
    )


@pytest.mark.parametrize("command", ["train", "bench"])
def test_help_is_shown_where_the_output_is_not_unicode(command):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "mezzo", command, "--help"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--space" in done.stdout


def test_a_program_gets_one_object(train, monkeypatch):
    out, err = log_of(monkeypatch, *train, *SPSA, "--json")
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["verdict"] and found["memory_mib"] > 0 and found["steps"] == 30
    assert [point["step"] for point in found["curve"]] == [0, 10, 20, 30]
    assert len(found["examples"]) == 5
    assert Path(found["out"], "mistakes.jsonl").is_file()
    assert re.search(r"^verdict +", err, re.M)


def test_a_long_encoding_is_announced_and_a_short_one_is_not():
    assert "encoding 1,000,000 training examples" in progress.event_line("encoding", {"examples": 1_000_000})
    assert progress.event_line("encoding", {"examples": 984}) == ""
