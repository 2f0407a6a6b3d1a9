"""Killed three times, in every space and every type of weights: the run ends where an undisturbed one ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mezzo import api
from mezzo.config import OPTIONS
from mezzo.journal.journal import read
from mezzo.method.space import SPACES
from tests.processes import kill_after, start, wait_for

STEPS = 110
EVERY = [(space, "float32") for space in (*SPACES, "*attention*")]
EVERY += [(space, dtype) for space in SPACES for dtype in OPTIONS["dtype"].values if dtype != "float32"]


@pytest.fixture
def options(tiny_folder: str, tiny_data: str) -> dict[str, Any]:
    sizes = {
        "steps": STEPS,
        "batch_size": 4,
        "eval_every": 110,
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


@pytest.mark.parametrize(("space", "dtype"), EVERY)
def test_three_kills(space, dtype, options, tmp_path):
    options |= {"space": space, "dtype": dtype, "weight_decay": 0.1}
    whole = api.finetune(**{**options, "snapshot_minutes": 5}, out=str(tmp_path / "whole"))
    run, chance, places = tmp_path / "killed", random.Random(f"{space}{dtype}"), []
    for kill in range(3):
        fresh = not (run / "journal.jsonl").exists()
        process = start({**options, "out": str(run)} if fresh else {"resume": str(run), "threads": 1})
        wait_for(run / "journal.jsonl", 20 * (kill + 1))  # further on each time
        assert kill_after(process, chance.random() * 0.02), "the run was over before it could be killed"
        places.append(read(run).steps)
    assert 0 < places[0] < places[1] < places[2] < STEPS
    assert api.finetune(resume=str(run), threads=1).digest == whole.digest
