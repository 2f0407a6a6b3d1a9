"""The engine for Hugging Face models in process."""

from __future__ import annotations

from typing import Any

from mezzo.engines.base import EngineSpec, Unit
from mezzo.engines.torch.engine import TorchEngine


def open_engine(spec: EngineSpec) -> TorchEngine:
    """The model of `spec` with its trained tensors at the base."""
    import torch

    from mezzo.engines.hub import locate
    from mezzo.engines.torch import quantized
    from mezzo.engines.torch.load import device_of, load_model

    device = device_of(spec.device)
    alone = spec.space.kind == "head" and spec.cache_mb > 0
    threads = torch.get_num_threads()
    if spec.threads or alone:
        torch.set_num_threads(spec.threads or HEAD_THREADS)
    how = quantized.settings(spec.quantize, device) if spec.quantize else None
    model = load_model(
        spec.model,
        spec.family,
        classes=spec.classes,
        seed=spec.seed,
        dtype=getattr(torch, spec.dtype),
        remote_code=spec.remote_code,
        quantize=how,
    )
    config: Any = model.config
    if spec.classes and config.pad_token_id is None:
        config.pad_token_id = spec.pad_id  # a causal model's head looks for the last token that is not padding
    engine = TorchEngine(
        model,
        spec.space,
        noise_kind=spec.noise_kind,
        unit=unit_of(spec.rows, spec.fewer_rows, device.type, alone=alone),
        seed=spec.seed,
        pad_id=spec.pad_id,
        device=device,
        prefix_ids=spec.prefix_ids,
        cache_mb=spec.cache_mb,
        base_digest=quantized.checkpoint_digest(locate(spec.model), spec.quantize) if spec.quantize else "",
    )
    if not spec.threads:
        engine.at_close = lambda: torch.set_num_threads(threads)
    return engine


CPU_ROWS, CPU_WASTE = 16, 0.1
"""More rows share more of what is done once a unit, and pad more; of 4, 8 and 16 in lengths equal and mixed, this is the best."""
HEAD_ROWS, HEAD_THREADS = 1024, 1
"""A head behind layers whose outcome is kept sees one position of each example: a whole batch is little work, and threads that
wait for each other cost more than they bring (ten times more where another process has one of the cores)."""


def unit_of(rows: int, fewer: bool, device: str, *, alone: bool = False) -> Unit:
    """The unit of work for `rows` examples at most; with `fewer`, as many as are fastest. `alone`: only a head runs."""
    if device != "cpu":
        return Unit(rows=rows, pad_to=8)
    if fewer and alone:
        return Unit(rows=HEAD_ROWS)
    return Unit(rows=min(rows, CPU_ROWS), waste=CPU_WASTE) if fewer else Unit(rows=rows)
