"""Start and stop SGLang in process: its arguments on a GPU and on a plain CPU, and the zero adapters that become slots."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import load_config, locate
from mezzo.engines.lora_factors import module_of, peft_names
from mezzo.engines.sglang.adapters import AdapterShape, adapter_count, choose_micro_batch
from mezzo.engines.sglang.internals import processes as internals
from mezzo.engines.sglang.model_facts import ModelFacts
from mezzo.engines.sglang.module_names import ENCODER, MODEL_PACKAGE, sglang_path
from mezzo.errors import ConfigError, ModelError, RunFailed

# Settings that SGLang reads, and those of transformers that say the same: OPT has no grouped heads, Gemma another name.
STATED_AS = {"num_key_value_heads": "num_attention_heads", "hidden_act": "hidden_activation"}
# Size of the key-value cache: enough for a large batch; SGLang lowers it where a GPU has less memory.
CACHE_TOKENS = {"cpu": 65_536, "cuda": 1_048_576}
# Texts that grow at the same time; the others wait.
MOST_TEXTS = 1024
# Options of `sglang.Engine`, as a JSON object, that are used instead of those below.
USER_OPTIONS = "MEZZO_SGLANG_OPTIONS"
WITHOUT_GRAPHS = {"disable_cuda_graph": True, "disable_overlap_schedule": True}
# What SGLang loads into each of its processes, and the group of entry points in which it looks.
PLUGIN, PLUGIN_GROUP = "mezzo.engines.sglang.inprocess.plugin:register", "sglang.srt.plugins"


def start(spec: EngineSpec, shape: AdapterShape | None, **changes: Any) -> tuple[Any, list[Any]]:
    """Start an `sglang.Engine`, with these `changes` of its options; return it and the processes it started."""
    cpu = runs_on_cpu(spec.device)
    arguments = engine_arguments(spec, shape, cpu) | changes | _user_options()
    with _set_environment(_environment_variables(spec, cpu)), _announce_plugin(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        internals.silence_sigquit_report()
        try:
            return _start(arguments)
        except (ModelError, WorkerDied) as error:
            if arguments["disable_cuda_graph"]:
                raise
            print(f"trying again without CUDA graphs, which is slower: {error}", file=sys.stderr)
            return _start(arguments | WITHOUT_GRAPHS)


@contextlib.contextmanager
def _announce_plugin() -> Iterator[None]:
    """Let SGLang's processes find mezzo's plugin also where mezzo is not installed but on PYTHONPATH, as from a checkout."""
    if any(each.value == PLUGIN for each in metadata.entry_points(group=PLUGIN_GROUP)):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mezzo-plugin-") as folder:
        info = Path(folder) / "mezzo_plugin-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mezzo-plugin\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\nmezzo = {PLUGIN}\n")
        sys.path.append(folder)  # which the processes it starts are given
        try:
            yield
        finally:
            sys.path.remove(folder)


def _start(arguments: dict[str, Any]) -> tuple[Any, list[Any]]:
    before = _children()
    try:
        import sglang

        engine = sglang.Engine(**arguments)
    except (ValueError, RuntimeError, AssertionError, OSError, TypeError, WorkerDied) as error:
        _kill([child for child in _children() if child not in before])
        internals.drop_messages()
        if isinstance(error, WorkerDied):
            raise
        first = (str(error).splitlines() or [repr(error)])[0]
        raise ModelError(f"SGLang could not start: {first}") from None
    return engine, [child for child in _children() if child not in before]


def _user_options() -> dict[str, Any]:
    """What the user's environment says of SGLang's own options."""
    try:
        options = json.loads(os.environ.get(USER_OPTIONS, "{}"))
    except ValueError as error:
        raise ConfigError(f"{USER_OPTIONS} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f'{USER_OPTIONS} must be an object such as {{"disable_cuda_graph": true}}')
    return options


def stop(engine: Any, processes: Sequence[Any]) -> None:
    """Stop SGLang. Its own `shutdown` would kill all children of this process, not only SGLang's."""
    internals.detach(engine)
    _kill(processes)


def _kill(processes: Sequence[Any]) -> None:
    """Kill these processes and their children."""
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


WORKER_DIED = "one of SGLang's processes died; its log above says why. A run that had begun can be resumed"


class WorkerDied(RunFailed):
    """One of SGLang's processes is gone."""


def raise_worker_died(signum: int, frame: Any) -> None:
    """SGLang's processes send SIGQUIT when they fail; SGLang's own handler would kill this process."""
    with contextlib.suppress(
        RuntimeError
    ):  # an event loop would log the error, and wait for an answer that never comes
        asyncio.get_running_loop().stop()
    raise WorkerDied(WORKER_DIED)


@contextlib.contextmanager
def noticing_death() -> Iterator[None]:
    """Raise WorkerDied if the event loop of a request was stopped because of that."""
    try:
        yield
    except RuntimeError as error:
        if "loop stopped" in str(error):
            raise WorkerDied(WORKER_DIED) from None
        raise


def install_sigquit_handler() -> None:
    """Replace the handler that SGLang installs with its first request."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, raise_worker_died)


def engine_arguments(spec: EngineSpec, shape: AdapterShape | None, cpu: bool) -> dict[str, Any]:
    """SGLang's own options. Nothing is decoded for scores, so that CUDA graphs, grammars and overlap would only cost."""
    unit = choose_micro_batch(spec)
    running = max(64, 4 * spec.rows, unit.members * unit.rows, min(spec.population * spec.rows, MOST_TEXTS))
    arguments: dict[str, Any] = {
        "model_path": locate(spec.model),
        "dtype": spec.dtype,
        "tp_size": spec.tp,
        "trust_remote_code": spec.remote_code,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        **WITHOUT_GRAPHS,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "enable_custom_logit_processor": True,  # draws are made by one
        "max_total_tokens": CACHE_TOKENS["cpu" if cpu else "cuda"],
        "max_running_requests": running,
        "chunked_prefill_size": -1,
        "page_size": 1,
        "log_level": "error",
        "custom_sigquit_handler": raise_worker_died,
    }
    settings = _missing_settings(load_config(spec.model, spec.remote_code))
    if spec.family == "masked":  # an encoder attends in both directions, so nothing can be cached
        arguments |= {"is_embedding": True, "disable_radix_cache": True}
        settings["architectures"] = [ENCODER]
    if settings:
        arguments["json_model_override_args"] = json.dumps(settings)
    if cpu:
        arguments |= {"device": "cpu", "attention_backend": "torch_native"}
        arguments |= {"mem_fraction_static": 0.5, "sleep_on_idle": True}
    else:
        arguments |= {"attention_backend": "triton", "base_gpu_id": int(spec.device.partition(":")[2] or 0)}
    if spec.population and not cpu:
        # Graphs of decoding read the adapter slots where they are, so that what is written there counts. Prompts, and the
        # batches that mezzo builds, have no graph.
        arguments |= {"disable_cuda_graph": False, "disable_overlap_schedule": False}
        arguments |= {"cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": running}
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
        variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] = MODEL_PACKAGE
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
