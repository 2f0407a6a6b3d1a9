"""What SGLang loads into each of its processes (entry point `sglang.srt.plugins`): inert until mezzo calls or asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mezzo.engines.sglang.inprocess.channel import METHOD, answer_request
from mezzo.engines.sglang.internals import hooks

QUESTION = "mezzo."


def register() -> None:
    """Add the method that mezzo's engine calls, and answer questions and recipes of its clients."""
    hooks.add_scheduler_method(METHOD, _call)
    hooks.answer_names(QUESTION, _answer)
    hooks.convert_adapters(_convert)


def _call(scheduler: Any, request: str) -> None:
    from mezzo.engines.sglang.inprocess.worker import Worker

    worker = scheduler.__dict__.setdefault("_mezzo_worker", None) or Worker(scheduler)
    scheduler._mezzo_worker = worker
    answer_request(Path(request), worker.rank, worker.handle)


def _answer(model: Any, question: str) -> list[float]:
    from mezzo.engines.sglang.server.loader import answer

    return answer(model, question)


def _convert(kept: dict[str, Any], tensors: hooks.Tensors) -> hooks.Tensors:
    from mezzo.engines.sglang.server.recipes import RECIPE, make_adapter

    return make_adapter(kept, tensors) if RECIPE in tensors else tensors
