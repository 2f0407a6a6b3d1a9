"""Adapters as recipes: where mezzo is installed beside a server, seeds travel and each rank makes the factors of a probe itself.

The trained factors of LoRA are sent once, when a client attaches; from then on a recipe holds the updates since the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.engines.lora_factors import LoraFactors
from mezzo.engines.sglang.adapters import adapter_tensors, noise_factors
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.types import Probe, TrainedTensor, Update

RECIPE, VALUE = "mezzo.recipe", "mezzo.value."
# Clients whose factors a rank keeps: those that were heard of last.
MOST_CLIENTS = 16
# What a rank says of a client whose factors it keeps no more.
FORGOTTEN = "mezzo keeps no factors of this client"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a rank needs to make the adapter of a probe."""

    client: str
    noise_kind: Any
    trained: tuple[TrainedTensor, ...]
    probe: Probe
    updates: tuple[Update, ...] = ()
    """LoRA: the updates to apply first."""


def encode_recipe(recipe: Recipe, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A recipe as an adapter file; with `values`, those that the factors start from, trained or not."""
    text = json.dumps(asdict(recipe)).encode()
    return {RECIPE: torch.frombuffer(bytearray(text), dtype=torch.uint8)} | {
        VALUE + name: value for name, value in (values or {}).items()
    }


def decode_recipe(tensors: Mapping[str, Tensor]) -> Recipe:
    content = json.loads(tensors[RECIPE].cpu().numpy().tobytes())
    return Recipe(
        client=content["client"],
        noise_kind=content["noise_kind"],
        trained=tuple(TrainedTensor(**{**each, "shape": tuple(each["shape"])}) for each in content["trained"]),
        probe=Probe(_pairs(content["probe"]["terms"])),
        updates=tuple(Update(_pairs(each["terms"]), each["keep"]) for each in content["updates"]),
    )


class RankFactors(LoraFactors):
    """The LoRA factors of one client on one rank."""

    def __init__(self, recipe: Recipe, values: Mapping[str, Tensor]) -> None:
        trained = {each.name for each in recipe.trained}
        frozen = {name: value for name, value in values.items() if name not in trained}
        source = NoiseSource(recipe.noise_kind, torch.device("cpu"))
        self.population = Population([(t, values[t.name].clone()) for t in recipe.trained], source, frozen)


@torch.no_grad()
def make_adapter(kept: dict[str, RankFactors], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter of a recipe. `kept` are the factors of the rank's clients, which the recipe may start or move."""
    recipe = decode_recipe(tensors)
    if all(each.kind == "matrix" for each in recipe.trained):
        source = NoiseSource(recipe.noise_kind, torch.device("cpu"))
        made = noise_factors(source, recipe.trained, recipe.probe)
    else:
        values = {name.removeprefix(VALUE): value for name, value in tensors.items() if name.startswith(VALUE)}
        factors = kept.pop(recipe.client, None)
        if values:
            factors = RankFactors(recipe, values)
        if factors is None:
            raise ValueError(FORGOTTEN)
        kept[recipe.client] = factors
        while len(kept) > MOST_CLIENTS:
            kept.pop(next(iter(kept)))
        factors.apply(recipe.updates)
        made = ((module, a[0], b[0]) for module, a, b in factors.at_probes([recipe.probe]))
    adapter: dict[str, Tensor] = {}
    for module, a, b in made:
        adapter |= adapter_tensors(module, a, b)
    return adapter


def _pairs(terms: Sequence[Any]) -> tuple[tuple[int, float], ...]:
    return tuple((int(seed), float(scale)) for seed, scale in terms)
