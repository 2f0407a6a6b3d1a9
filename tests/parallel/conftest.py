"""A run small enough to be repeated with one, two and four workers, and what a single process ends with."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo import api

STEPS = 100


@pytest.fixture(scope="session")
def options(tiny_run: dict[str, Any]) -> dict[str, Any]:
    """A run with four work units per step and one thread per worker."""
    sizes = {"batch_size": 8, "micro_batch": 2, "steps": STEPS, "eval_every": 50}
    return {**tiny_run, **sizes, "snapshot_minutes": 0.01, "eps": 1e-2}


@pytest.fixture(scope="session")
def single_process_digests(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digest that a single process ends with, by space."""
    folder = tmp_path_factory.mktemp("single")
    return {
        space: api.finetune(**{**options, "space": space}, out=str(folder / space)).digest for space in ("lora", "full")
    }
