"""`--factors`: which of LoRA's two factors are trained, and by which method as a default."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

import mezzo
from mezzo.config import from_mapping
from mezzo.errors import ConfigError, SpaceError
from mezzo.journal.content import read
from mezzo.method.space import Space
from mezzo.runs.defaults import apply_defaults


@pytest.mark.parametrize(("method", "factors"), [("solve", "b"), ("spsa", "both"), ("adam", "both")])
def test_each_method_has_its_own_factors(tiny_run, method, factors):
    options = {name: value for name, value in tiny_run.items() if name not in ("lr", "batch_size")}
    assert apply_defaults(from_mapping({**options, "method": method}), "masked").factors == factors


def test_factors_change_nothing_in_other_spaces(tiny_run):
    options = {**tiny_run, "method": "es", "objective": "exact_match", "lr": None, "space": "prefix"}
    usual, named = (
        apply_defaults(from_mapping({**options, **more}), "causal", rewards=True) for more in ({}, {"factors": "b"})
    )
    assert usual.eps == named.eps and usual.lr == named.lr


@pytest.mark.parametrize("factors", ["b", "both"])
def test_fixed_factors_keep_their_initial_values_and_are_exported(tiny_run, tmp_path, factors):
    run = mezzo.finetune(**tiny_run, factors=factors, steps=2, out=str(tmp_path / "run"))
    kinds = {tensor.name.split(".")[-2] for tensor in read(tmp_path / "run").header.tensors}
    assert kinds == ({"lora_B"} if factors == "b" else {"lora_A", "lora_B"})
    start, end = (
        load_file(mezzo.export(run.out, "adapter", out=tmp_path / f"{at}", at=at) / "adapter_model.safetensors")
        for at in (0, 2)
    )
    assert {name.split(".")[-2] for name in end} == {"lora_A", "lora_B"}
    for name, values in end.items():
        assert np.array_equal(values, start[name]) == ("lora_A" in name and factors == "b")


def test_other_factors_are_refused(tiny_run):
    with pytest.raises(ConfigError, match="factors"):
        mezzo.finetune(**tiny_run, factors="a")
    with pytest.raises(SpaceError, match="factors of LoRA are 'b' or 'both', not 'a'"):
        Space("lora", factors="a")


def test_pattern_that_matches_fixed_factors_alone_says_how_to_train_them(tiny_run, tmp_path):
    with pytest.raises(SpaceError, match="--factors both trains A too"):
        mezzo.finetune(**tiny_run, factors="b", only="*lora_A*", steps=1, out=str(tmp_path / "run"))
