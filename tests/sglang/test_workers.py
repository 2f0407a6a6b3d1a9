"""Workers with an SGLang engine each; their weights and scores are compared at every step."""

from __future__ import annotations

from importlib import resources

import pytest

from mezzo import api
from tests.sglang.conftest import MODEL

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TRAIN = str(resources.files("mezzo") / "bundled" / "data" / "reviews" / "train.jsonl")


OPTIONS = {
    "engine": "sglang",
    "model": MODEL,
    "task": "sst-2",
    "train": TRAIN,
    "space": "lora",
    "device": "cpu",
    "method": "spsa",
    "steps": 6,
    "batch_size": 8,
    "micro_batch": 2,
    "eval_limit": 4,
    "check_workers": 1,
}


def test_two_workers_train_and_agree(tmp_path):
    import psutil

    session = api.open_session(**OPTIONS, workers=2, out=str(tmp_path / "r"))
    try:
        while len(session.engine.request_all("digest")) < 2:  # the second may still be starting
            pass
        records = list(session.records())
        assert len(records) == 6
        stats = session.engine.run_stats()

        # Back to an earlier step, as for the test of the best one: the engines are not started again.
        processes = {child.pid for child in psutil.Process().children(recursive=True)}
        session.engine.replay_journal([record.update for record in records[:3]], {}, None)
        assert len({*session.engine.request_all("digest").values()}) == 1
        assert {child.pid for child in psutil.Process().children(recursive=True)} == processes
        earlier = session.engine.digest()
    finally:
        session.close()
    assert earlier == api.open_run(tmp_path / "r", at=3)[0].digest()
    assert (stats["lost"], stats["rebuilt"], stats["recomputed_units"]) == (0, 0, 0)
    assert api.verify(tmp_path / "r").ok


def test_ray_actor_runs_an_engine_with_two_ranks(tmp_path):
    session = api.open_session(**OPTIONS, workers=1, tp=2, ray_address="local", out=str(tmp_path / "r"))
    try:
        described = session.engine.describe()
        assert (described["engine"], described["tp"]) == ("sglang", 2)
        assert len(list(session.records())) == 6
        assert session.engine.run_stats()["lost"] == 0
    finally:
        session.close()
    assert api.verify(tmp_path / "r").ok
