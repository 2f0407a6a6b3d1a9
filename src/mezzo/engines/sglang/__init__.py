"""The engine on an unmodified SGLang: in process, or against running servers by URL."""

from __future__ import annotations

from mezzo.engines.base import Engine, EngineSpec


def open_engine(spec: EngineSpec) -> Engine:
    """SGLang with the model of `spec` at the base, its trained tensors where its workers are."""
    from mezzo.engines.sglang.versions import check_version

    check_version()
    from mezzo.engines.sglang.engine import SGLangEngine

    return SGLangEngine(spec)
