"""Start SGLang in process: its arguments on a GPU and on a plain CPU, and the zero adapters that become slots."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import locate
from mezzo.engines.sglang.facts import Facts
from mezzo.engines.sglang.support import FUSED, TRAINABLE, leaf_of, module_of, served
from mezzo.errors import ConfigError, ModelError, RunFailed
from mezzo.types import TrainedTensor

MEMBERS = 2
"""Probes of one forward: the two signs of a direction."""
CACHE_TOKENS = {"cpu": 65_536, "cuda": 1_048_576}
"""Key-value cache in tokens: enough for a large batch; on a GPU less, where memory does not allow as much."""


@dataclass(frozen=True)
class Adapter:
    """The shape of the slots: LoRA's own rank and scale, or the rank of the noise at scale one."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "bias": "none",
            "lora_dropout": 0.0,
            "task_type": "CAUSAL_LM",
        }


def adapter_of(spec: EngineSpec, trained: Sequence[TrainedTensor]) -> Adapter | None:
    """What the adapters of a space look like; None where nothing can be trained."""
    if spec.space.kind not in TRAINABLE:
        return None
    targets = {leaf_of(served(module_of(t.name))) for t in trained}
    for parts in FUSED.values():  # SGLang stacks these, and wants all of a stack
        targets |= set(parts) if targets & set(parts) else set()
    rank = spec.space.rank if spec.space.kind == "lora" else spec.space.noise_rank
    alpha = spec.space.alpha if spec.space.kind == "lora" else float(rank)
    return Adapter(rank, alpha, tuple(sorted(targets)))


def start(spec: EngineSpec, adapter: Adapter | None) -> tuple[Any, list[Any]]:
    """An `sglang.Engine` and the processes it started; whatever it cannot do is explained."""
    cpu = on_cpu(spec.device)
    with _environment(_variables(spec, cpu)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = _children()
        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(_not_our_handler)
        try:
            import sglang

            engine = sglang.Engine(**arguments(spec, adapter, cpu))
        except (ValueError, RuntimeError, AssertionError, OSError) as error:
            first = (str(error).splitlines() or [repr(error)])[0]
            raise ModelError(f"SGLang could not start: {first}") from None
    return engine, [child for child in _children() if child not in before]


def stop(engine: Any, processes: Sequence[Any]) -> None:
    """End SGLang. Its own `shutdown` would end every child of this process, whoever started it."""
    atexit.unregister(engine.shutdown)
    watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()
    if getattr(engine, "send_to_rpc", None) is not None:
        engine.send_to_rpc.close(linger=0)
        engine.send_to_rpc = None
    import psutil

    doomed = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed += process.children(recursive=True)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=30)


def _children() -> list[Any]:
    """This process's children, without multiprocessing's own tracker, which outlives any engine. It is started with SGLang's
    variables: of what SGLang leaves behind when it is stopped, it would else complain when this process ends."""
    import psutil

    resource_tracker.ensure_running()
    tracker = getattr(resource_tracker, "_resource_tracker")._pid  # noqa: B009
    return [child for child in psutil.Process().children() if child.pid != tracker]


def worker_died(signum: int, frame: Any) -> None:
    """SGLang's processes send SIGQUIT when they fail; its own answer would be to kill this process."""
    raise RunFailed("a process of SGLang has died; its log above says why. A run that had begun can be resumed")


def watch_workers() -> None:
    """SGLang puts its own handler in place with the first request; put ours back."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, worker_died)


def arguments(spec: EngineSpec, adapter: Adapter | None, cpu: bool) -> dict[str, Any]:
    """SGLang's own options. Scores need no decoding, so that graphs, grammars and overlap only cost."""
    chosen: dict[str, Any] = {
        "model_path": locate(spec.model),
        "dtype": spec.dtype,
        "tp_size": spec.tp,
        "trust_remote_code": spec.remote_code,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "max_total_tokens": CACHE_TOKENS["cpu" if cpu else "cuda"],
        "max_running_requests": max(64, MEMBERS * spec.rows * 2),
        "chunked_prefill_size": -1,
        "page_size": 1,
        "log_level": "error",
        "custom_sigquit_handler": worker_died,
    }
    if spec.family == "masked":  # an encoder reads whole sequences and caches nothing
        chosen |= {"is_embedding": True, "disable_radix_cache": True}
    if cpu:
        chosen |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "mem_fraction_static": 0.5,
            "sleep_on_idle": True,
        }
    else:
        chosen |= {"attention_backend": "triton", "base_gpu_id": int(spec.device.partition(":")[2] or 0)}
    if adapter is not None:
        chosen |= {
            "enable_lora": True,
            "max_lora_rank": adapter.rank,
            "lora_target_modules": list(adapter.targets),
            "max_loras_per_batch": MEMBERS + 2,
            "lora_backend": "torch_native" if cpu else "triton",
        }
    return chosen


def load_slots(engine: Any, adapter: Adapter, facts: Facts, names: Sequence[str]) -> None:
    """Adapters of zeros, known to SGLang by name; the workers write the probes into them."""
    import torch

    shapes = _shapes(facts)
    zeros = {}
    for module, (out, inner) in shapes.items():
        module = served(module)
        zeros[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(adapter.rank, inner)
        zeros[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(out, adapter.rank)
    for name in names:
        loaded = engine.load_lora_adapter_from_tensors(name, zeros, adapter.config())
        if not loaded.success:
            raise ModelError(f"SGLang refused an adapter: {loaded.error_message}")


def _shapes(facts: Facts) -> dict[str, tuple[int, int]]:
    """(out, in) of each adapted matrix."""
    found: dict[str, list[int]] = {}
    for trained in (*facts.trained, *facts.frozen):
        shape = found.setdefault(module_of(trained.name), [0, 0])
        if trained.kind != "lora_A":
            shape[0] = trained.shape[0]
        if trained.kind != "lora_B":
            shape[1] = trained.shape[1]
    return {module: (out, inner) for module, (out, inner) in found.items()}


def on_cpu(device: str) -> bool:
    import torch

    if device == "auto":
        return not torch.cuda.is_available()
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"the sglang engine runs on cpu, cuda or cuda:N, the first GPU of its ranks, not {device!r}")
    return device == "cpu"


def _variables(spec: EngineSpec, cpu: bool) -> dict[str, str]:
    """What SGLang's processes read from the environment; a user's own setting stands."""
    chosen = {"PYTHONWARNINGS": "ignore"}
    if spec.family == "masked":
        chosen["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "mezzo.engines.sglang.models"
    if cpu:
        chosen["SGLANG_USE_CPU_ENGINE"] = "1"
        chosen["OMP_WAIT_POLICY"] = "PASSIVE"  # pinned threads that spin while they wait starve whoever shares the core
    if cpu and (spec.tp > 1 or spec.threads):
        # SGLang pins its threads: ranks on the same cores would wait for each other.
        cores = sorted(os.sched_getaffinity(0))[: max(spec.threads or 0, spec.tp) if spec.threads else None]
        shares = [cores[rank :: spec.tp] or [cores[rank % len(cores)]] for rank in range(spec.tp)]
        chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return {name: value for name, value in chosen.items() if name not in os.environ}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _not_our_handler(record: logging.LogRecord) -> bool:
    """SGLang reports the use of `custom_sigquit_handler` as an error, which it is not."""
    return "SIGQUIT handler" not in record.getMessage()
