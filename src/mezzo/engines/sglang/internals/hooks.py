"""What mezzo adds to SGLang's classes, in each of its processes: one method, and answers to names that no parameter has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

RECIPE_METHOD = "load_lora_weights_from_tensors"
Tensors = Mapping[str, Any]


def add_scheduler_method(name: str, method: Callable[..., None]) -> None:
    """Add a method that `Engine.collective_rpc` calls on every rank."""
    from sglang.srt.managers.scheduler import Scheduler

    setattr(Scheduler, name, method)


def answer_names(prefix: str, answer: Callable[[Any, str], Any]) -> None:
    """Answer requests for weights whose name begins with `prefix` by `answer(model, name)`; SGLang answers all others."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    weights_by_name = TpModelWorker.get_weights_by_name

    def get_weights_by_name(worker: Any, recv_req: Any) -> Any:
        if not recv_req.name.startswith(prefix):
            return weights_by_name(worker, recv_req)
        return answer(worker.model_runner.model, recv_req.name)

    TpModelWorker.get_weights_by_name = get_weights_by_name


def convert_adapters(convert: Callable[[dict[str, Any], Tensors], Tensors]) -> None:
    """Have SGLang load what `convert(kept, tensors)` makes of an adapter's tensors; `kept` lives as long as the rank.

    SGLang catches what fails there, and tells the client.
    """
    from sglang.srt.lora.lora_manager import LoRAManager

    load_weights = getattr(LoRAManager, RECIPE_METHOD, None)
    if load_weights is None:
        return

    def load_lora_weights_from_tensors(manager: Any, lora_ref: Any, tensors: Tensors) -> None:
        load_weights(manager, lora_ref, convert(manager.__dict__.setdefault("_mezzo_factors", {}), tensors))

    setattr(LoRAManager, RECIPE_METHOD, load_lora_weights_from_tensors)


def converts_adapters() -> bool:
    """Whether this version reads adapters where `convert_adapters` expects it."""
    from sglang.srt.lora.lora_manager import LoRAManager

    return hasattr(LoRAManager, RECIPE_METHOD)


def gather(value: Any) -> list[Any]:
    """The values of all ranks, each of which has to call this."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return list(get_tp_group().all_gather_object(value))
