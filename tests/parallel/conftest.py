"""A run small enough to be repeated with one, two and four workers, and what a single process ends with."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo import api

STEPS = 100


@pytest.fixture(scope="session")
def options(tiny_folder: str, tiny_data: str) -> dict[str, Any]:
    """A run with four work units per step and one thread per worker."""
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
def single_process_digests(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digest that a single process ends with, by space."""
    folder = tmp_path_factory.mktemp("single")
    return {
        space: api.finetune(**{**options, "space": space}, out=str(folder / space)).digest for space in ("lora", "full")
    }
