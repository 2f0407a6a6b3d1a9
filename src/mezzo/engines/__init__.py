"""Engines by name; one is imported only when it is asked for."""

from __future__ import annotations

import importlib

from mezzo.engines.base import Engine, EngineSpec
from mezzo.errors import ConfigError, nearest

ENGINES = {"torch": "mezzo.engines.torch:open_engine", "sglang": "mezzo.engines.sglang:open_engine"}


def open_engine(name: str, spec: EngineSpec) -> Engine:
    """Start the engine `name` with the model of `spec` at the base."""
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}{nearest(name, ENGINES)} (engines: {', '.join(ENGINES)})")
    module, _, function = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), function)(spec)
    return engine
