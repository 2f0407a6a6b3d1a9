"""A fresh install without a network: the default run learns, and the wheel contains everything it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import mezzo
from tests.processes import patience

ROOT = Path(__file__).parents[1]
MAX_WHEEL_BYTES = 30 * 2**20
MAX_MODEL_BYTES = 14_000_000


@pytest.mark.slow
def test_default_run_beats_zero_shot_and_calibrated_zero_shot(tmp_path):
    """`mezzo train` with only an output folder."""
    run = mezzo.finetune(out=str(tmp_path / "run"))
    assert run.n_test >= 1000
    assert run.zero_shot_calibrated is not None
    assert run.interval[0] > max(run.zero_shot, run.zero_shot_calibrated) + 0.2
    assert run.verdict.startswith("worked")


@pytest.mark.slow
def test_installed_wheel_trains_from_an_empty_folder(tmp_path):
    source, wheels, installed, empty = (tmp_path / name for name in ("source", "wheels", "installed", "empty"))
    source.mkdir()
    empty.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=patience(300))
    (wheel,) = wheels.glob("*.whl")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=patience(300)
    )
    train = ["-m", "mezzo", "train", "--json", "--steps", "2", "--eval-limit", "50", "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *train], cwd=empty, env=environment, capture_output=True, text=True, timeout=patience(300)
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["steps"], result["out"]) == (2, "runs/questions-head-1")
    imported = subprocess.run(
        [sys.executable, "-c", "import mezzo; print(mezzo.__file__)"], cwd=empty, env=environment, capture_output=True
    )
    assert Path(imported.stdout.decode().strip()).is_relative_to(installed)


@pytest.mark.parametrize(
    ("task", "min_rows", "min_test_rows"), [("questions", 3000, 1000), ("reviews", 1000, 400), ("pairs", 200, 0)]
)
def test_bundled_data_has_enough_distinct_examples(task, min_rows, min_test_rows):
    folder = ROOT / "src" / "mezzo" / "bundled" / "data" / task
    lines = {file.stem: file.read_text(encoding="utf-8").splitlines() for file in folder.glob("*.jsonl")}
    assert sum(map(len, lines.values())) >= min_rows
    assert len(lines["test"]) >= min_test_rows
    texts = [
        json.dumps({k: v for k, v in json.loads(line).items() if k != "label"})
        for split in lines.values()
        for line in split
    ]
    assert len(set(texts)) == len(texts), "no example occurs twice, in any split"


@pytest.mark.parametrize("name", ["roberta-mini", "llama-mini"])
def test_bundled_models_are_small_and_float16(name):
    path = ROOT / "src" / "mezzo" / "bundled" / "models" / name / "model.safetensors"
    assert path.stat().st_size <= MAX_MODEL_BYTES
    with safe_open(path, framework="numpy") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}  # noqa: SIM118
