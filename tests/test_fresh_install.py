"""What a newcomer gets without a network: the main job learns, and the wheel carries everything it needs."""

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

HERE = Path(__file__).parents[1]
LARGEST_WHEEL = 30 * 2**20
LARGEST_MODEL = 14_000_000


@pytest.mark.slow
def test_the_main_job_gains_over_both_zero_shot_figures(tmp_path):
    """`mezzo train` without arguments but for where to; three seeds are in the log."""
    run = mezzo.finetune(out=str(tmp_path / "run"))
    assert run.n_test >= 400
    assert run.zero_shot_calibrated is not None
    assert run.value >= run.zero_shot + 0.08
    assert run.value > run.zero_shot_calibrated


@pytest.mark.slow
def test_the_wheel_trains_from_an_empty_folder(tmp_path):
    source, wheels, installed, empty = (tmp_path / name for name in ("source", "wheels", "installed", "empty"))
    source.mkdir()
    empty.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(HERE / name, source)
    shutil.copytree(HERE / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = wheels.glob("*.whl")
    assert wheel.stat().st_size < LARGEST_WHEEL
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=300)
    train = ["-m", "mezzo", "train", "--json", "--steps", "20", "--eval-limit", "50", "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *train], cwd=empty, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["steps"], found["out"]) == (20, "runs/reviews-head-1")
    where = subprocess.run(
        [sys.executable, "-c", "import mezzo; print(mezzo.__file__)"], cwd=empty, env=environment, capture_output=True
    )
    assert Path(where.stdout.decode().strip()).is_relative_to(installed)


@pytest.mark.parametrize(("task", "rows", "test"), [("reviews", 1000, 400), ("pairs", 200, 0)])
def test_the_bundled_data_is_of_the_size_its_card_says(task, rows, test):
    folder = HERE / "src" / "mezzo" / "bundled" / "data" / task
    lines = {file.stem: file.read_text(encoding="utf-8").splitlines() for file in folder.glob("*.jsonl")}
    assert sum(map(len, lines.values())) >= rows
    assert len(lines["test"]) >= test
    every = [
        json.dumps({k: v for k, v in json.loads(line).items() if k != "label"})
        for part in lines.values()
        for line in part
    ]
    assert len(set(every)) == len(every), "no sentence twice, in whatever split"


@pytest.mark.parametrize("name", ["roberta-mini", "llama-mini"])
def test_the_bundled_models_are_small_and_in_sixteen_bits(name):
    path = HERE / "src" / "mezzo" / "bundled" / "models" / name / "model.safetensors"
    assert path.stat().st_size <= LARGEST_MODEL
    with safe_open(path, framework="numpy") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}  # noqa: SIM118
