"""Every command in the documentation and the examples of SGLang is valid for the program that it calls."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from mezzo.cli.parser import build_parser

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / "sglang.md",
    ROOT / "docs" / "serving.md",
    *sorted((ROOT / "examples").glob("sglang*.py")),
    ROOT / "README.md",
]


def commands(program: str) -> list[list[str]]:
    """The arguments of each documented call of `program`, without placeholders."""
    calls = []
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        for line in lines:
            if at := re.match(rf"^(?:\S+=\S+ )?(?:\S*/)?{program} (.*)$", line):
                words = shlex.split(re.sub(r"…|\.\.\.|\[.*\]", "", at[1]), comments=True)
                calls.append(words)
    return calls


def test_mezzo_commands_are_valid():
    calls = [words for words in commands("mezzo") if "sglang" in words]
    assert len(calls) > 6
    for words in calls:
        build_parser().parse_args(words)


@pytest.mark.sglang
def test_server_commands_are_valid():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    calls = commands("python -m sglang.launch_server")
    assert len(calls) == 5
    for words in calls:
        parser.parse_args(words)
