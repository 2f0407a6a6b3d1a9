"""SGLang's processes find mezzo's plugin also where mezzo is not installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sglang.conftest import MODEL

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
GROUP = "sglang.srt.plugins"
LIST_PLUGINS = f"from importlib.metadata import entry_points; print(len(entry_points(group={GROUP!r})))"


def test_a_run_from_a_path_uses_the_plugin(tmp_path):
    """A package of the same name that comes first hides the entry points of the installed one."""
    info = tmp_path / "first" / "mezzo-99.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mezzo\nVersion: 99\n")
    environment = {**os.environ, "PYTHONPATH": str(info.parent)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True
        )

    assert run("-c", LIST_PLUGINS).stdout.strip() == "0"
    sizes = ["--steps", "1", "--batch-size", "2", "--train-limit", "8", "--eval-limit", "4"]
    done = run(
        "-m", "mezzo", "train", "--engine", "sglang", "--model", MODEL, "--space", "lora", "--method", "spsa", *sizes
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verdict" in done.stdout and "is not as mezzo knows it" not in done.stdout + done.stderr
