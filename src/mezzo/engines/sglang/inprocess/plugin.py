"""What SGLang loads into each of its processes (entry point `sglang.srt.plugins`): one method, inert until mezzo calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mezzo.engines.sglang.inprocess.channel import METHOD, answer_request


def register() -> None:
    """Add the method that `Engine.collective_rpc` calls on every rank."""
    from sglang.srt.managers.scheduler import Scheduler

    setattr(Scheduler, METHOD, _call)


def _call(scheduler: Any, request: str) -> None:
    from mezzo.engines.sglang.inprocess.worker import Worker

    worker = scheduler.__dict__.setdefault("_mezzo_worker", None) or Worker(scheduler)
    scheduler._mezzo_worker = worker
    answer_request(Path(request), worker.rank, worker.handle)
