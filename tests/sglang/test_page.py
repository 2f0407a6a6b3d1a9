"""Every command on the page about SGLang, and in its examples, is one that the program it calls understands."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from mezzo.cli.parser import build

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "sglang.md", *sorted((ROOT / "examples").glob("sglang*.py")), ROOT / "README.md"]


def commands(program: str) -> list[list[str]]:
    """What is said to `program`, with words in the place of what the reader fills in."""
    found = []
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        for line in lines:
            if at := re.match(rf"^(?:\S+=\S+ )?(?:\S*/)?{program} (.*)$", line):
                words = shlex.split(re.sub(r"…|\.\.\.|\[.*\]", "", at[1]), comments=True)
                found.append(words)
    return found


def test_commands_of_mezzo():
    found = [words for words in commands("mezzo") if "sglang" in words]
    assert len(found) > 6
    for words in found:
        build().parse_args(words)


@pytest.mark.sglang
def test_commands_that_start_servers():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = commands("python -m sglang.launch_server")
    assert len(found) == 3
    for words in found:
        parser.parse_args(words)
