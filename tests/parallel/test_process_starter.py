"""What starts workers cannot freeze a run, and leaves no process behind; what watches them looks at every unit in turn."""

from __future__ import annotations

import ast
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mezzo
from mezzo.engines.microbatch import split_into_units
from mezzo.errors import RunFailed
from mezzo.parallel.engine import WorkersEngine
from mezzo.parallel.messages import parse_reply, serialize
from mezzo.parallel.transports import processes
from mezzo.types import MicroBatch, Probe, Update
from tests.conftest import make_batch
from tests.parallel.process_tree import end_within
from tests.processes import patience


@pytest.fixture
def transport(monkeypatch):
    """With a starter of its own."""
    monkeypatch.setattr(processes, "_starters", {})
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    yield processes.ProcessTransport()
    for starter in processes._starters.values():
        starter.kill()


def test_stopped_worker_ends_after_its_driver(transport):
    worker = transport.start_worker()
    os.kill(worker.pid, signal.SIGSTOP)
    (starter,) = processes._starters.values()
    starter.socket.close()  # as when the driver ends
    worker.connection.close()
    assert end_within([worker.pid], patience(30))
    assert starter.process.wait(patience(30)) == 0


def test_process_starter_that_hangs_does_not_freeze_the_run(transport, monkeypatch):
    transport.start_worker().kill()
    (starter,) = processes._starters.values()
    own = starter.socket.gettimeout()
    assert own is not None and 0 < own <= 600, "it does not wait forever"
    starter.socket.settimeout(0.5)
    os.kill(starter.process.pid, signal.SIGSTOP)
    start = time.monotonic()
    transport.start_worker().kill()
    assert starter.process.poll() is not None, "it was replaced"
    assert time.monotonic() - start < patience(60)


class Recorder(WorkersEngine):
    """Two workers that agree; records which units they were asked about."""

    worker_count = 2
    compute_units = rebuild_worker = catch_up = request_any = lambda self, *arguments: None

    def __init__(self) -> None:
        super().__init__(check_every=1)
        self.micro_batch, self.asked = MicroBatch(2), []

    def request_all(self, kind: Any, *arguments: Any) -> dict[Any, Any]:
        if kind == "score":
            self.asked += [call.batch for call in arguments[0]]
        return {0: "same", 1: "same"} if kind == "digest" else {0: [np.zeros(1)], 1: [np.zeros(1)]}


def test_divergence_check_rotates_over_the_units():
    """A worker that is wrong on long rows alone is found."""
    engine, batch, pair = Recorder(), make_batch(7), (Probe(((7, 0.1),)), Probe(((7, -0.1),)))
    units = split_into_units(batch, 2, engine.micro_batch)
    for _ in units:
        engine.apply([Update()])
        engine._check_if_due(batch, pair)
    assert sorted(prompt.ids for each in engine.asked for prompt in each.prompts) == sorted(
        p.ids for p in batch.prompts
    )


def test_checks_of_replies_and_files_are_no_assertions():
    """`python -O` would drop them."""
    package = Path(mezzo.__file__).parent
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for part in ("parallel", "journal", "replay")
        for path in (package / part).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert not found
    with pytest.raises(RunFailed, match="invalid reply"):
        parse_reply(serialize({}))
