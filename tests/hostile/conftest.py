"""A valid run to damage, and commands that must refuse damaged files: one line, exit code 2, no files written elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from mezzo import api
from mezzo.cli import main


@pytest.fixture(scope="session")
def valid_run(tiny_folder: str, tiny_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("valid") / "run"
    options = {"space": "lora", "steps": 4, "batch_size": 4, "eval_every": 2, "threads": 1, "device": "cpu"}
    api.finetune(tiny_folder, task="sst-2", train=tiny_data, dev=tiny_data, **options, lr=1e-3, out=str(out))
    return out


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for input files. Commands run in its subfolder `here` and may write in its subfolder `run` only."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.fixture
def run_command(workspace: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a command; return its exit code and stderr. A refusal is one line, and nothing is written outside the run."""

    def call(*arguments: str) -> tuple[int, str]:
        before = _file_sizes_outside_run(workspace)
        code = main(list(arguments))
        stderr = capsys.readouterr().err
        if code == 2:
            assert stderr.startswith("mezzo: "), stderr
            assert stderr.count("\n") == 1, stderr
            assert "Traceback" not in stderr
        assert _file_sizes_outside_run(workspace) == before
        return code, stderr

    return call


@pytest.fixture
def expect_refusal(run_command: Callable[..., tuple[int, str]]) -> Callable[..., str]:
    """Run a command that must be refused; return its error message."""

    def call(*arguments: str) -> str:
        code, stderr = run_command(*arguments)
        assert code == 2, (code, stderr)
        return stderr

    return call


def _file_sizes_outside_run(folder: Path) -> dict[str, int]:
    sizes = {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}
    return {path: size for path, size in sizes.items() if not path.startswith("run/")}
