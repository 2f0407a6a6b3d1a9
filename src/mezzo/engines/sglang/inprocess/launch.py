"""Start and stop SGLang in process: its arguments on a GPU and on a plain CPU, and the zero adapters that become slots."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any

import torch

from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import load_config, locate
from mezzo.engines.lora_factors import module_of, peft_names
from mezzo.engines.sglang.adapters import PROBES_PER_FORWARD, AdapterShape, adapter_count
from mezzo.engines.sglang.model_facts import ModelFacts
from mezzo.engines.sglang.module_names import sglang_path
from mezzo.errors import ConfigError, ModelError, RunFailed

# Settings that SGLang reads, and those of transformers that say the same: OPT has no grouped heads, Gemma another name.
STATED_AS = {"num_key_value_heads": "num_attention_heads", "hidden_act": "hidden_activation"}
# Size of the key-value cache: enough for a large batch; SGLang lowers it where a GPU has less memory.
CACHE_TOKENS = {"cpu": 65_536, "cuda": 1_048_576}
# Texts that grow at the same time; the others wait.
MOST_TEXTS = 1024


def start(spec: EngineSpec, shape: AdapterShape | None) -> tuple[Any, list[Any]]:
    """Start an `sglang.Engine`; return it and the processes it started."""
    cpu = runs_on_cpu(spec.device)
    with _set_environment(_environment_variables(spec, cpu)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = _children()
        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(_is_not_sigquit_report)
        try:
            import sglang

            engine = sglang.Engine(**engine_arguments(spec, shape, cpu))
        except (ValueError, RuntimeError, AssertionError, OSError) as error:
            first = (str(error).splitlines() or [repr(error)])[0]
            raise ModelError(f"SGLang could not start: {first}") from None
    return engine, [child for child in _children() if child not in before]


def stop(engine: Any, processes: Sequence[Any]) -> None:
    """Stop SGLang. Its own `shutdown` would kill all children of this process, not only SGLang's."""
    atexit.unregister(engine.shutdown)
    watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()
    if getattr(engine, "send_to_rpc", None) is not None:
        engine.send_to_rpc.close(linger=0)
        engine.send_to_rpc = None
    import psutil

    tree = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree += process.children(recursive=True)
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(tree, timeout=30)


def _children() -> list[Any]:
    """This process's children, without multiprocessing's resource tracker, which outlives any engine.

    The tracker is started here, while PYTHONWARNINGS is set: it would otherwise warn at exit about what SGLang leaves behind.
    """
    import psutil

    resource_tracker.ensure_running()
    tracker = getattr(resource_tracker, "_resource_tracker")._pid  # noqa: B009
    return [child for child in psutil.Process().children() if child.pid != tracker]


class WorkerDied(RunFailed):
    """One of SGLang's processes is gone."""


def raise_worker_died(signum: int, frame: Any) -> None:
    """SGLang's processes send SIGQUIT when they fail; SGLang's own handler would kill this process."""
    raise WorkerDied("one of SGLang's processes died; its log above says why. A run that had begun can be resumed")


def install_sigquit_handler() -> None:
    """Replace the handler that SGLang installs with its first request."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, raise_worker_died)


def engine_arguments(spec: EngineSpec, shape: AdapterShape | None, cpu: bool) -> dict[str, Any]:
    """SGLang's own options. Nothing is decoded for scores, so CUDA graphs, grammars and overlap would only cost."""
    arguments: dict[str, Any] = {
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
        "enable_custom_logit_processor": True,  # draws are made by one
        "max_total_tokens": CACHE_TOKENS["cpu" if cpu else "cuda"],
        "max_running_requests": max(
            64, PROBES_PER_FORWARD * spec.rows * 2, min(spec.population * spec.rows, MOST_TEXTS)
        ),
        "chunked_prefill_size": -1,
        "page_size": 1,
        "log_level": "error",
        "custom_sigquit_handler": raise_worker_died,
    }
    if missing := _missing_settings(load_config(spec.model, spec.remote_code)):
        arguments["json_model_override_args"] = json.dumps(missing)
    if spec.family == "masked":  # an encoder attends in both directions, so nothing can be cached
        arguments |= {"is_embedding": True, "disable_radix_cache": True}
    if cpu:
        arguments |= {"device": "cpu", "attention_backend": "torch_native"}
        arguments |= {"mem_fraction_static": 0.5, "sleep_on_idle": True}
    else:
        arguments |= {"attention_backend": "triton", "base_gpu_id": int(spec.device.partition(":")[2] or 0)}
    if shape is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": shape.rank,
            "lora_target_modules": list(shape.targets),
            "max_loras_per_batch": adapter_count(spec) + 2,
            "lora_backend": "torch_native" if cpu else "triton",
        }
    return arguments


def _missing_settings(config: Any) -> dict[str, Any]:
    """What SGLang reads from a configuration and some architectures do not state, or state under another name."""
    missing = {name: getattr(config, other, None) for name, other in STATED_AS.items() if not hasattr(config, name)}
    return {name: value for name, value in missing.items() if value is not None}


def load_zero_adapters(engine: Any, shape: AdapterShape, facts: ModelFacts, names: Sequence[str]) -> None:
    """Load adapters of zeros, known to SGLang by name; the workers write the probes into them."""
    zeros: dict[str, torch.Tensor] = {}
    for tensor in (*facts.trained, *facts.frozen):  # a matrix, or one of the two factors of an adapter
        name_a, name_b = peft_names(sglang_path(module_of(tensor.name)))
        if tensor.kind != "lora_B":
            zeros[name_a] = torch.zeros(shape.rank, tensor.shape[1])
        if tensor.kind != "lora_A":
            zeros[name_b] = torch.zeros(tensor.shape[0], shape.rank)
    for name in names:
        loaded = engine.load_lora_adapter_from_tensors(name, zeros, shape.peft_config())
        if not loaded.success:
            raise ModelError(f"SGLang refused an adapter: {loaded.error_message}")


def runs_on_cpu(device: str) -> bool:
    if device == "auto":
        return not torch.cuda.is_available()
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"the sglang engine runs on cpu, cuda or cuda:N, the first GPU of its ranks, not {device!r}")
    return device == "cpu"


def thread_limit(spec: EngineSpec) -> int | None:
    """The threads of all ranks together, as the spec or OMP_NUM_THREADS says; None: as many as there are cores."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return spec.threads or (int(said) if said.isdecimal() and int(said) else None)


def _environment_variables(spec: EngineSpec, cpu: bool) -> dict[str, str]:
    """What SGLang's processes read from the environment; the user's own settings take precedence."""
    variables = {"PYTHONWARNINGS": "ignore"}
    if spec.family == "masked":
        variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "mezzo.engines.sglang.models"
    if cpu:
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
        # Pinned threads that spin while waiting would starve other threads of their core.
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    threads = thread_limit(spec)
    if cpu and (spec.tp > 1 or threads):
        # SGLang pins its threads, as many as it finds cores; ranks on the same cores would wait for each other.
        cores = sorted(os.sched_getaffinity(0))[: max(threads, spec.tp) if threads else None]
        shares = [cores[rank :: spec.tp] or [cores[rank % len(cores)]] for rank in range(spec.tp)]
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return {name: value for name, value in variables.items() if name not in os.environ}


@contextlib.contextmanager
def _set_environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _is_not_sigquit_report(record: logging.LogRecord) -> bool:
    """False for SGLang's report that `custom_sigquit_handler` is in use, which it logs as an error."""
    return "SIGQUIT handler" not in record.getMessage()
