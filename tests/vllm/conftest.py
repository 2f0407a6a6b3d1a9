"""A real, unmodified vLLM on the CPU; tests marked `vllm` are skipped without it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from mezzo.engines import open_engine
from mezzo.engines.base import EngineSpec
from tests.sglang.conftest import UPDATES

INSTALLED = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not INSTALLED and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm sets it up"))


def open_both_engines(spec: EngineSpec) -> Iterator[tuple[Any, Any]]:
    """The vLLM engine and the torch engine it must agree with, after the same updates."""
    ours = open_engine("vllm", spec)
    try:
        reference = open_engine("torch", spec)
        for engine in (ours, reference):
            engine.apply(UPDATES)
        yield ours, reference
    finally:
        ours.close()
