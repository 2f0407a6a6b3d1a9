"""The engine on an unmodified vLLM, which runs in this process."""

from __future__ import annotations

from mezzo.engines.base import Engine, EngineSpec


def open_engine(spec: EngineSpec) -> Engine:
    """The model of `spec` on vLLM; what vLLM cannot train is refused before it is imported."""
    from mezzo.engines.vllm.support import installed_version, refuse_spec

    refuse_spec(spec)
    installed_version()
    from mezzo.engines.vllm.engine import VLLMEngine

    return VLLMEngine(spec)
