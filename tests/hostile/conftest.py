"""A run to damage, and what every damaged file must lead to: one line, exit 2, nothing written elsewhere."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from mezzo import api
from mezzo.cli import main


@pytest.fixture(scope="session")
def sound_run(tiny_folder: str, tiny_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sound") / "run"
    options = {"space": "lora", "steps": 4, "batch_size": 4, "eval_every": 2, "threads": 1, "device": "cpu"}
    api.finetune(tiny_folder, task="sst-2", train=tiny_data, dev=tiny_data, **options, lr=1e-3, out=str(out))
    return out


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command runs: nothing may appear beside what it is pointed at."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.fixture
def answered(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a command: its exit code and what it said. A refusal is one line, and nothing is written outside a run."""

    def call(*arguments: str) -> tuple[int, str]:
        before = _outside(place)
        code = main(list(arguments))
        said = capsys.readouterr().err
        if code == 2:
            assert said.startswith("mezzo: "), said
            assert said.count("\n") == 1, said
            assert "Traceback" not in said
        assert _outside(place) == before
        return code, said

    return call


@pytest.fixture
def refused(answered: Callable[..., tuple[int, str]]) -> Callable[..., str]:
    """Run a command that must say no; return what it said."""

    def call(*arguments: str) -> str:
        code, said = answered(*arguments)
        assert code == 2, (code, said)
        return said

    return call


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}


def _outside(place: Path) -> dict[str, int]:
    return {path: size for path, size in tree(place).items() if not path.startswith("run/")}


def copy_of(run: Path, place: Path) -> Path:
    shutil.rmtree(place / "run", ignore_errors=True)
    shutil.copytree(run, place / "run")
    return place / "run"


def signed(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a journal whose checksums are right: a stranger can compute them too."""
    out, salt = [], 0
    for number, line in enumerate(lines):
        text = json.dumps({key: value for key, value in line.items() if key != "crc"}, separators=(",", ":")).encode()
        out.append(b'%s,"crc":"%08x"}\n' % (text[:-1], zlib.crc32(text, salt)))
        salt = zlib.crc32(out[0]) if number == 0 else salt
    path.write_bytes(b"".join(out))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
