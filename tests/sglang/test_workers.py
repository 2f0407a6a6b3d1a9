"""Workers that hold an SGLang engine each: the same contract, weights and scores compared at every step."""

from __future__ import annotations

from importlib import resources

import pytest

from mezzo import api
from tests.sglang.conftest import MODEL

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TRAIN = str(resources.files("mezzo") / "bundled" / "data" / "reviews" / "train.jsonl")


def test_two_workers_train_and_agree(tmp_path):
    session = api.open_session(
        engine="sglang",
        model=MODEL,
        task="sst-2",
        train=TRAIN,
        space="lora",
        device="cpu",
        steps=6,
        batch_size=8,
        micro_batch=2,
        eval_limit=4,
        workers=2,
        check_workers=1,
        out=str(tmp_path / "r"),
    )
    try:
        while len(session.engine.all("digest")) < 2:  # the second may still be starting
            pass
        assert len(list(session.records())) == 6
        cost = session.engine.total_cost()
    finally:
        session.close()
    assert (cost["lost"], cost["rebuilt"], cost["recomputed_units"]) == (0, 0, 0)
    assert api.verify(tmp_path / "r").ok
