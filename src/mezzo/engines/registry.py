"""The engines by name and what each declares. An engine is imported only when it is opened."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mezzo.errors import ConfigError, SpaceError, nearest

if TYPE_CHECKING:
    from mezzo.engines.base import Engine, EngineSpec
    from mezzo.method.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What must be known of an engine before it is opened."""

    factory: str
    """`module:function` that opens it from an EngineSpec."""
    spaces: tuple[str, ...] = ()
    """The spaces it trains, its default first; empty: every space and every name pattern."""
    low_rank_spaces: tuple[str, ...] = ()
    """Spaces that need low-rank noise there."""
    options: tuple[str, ...] = ()
    """Options that are refused with engines that do not list them."""
    adapters_only: bool = False
    """It runs no model without an adapter, not even one that is not trained."""
    workers: bool = True
    """Workers can run it."""
    generates: bool = True
    """It implements `generate`."""
    gradients: bool = False
    """It computes gradients, for the baseline that needs them."""
    pins_cores: bool = False
    """It pins its threads to the first cores of its process, so that workers of one machine need cores of their own."""

    def trains(self, space: str) -> bool:
        return not self.spaces or space in self.spaces

    def open(self, spec: EngineSpec) -> Engine:
        """Start the engine with the model of `spec` at the base."""
        module, _, function = self.factory.partition(":")
        return getattr(importlib.import_module(module), function)(spec)


ENGINES: dict[str, EngineInfo] = {
    "torch": EngineInfo(
        factory="mezzo.engines.torch:open_engine",
        options=("quantize", "offload", "train_head", "temperature", "top_p", "draws"),
        gradients=True,
    ),
    "sglang": EngineInfo(
        factory="mezzo.engines.sglang:open_engine",
        spaces=("lora", "matrices"),
        low_rank_spaces=("matrices",),
        options=("tp", "url", "exclusive_server", "server_timeout", "temperature", "top_p", "draws"),
        pins_cores=True,
    ),
    "vllm": EngineInfo(factory="mezzo.engines.vllm:open_engine", spaces=("lora",), adapters_only=True, workers=False),
}


def refuse_space(engine: str, space: Space) -> None:
    """Raise SpaceError for a space that the engine does not train, or not with dense noise."""
    info = ENGINES[engine]
    if not info.trains(space.kind):
        raise SpaceError(
            f"the {engine} engine trains --space {' or '.join(info.spaces)}, where a probe is an adapter: "
            f"use --engine torch for {space.kind!r}"
        )
    if space.kind in info.low_rank_spaces and not space.noise_rank:
        raise SpaceError(
            f"on the {engine} engine the directions of space {space.kind!r} must be adapters: use --noise lowrank, "
            "or --engine torch for dense noise"
        )


def open_engine(name: str, spec: EngineSpec) -> Engine:
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}{nearest(name, ENGINES)} (engines: {', '.join(ENGINES)})")
    return ENGINES[name].open(spec)
