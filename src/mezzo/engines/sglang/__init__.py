"""The engine on an unmodified SGLang: started in process, or running as servers that are reached by URL."""

from __future__ import annotations

from mezzo.engines.base import Engine, EngineSpec


def open_engine(spec: EngineSpec) -> Engine:
    """The model of `spec` on SGLang: on its servers where URLs are given, otherwise in process."""
    if spec.urls:
        from mezzo.engines.sglang.server.engine import ServerEngine

        return ServerEngine(spec)
    from mezzo.engines.sglang.versions import installed_version

    installed_version()
    from mezzo.engines.sglang.inprocess.engine import InProcessEngine

    return InProcessEngine(spec)
