"""`--method solve` on SGLang: directions and moves are adapters, and the torch engine finds the same."""

from __future__ import annotations

import json

import numpy as np
import pytest

import mezzo
from mezzo.journal.content import read
from tests.conftest import SENTENCES
from tests.sglang.conftest import MODEL

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


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
