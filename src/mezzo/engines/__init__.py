"""Engines: what runs a model, scores probes and applies updates."""

from mezzo.engines.registry import ENGINES, open_engine, refuse_space

__all__ = ["ENGINES", "open_engine", "refuse_space"]
