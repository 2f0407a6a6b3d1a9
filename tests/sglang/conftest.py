"""A real, unmodified SGLang on the CPU. Each file starts one engine; tests marked `sglang` are skipped without SGLang."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mezzo.engines import open_engine
from mezzo.engines.base import EngineSpec
from mezzo.method.space import Space
from mezzo.types import Batch, Probe, Prompt, Readout, Scores, Update

INSTALLED = importlib.util.find_spec("sglang") is not None
MODEL = "mezzo/llama-mini"
EPS = 1e-2
PAIR = (Probe(((7, EPS),)), Probe(((7, -EPS),)))
WORDS = (300, 900)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not INSTALLED and item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed: make test-sglang sets it up"))


def spec_of(space: Space, **changes: Any) -> EngineSpec:
    return EngineSpec(MODEL, "causal", space, **{"rows": 8, "seed": 3, "threads": 1, **changes})


def open_both_engines(spec: EngineSpec) -> Iterator[tuple[Any, Any]]:
    """The SGLang engine and the torch engine it must agree with, after the same updates."""
    ours = open_engine("sglang", spec)
    try:
        reference = open_engine("torch", dataclasses.replace(spec, tp=1))
        for engine in (ours, reference):
            engine.apply(UPDATES)
        yield ours, reference
    finally:
        ours.close()


@contextlib.contextmanager
def without_internals(engine: Any) -> Iterator[None]:
    """Inside the block SGLang's processes have no method of mezzo's, as in a version of SGLang that mezzo does not know."""
    state = engine.state()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Scheduler has no such method")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.channel, "rpc", refuse)
        patch.setattr(engine, "uses_internals", engine._check_internals())
        patch.setattr(engine, "builds_batches", False)
        engine.load_state(state)
        yield
        assert engine.reset()
    engine.uploads.unload()
    assert engine._check_internals()
    engine.load_state(state)


def update(*terms: tuple[int, float], keep: float = 1.0) -> Update:
    return Update(tuple((seed, float(np.float32(coef))) for seed, coef in terms), float(np.float32(keep)))


# LoRA's B starts at zero, which would hide errors in A; two terms and decay exercise the whole update.
UPDATES = [update((5, 0.01), (6, -0.02), keep=0.999), update((8, 0.005))]


def tokens(rng: np.random.Generator, low: int, high: int) -> tuple[int, ...]:
    return tuple(int(t) for t in rng.integers(5, 7000, size=rng.integers(low, high)))


def words_batch(count: int = 12, vocabulary: bool = False, seed: int = 0, prefix: tuple[int, ...] = ()) -> Batch:
    """Prompts of mixed lengths; one of them is read before its end."""
    rng = np.random.default_rng(seed)
    prompts = [Prompt(prefix + tokens(rng, 4, 24), label=index % 2) for index in range(count)]
    prompts[1] = Prompt(prompts[1].ids, label=1, position=len(prompts[1].ids) - 2)
    return Batch(tuple(prompts), Readout("words", words=WORDS, vocabulary=vocabulary))


def candidates_batch(reduce: str = "mean", low: int = 3, high: int = 40) -> Batch:
    """Prompts with one to three continuations of one to four tokens."""
    rng = np.random.default_rng(1)
    prompts = [
        Prompt(tokens(rng, low, high), label=0, candidates=tuple(tokens(rng, 1, 5) for _ in range(count)))
        for count in (2, 3, 1, 2, 3)
    ]
    return Batch(tuple(prompts), Readout("candidates", reduce=reduce))  # type: ignore[arg-type]


def distance(a: Scores, b: Scores) -> float:
    """Largest difference after subtracting each row's mean: scores are defined up to a constant per row."""
    assert a.shape == b.shape
    finite = np.isfinite(b)
    np.testing.assert_array_equal(np.isfinite(a), finite)
    a, b = (np.where(finite, x, np.nan).astype(np.float64) for x in (a, b))
    if a.shape[-1] > 1:
        a, b = a - np.nanmean(a, -1, keepdims=True), b - np.nanmean(b, -1, keepdims=True)
    return float(np.nanmax(np.abs(a - b)))
