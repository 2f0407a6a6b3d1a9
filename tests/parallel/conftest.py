"""A run small enough to be repeated by one, two and four workers, and single runs to compare with."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo import api

STEPS = 100


@pytest.fixture(scope="session")
def base(tiny_folder: str, tiny_data: str) -> dict[str, Any]:
    """Four units of work a step, one thread a worker."""
    return {
        "model": tiny_folder,
        "task": "sst-2",
        "train": tiny_data,
        "dev": tiny_data,
        "space": "lora",
        "steps": STEPS,
        "batch_size": 8,
        "micro_batch": 2,
        "eval_every": 50,
        "threads": 1,
        "device": "cpu",
        "snapshot_minutes": 0.01,
        "lr": 1e-3,
        "eps": 1e-2,
    }


@pytest.fixture(scope="session")
def alone(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a single process ends with, by space."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        space: api.finetune(**{**base, "space": space}, out=str(folder / space)).digest for space in ("lora", "full")
    }
