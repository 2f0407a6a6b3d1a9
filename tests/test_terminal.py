"""What a person sees: a live line in a real terminal, plain lines in a log, one object for a program."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo.cli import progress

FAST = ["--steps", "30", "--batch-size", "4", "--eval-every", "10", "--threads", "1", "--lr", "1e-3"]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def command(tiny_folder, tiny_data, tmp_path):
    data = ["--train", tiny_data, "--dev", tiny_data, "--out", str(tmp_path / "run")]
    return [sys.executable, "-m", "mezzo", "train", "--model", tiny_folder, "--task", "sst-2", *data, *FAST]


def in_a_terminal(command: list[str]) -> str:
    """Everything the command writes to a terminal of 160 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "160", "LINES": "40", "TERM": "xterm-256color"}
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
    assert process.wait() == 0
    return said.decode()


def test_a_terminal_shows_pace_loss_dev_zero_slopes_and_memory(command):
    said = in_a_terminal(command)
    plain = CODES.sub("", said)
    lines = [line for line in re.split(r"[\r\n]+", plain) if "steps/s" in line]
    assert lines, plain[-2000:]
    assert re.search(r"\d+/30", lines[-1])
    for what in (r"[\d.]+ steps/s", r"loss \d\.\d+", r"dev \d+\.\d%", r"zero slopes \d+%", r"[\d,]+ MiB"):
        assert re.search(what, lines[-1]), (what, lines[-1])
    assert any(re.search(r"\d+ (s|min) left", line) for line in lines)
    assert re.search(r"^verdict +\w", plain, re.M)
    assert re.search(r"\x1b\[3[1-3]m[^\x1b]*verdict|verdict[^\n]*\x1b\[3[1-3]m|\x1b\[3[1-3]mverdict", said), "in colour"


def test_a_log_gets_plain_lines(command):
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert re.search(r"step +20 +dev accuracy .*loss \d.* zero slopes \d+% .*steps/s .* left .*MiB$", lines[2])
    assert re.search(r"^digest +[0-9a-f]{16}$", done.stdout, re.M)


def test_a_program_gets_one_object(command):
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["verdict"] and found["memory_mib"] > 0 and found["steps"] == 30
    assert Path(found["out"], "mistakes.jsonl").is_file()


def test_a_long_encoding_is_announced_and_a_short_one_is_not():
    assert "encoding 1,000,000 training examples" in progress.event_line("encoding", {"examples": 1_000_000})
    assert progress.event_line("encoding", {"examples": 984}) == ""
