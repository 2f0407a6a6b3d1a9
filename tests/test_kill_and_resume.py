"""In every space and dtype, a run that is killed three times and resumed gives the digest of an uninterrupted run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mezzo import api
from mezzo.config import OPTIONS
from mezzo.journal.content import read
from mezzo.method.space import SPACES
from tests.processes import kill_after, start_run, wait_for_lines

# Many, because a busy machine may let a run go on for dozens of steps before it is killed.
STEPS = 160
CASES = [(space, "float32") for space in (*SPACES, "*attention*")]
CASES += [(space, dtype) for space in SPACES for dtype in OPTIONS["dtype"].values if dtype != "float32"]


@pytest.fixture
def options(tiny_folder: str, tiny_data: str) -> dict[str, Any]:
    sizes = {
        "steps": STEPS,
        "batch_size": 4,
        "eval_every": STEPS,
        "threads": 1,
        "device": "cpu",
        "snapshot_minutes": 0.01,
    }
    return {
        "model": tiny_folder,
        "task": "sst-2",
        "train": tiny_data,
        "dev": tiny_data,
        "lr": 1e-3,
        "eps": 1e-2,
        **sizes,
    }


@pytest.mark.parametrize(("space", "dtype"), CASES)
def test_resume_after_three_kills_gives_same_digest(space, dtype, options, tmp_path):
    options |= {"space": space, "dtype": dtype, "weight_decay": 0.1}
    uninterrupted = api.finetune(**{**options, "snapshot_minutes": 5}, out=str(tmp_path / "uninterrupted"))
    run, rng, steps_at_kill = tmp_path / "killed", random.Random(f"{space}{dtype}"), []
    lines_at_kill = 0
    for _ in range(3):
        fresh = not (run / "journal.jsonl").exists()
        process = start_run({**options, "out": str(run)} if fresh else {"resume": str(run), "threads": 1})
        wait_for_lines(run / "journal.jsonl", lines_at_kill + 12)
        assert kill_after(process, rng.random() * 0.02), "the run finished before it was killed"
        steps_at_kill.append(read(run).steps)
        lines_at_kill = (run / "journal.jsonl").read_bytes().count(b"\n")
    assert 0 < steps_at_kill[0] < steps_at_kill[1] < steps_at_kill[2] < STEPS
    assert api.finetune(resume=str(run), threads=1).digest == uninterrupted.digest
