"""The engine on an unmodified SGLang: in process, or against running servers by URL."""

from __future__ import annotations

from mezzo.engines.base import Engine, EngineSpec


def open_engine(spec: EngineSpec) -> Engine:
    """SGLang with the model of `spec` at the base: servers where URLs are given, else started here."""
    if spec.urls:
        from mezzo.engines.sglang.server.engine import ServerEngine

        return ServerEngine(spec)
    from mezzo.engines.sglang.versions import check_version

    check_version()
    from mezzo.engines.sglang.inprocess.engine import SGLangEngine

    return SGLangEngine(spec)
