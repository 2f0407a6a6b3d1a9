"""Ray's actors as workers: the same contract, the same digest, and no address but the loopback one."""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import Any

import pytest

from mezzo import api
from mezzo.errors import ConfigError
from tests.parallel.below import LOOPBACK, family, listening

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray", allow_module_level=True)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray() -> Any:
    """A Ray that the runs of this module share, as mezzo starts it."""
    from mezzo.parallel.transports.ray import LOOPBACK, start

    os.environ[LOOPBACK] = "0"
    import ray

    start("local", 5)
    yield ray
    ray.shutdown()


@pytest.mark.parametrize(("space", "count"), [("lora", 1), ("lora", 2), ("lora", 4), ("full", 1), ("full", 4)])
def test_any_number_of_actors_ends_with_the_digest_of_one_process(ray, base, alone, tmp_path, space, count):
    """Two actors in the full space are the next test's."""
    run = api.finetune(**{**base, "space": space}, workers=count, ray_address="local", out=str(tmp_path / "r"))
    assert run.digest == alone[space]
    assert (run.workers["count"], run.workers["lost"]) == (count, 0)


def test_a_killed_actor_is_replaced(ray, base, alone, tmp_path):
    session = api.open_session(**{**base, "space": "full"}, workers=2, ray_address="local", out=str(tmp_path / "r"))
    assert set(listening([os.getpid(), *family(os.getpid())])) <= set(LOOPBACK)
    for record in session.records():
        if record.step == 30:
            os.kill(session.engine.crew.up()[0].facts.pid, signal.SIGKILL)
    run = session.result()
    assert run.digest == alone["full"]
    assert run.workers["lost"] == 1


def test_a_cluster_that_is_not_there_is_explained(base, tmp_path):
    import ray

    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        api.finetune(**base, workers=1, ray_address="127.0.0.1:1", out=str(tmp_path / "r"))
