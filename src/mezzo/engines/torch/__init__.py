"""The engine for Hugging Face models in process."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from mezzo.engines.base import EngineSpec
from mezzo.engines.torch.engine import TorchEngine
from mezzo.types import MicroBatch


def open_engine(spec: EngineSpec) -> TorchEngine:
    """The model of `spec` with its trained tensors at the base."""
    import torch

    from mezzo.engines.hf_hub import locate
    from mezzo.engines.torch import quantized
    from mezzo.engines.torch.loading import devices_of, load_model

    device = devices_of(spec.device)[0]
    if spec.threads:
        torch.set_num_threads(spec.threads)
    quantize = quantized.loading_options(spec.quantize, device) if spec.quantize else None
    model = load_model(
        spec.model,
        spec.family,
        classes=spec.classes,
        seed=spec.seed,
        dtype=getattr(torch, spec.dtype),
        remote_code=spec.remote_code,
        quantize=quantize,
    )
    config: Any = model.config
    if spec.classes and (config.pad_token_id is None or _reads_last_token(model)):
        config.pad_token_id = spec.pad_id
    engine = TorchEngine(
        model,
        spec.space,
        noise_kind=spec.noise_kind,
        micro_batch=choose_micro_batch(spec.rows, spec.fewer_rows, device.type),
        seed=spec.seed,
        pad_id=spec.pad_id,
        device=spec.device,
        prefix_ids=spec.prefix_ids,
        cache_mb=spec.cache_mb,
        gradients=spec.gradients,
        offload=spec.offload,
        base_digest=quantized.checkpoint_digest(locate(spec.model), spec.quantize) if spec.quantize else "",
    )
    if spec.many_probes and spec.fewer_rows:
        engine.micro_batch = choose_for_probes(spec.rows, engine, spec.population > 0)
    if engine.frozen_cache and engine.frozen_cache.all_frozen and not spec.classes and device.type == "cpu":
        if spec.fewer_rows:
            engine.micro_batch = MicroBatch(rows=HEAD_ROWS)
        if not spec.threads:
            threads = torch.get_num_threads()
            torch.set_num_threads(HEAD_THREADS)
            engine.at_close = lambda: torch.set_num_threads(threads)
    return engine


def _reads_last_token(model: Any) -> bool:
    """True for a head that reads the last token that is not padding, as those of causal models do."""
    return "pad_token_id" in inspect.getsource(type(model).forward)


# More rows share more of what is done once a micro-batch, and pad more; the best of 4, 8 and 16, for equal and mixed
# lengths.
CPU_ROWS, CPU_WASTE = 16, 0.1
# Rows of a forward on a GPU where members differ in small tensors only: enough to hide the time in which kernels are launched.
# They are those of few examples, of similar length, at many probes.
GPU_ROWS, GPU_MEMBERS = 32, 32
# Members of a forward that generates on a CPU, a token at a time: half the time of pairs.
GENERATING_MEMBERS = 16
# An LM head behind cached layers reads one position of each example: many of them are little work, and threads that
# wait for each other cost more than they gain (ten times more where another process uses one of the cores).
HEAD_ROWS, HEAD_THREADS = 256, 1


def choose_for_probes(rows: int, engine: TorchEngine, generates: bool = False) -> MicroBatch:
    """For questions of many probes. Where large tensors are perturbed, that should be done for many rows at once."""
    if engine.population.large:
        return MicroBatch(rows=rows, pad_to=engine.micro_batch.pad_to, waste=engine.micro_batch.waste)
    if engine.device.type == "cuda":
        return MicroBatch(rows=min(rows, GPU_ROWS), members=GPU_MEMBERS, pad_to=8)
    return replace(engine.micro_batch, members=GENERATING_MEMBERS) if generates else engine.micro_batch


def choose_micro_batch(rows: int, fewer: bool, device: str) -> MicroBatch:
    """Micro-batches of `rows` examples at most; with `fewer`, of as many as are fastest."""
    if device != "cpu":
        return MicroBatch(rows=rows, pad_to=8)
    return MicroBatch(rows=min(rows, CPU_ROWS), waste=CPU_WASTE) if fewer else MicroBatch(rows=rows)
