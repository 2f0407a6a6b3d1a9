"""`--method solve` on SGLang: directions and moves are adapters, and the torch engine finds the same."""

from __future__ import annotations

import json

import numpy as np
import pytest

import mezzo
from mezzo.engines.sglang.inprocess import launch
from mezzo.journal.content import read
from mezzo.method.space import Space
from mezzo.types import Probe
from tests.conftest import SENTENCES
from tests.sglang.conftest import MODEL, candidates_batch, distance, open_both_engines, spec_of, words_batch

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_many_probes_are_adapters_of_one_forward(monkeypatch):
    """Where the key-value cache is too small for all of them, forwards are smaller: the scores are those of the torch engine."""
    monkeypatch.setitem(launch.CACHE_TOKENS, "cpu", 1024)
    probes = [Probe(), *(Probe(((seed, 0.01),)) for seed in range(39))]
    spec = spec_of(Space("lora", rank=4, factors="b"), rows=128, many_probes=True, fewer_rows=True)
    for ours, reference in open_both_engines(spec):
        assert ours.micro_batch.members == len(ours.adapters) == 32 and ours.uses_internals and ours.builds_batches
        for batch in (words_batch(40), words_batch(6, prefix=tuple(range(100, 300))), candidates_batch()):
            assert distance(ours.score(batch, probes), reference.score(batch, probes)) < 1e-4


def test_a_run_agrees_with_the_torch_engine_and_is_verified(tmp_path):
    data = tmp_path / "train.jsonl"
    rows = [{"text": text, "label": label} for label, texts in SENTENCES.items() for text in texts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"steps": 3, "samples": 6, "batch_size": 16, "rank": 4, "threads": 1, "seed": 2}
    common = {"task": "sst-2", "train": str(data), "dev": str(data), "space": "lora", **sizes}
    runs = {name: mezzo.finetune(MODEL, engine=name, out=tmp_path / name, **common) for name in ("sglang", "torch")}
    served, plain = (read(tmp_path / name).records for name in ("sglang", "torch"))
    assert runs["sglang"].moves and runs["sglang"].moves == runs["torch"].moves
    np.testing.assert_allclose([r.losses for r in served], [r.losses for r in plain], atol=1e-3)
    for ours, theirs in zip(served, plain, strict=True):
        np.testing.assert_allclose(ours.slopes, theirs.slopes, rtol=0.02, atol=0.02)
        assert [seed for seed, _ in ours.update.terms] == [seed for seed, _ in theirs.update.terms]
    assert mezzo.verify(runs["sglang"].out).ok  # rebuilt by the torch engine
