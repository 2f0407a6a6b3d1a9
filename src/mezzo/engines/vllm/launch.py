"""Start and stop vLLM in this process, with adapters of zeros whose slots the probes are written into."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import locate
from mezzo.engines.lora_factors import module_of, peft_names, projection_of
from mezzo.engines.vllm.support import RANKS
from mezzo.errors import ConfigError, ModelError
from mezzo.types import TrainedTensor

# In a process of its own vLLM would take requests in as they come, so that the same question would not always be the same
# batch. Its usage reports would leave the machine.
REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Otherwise its log would hide the progress of a run.
USUAL = {"VLLM_LOGGING_LEVEL": "ERROR"}
# Size of the key-value cache on a CPU, and of its blocks, which are what prompts share.
CPU_CACHE_BYTES, CPU_BLOCK = 2**30, 32


def start(spec: EngineSpec, tensors: Sequence[TrainedTensor], adapters: int) -> Any:
    """An `LLM` with room for as many adapters on the modules of these factors."""
    set_num_threads = torch.set_num_threads
    with _environment(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.platforms import current_platform

        from vllm import LLM

        device = str(current_platform.device_type)
        _refuse_device(spec, device)
        if spec.threads:
            torch.set_num_threads(spec.threads)
        on_device = {"kv_cache_memory_bytes": CPU_CACHE_BYTES, "block_size": CPU_BLOCK} if device == "cpu" else {}
        try:
            return LLM(
                locate(spec.model),
                dtype=spec.dtype,
                trust_remote_code=spec.remote_code,
                seed=spec.seed % 2**32,
                skip_tokenizer_init=True,
                max_model_len=-1,  # as long as the cache has room for
                enable_prefix_caching=True,
                enforce_eager=device == "cpu",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                enable_lora=True,
                max_loras=adapters,
                max_lora_rank=next(rank for rank in RANKS if rank >= spec.space.rank),
                lora_target_modules=_projections(tensors),
                **on_device,
            )
        except Exception as error:  # of any kind: what vLLM cannot run shows in many ways
            raise ModelError(f"vLLM could not start: {first_line(error)}") from None
        finally:
            torch.set_num_threads = set_num_threads  # vLLM replaces it, for the whole process


def load_zero_adapters(llm: Any, spec: EngineSpec, tensors: Sequence[TrainedTensor], count: int) -> list[Any]:
    """Adapters of zeros, by vLLM's own way from files, and the requests that name them."""
    from vllm.lora.request import LoRARequest

    zeros = {
        name: torch.zeros(t.shape) for t in tensors for name in peft_names(module_of(t.name)) if t.kind[-1] in name
    }
    config = {
        "peft_type": "LORA",
        "r": spec.space.rank,
        "lora_alpha": spec.space.alpha,
        "target_modules": _projections(tensors),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    with tempfile.TemporaryDirectory(prefix="mezzo-") as folder:
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(zeros, Path(folder) / "adapter_model.safetensors")
        requests = [LoRARequest(f"mezzo-{number}", number, folder) for number in range(1, count + 1)]
        for request in requests:
            llm.llm_engine.add_lora(request)
    return requests


def _projections(tensors: Sequence[TrainedTensor]) -> list[str]:
    return sorted({projection_of(module_of(t.name)) for t in tensors})


def stop(llm: Any) -> None:
    """Stop vLLM and give its memory and its process group back."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cleanup_dist_env_and_memory()


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


def _refuse_device(spec: EngineSpec, device: str) -> None:
    asked = spec.device.partition(":")[0]
    if asked not in ("auto", device):
        raise ConfigError(f"the installed vLLM runs on {device}, not on {asked}: leave --device out")
    if device == "cpu" and spec.dtype != "float32":
        raise ConfigError(
            f"on a CPU the vllm engine computes in float32: leave out --dtype {spec.dtype}, or use --engine torch"
        )


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({**USUAL, **before, **REQUIRED})
    try:
        yield
    finally:
        for name in (*USUAL, *REQUIRED):
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
