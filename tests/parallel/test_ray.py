"""Ray actors as workers: the same contract, the same digest, and nothing listens outside the loopback address."""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import Any

import pytest

from mezzo import api
from mezzo.errors import ConfigError
from tests.parallel.process_tree import LOOPBACK, descendants, listening_addresses

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray", allow_module_level=True)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray() -> Any:
    """A Ray that the runs of this module share, started as mezzo does."""
    from mezzo.parallel.transports.ray import LOOPBACK_VARIABLE, start_ray

    os.environ[LOOPBACK_VARIABLE] = "0"
    import ray

    start_ray("local", 5)
    yield ray
    ray.shutdown()


@pytest.mark.parametrize(("space", "count"), [("lora", 4), ("full", 1)])
def test_any_number_of_actors_ends_with_the_digest_of_one_process(
    ray, options, single_process_digests, tmp_path, space, count
):
    """Two actors in the full space are covered by the next test."""
    run = api.finetune(**{**options, "space": space}, workers=count, ray_address="local", out=str(tmp_path / "r"))
    assert run.digest == single_process_digests[space]
    assert (run.workers["count"], run.workers["lost"]) == (count, 0)


def test_killed_actor_is_replaced(ray, options, single_process_digests, tmp_path):
    session = api.open_session(**{**options, "space": "full"}, workers=2, ray_address="local", out=str(tmp_path / "r"))
    assert set(listening_addresses([os.getpid(), *descendants(os.getpid())])) <= set(LOOPBACK)
    for record in session.records():
        if record.step == 30:
            os.kill(session.engine.supervisor.ready_workers[0].facts.pid, signal.SIGKILL)
    run = session.result()
    assert run.digest == single_process_digests["full"]
    assert run.workers["lost"] == 1


def test_unreachable_cluster_is_explained(options, tmp_path):
    import ray

    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        api.finetune(**options, workers=1, ray_address="127.0.0.1:1", out=str(tmp_path / "r"))
