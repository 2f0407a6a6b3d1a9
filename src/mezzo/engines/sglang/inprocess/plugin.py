"""What SGLang loads into each of its processes (entry point `sglang.srt.plugins`): inert until mezzo calls or asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mezzo.engines.sglang.inprocess.channel import METHOD, answer_request

QUESTION = "mezzo."
RECIPE_METHOD = "load_lora_weights_from_tensors"


def register() -> None:
    """Add the method that `Engine.collective_rpc` calls on every rank, and answer questions of mezzo's clients."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker

    setattr(Scheduler, METHOD, _call)
    weights_by_name = TpModelWorker.get_weights_by_name

    def get_weights_by_name(worker: Any, recv_req: Any) -> Any:
        """SGLang's own answer, except to names that no parameter has."""
        if not recv_req.name.startswith(QUESTION):
            return weights_by_name(worker, recv_req)
        from mezzo.engines.sglang.server.loader import answer

        return answer(worker.model_runner.model, recv_req.name)

    TpModelWorker.get_weights_by_name = get_weights_by_name
    make_adapters_from_recipes()


def make_adapters_from_recipes() -> None:
    """Let SGLang load an adapter that is described by seeds. SGLang catches what fails there, and tells the client."""
    from sglang.srt.lora.lora_manager import LoRAManager

    load_weights = getattr(LoRAManager, RECIPE_METHOD, None)
    if load_weights is None:
        return

    def load_lora_weights_from_tensors(manager: Any, lora_ref: Any, tensors: Any) -> None:
        from mezzo.engines.sglang.server.recipes import RECIPE, make_adapter

        if RECIPE in tensors:
            tensors = make_adapter(manager.__dict__.setdefault("_mezzo_factors", {}), tensors)
        load_weights(manager, lora_ref, tensors)

    setattr(LoRAManager, RECIPE_METHOD, load_lora_weights_from_tensors)


def _call(scheduler: Any, request: str) -> None:
    from mezzo.engines.sglang.inprocess.worker import Worker

    worker = scheduler.__dict__.setdefault("_mezzo_worker", None) or Worker(scheduler)
    scheduler._mezzo_worker = worker
    answer_request(Path(request), worker.rank, worker.handle)
