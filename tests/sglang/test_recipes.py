"""Adapters that a server makes from seeds have the bits of those that the client would upload."""

from __future__ import annotations

import pytest
import torch

from mezzo.engines.sglang.model_facts import read_model_facts
from mezzo.engines.sglang.server.recipes import RankFactors, make_adapter
from mezzo.engines.sglang.server.replica import Replica
from mezzo.engines.sglang.server.weights import ServerMatrices, UploadedLora
from mezzo.method.space import Space
from tests.sglang.conftest import PAIR, UPDATES, spec_of

SPACES = {
    "lora": Space("lora", rank=4, alpha=8),
    "half of lora": Space("lora", rank=4, alpha=8, only=("*.lora_B.*",)),
    "matrices": Space("matrices", noise_rank=4),
}


def replica(makes_adapters: bool) -> Replica:
    found = Replica("http://127.0.0.1:1", "m", None)
    found.makes_adapters = makes_adapters
    return found


@pytest.mark.parametrize("name", SPACES)
def test_recipe_makes_the_adapter_that_would_be_uploaded(name):
    spec = spec_of(SPACES[name], urls=("http://127.0.0.1:1",))
    facts, uploaded, made = read_model_facts(spec), replica(False), replica(True)
    if name == "matrices":
        weights = ServerMatrices(spec, facts, "mezzo-client", lambda task: None)
    else:
        weights = UploadedLora(spec, facts, "mezzo-client")
        weights.attach(made)
    kept: dict[str, RankFactors] = {}
    sizes = []
    for step in range(4):
        recipes = weights.adapters(PAIR, made)
        sizes.append(sum(tensor.nbytes for recipe in recipes for tensor in recipe.values()))
        for expected, recipe in zip(weights.adapters(PAIR, uploaded), recipes, strict=True):
            adapter = make_adapter(kept, recipe)
            assert adapter.keys() == expected.keys()
            assert all(torch.equal(adapter[key], expected[key]) for key in expected)
        if step == 2 and name != "matrices":
            weights.load({key: 2 * value for key, value in weights.state().items()})  # sent once, as at the start
        else:
            weights.apply(UPDATES)
    complete = sum(tensor.nbytes for each in weights.adapters(PAIR, uploaded) for tensor in each.values())
    assert sizes[1] < complete / 5
