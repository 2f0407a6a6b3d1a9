"""The plan of forwards: what it says is what is installed, and it can be taken off again."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from mezzo.engines.architectures import ARCHITECTURES, ENCODER_LINEARS, ENCODER_NORMS, Part, part_of
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.forward.choice import Choice
from mezzo.engines.torch.forward.plan import Plan, PlanLine, Stage
from mezzo.method.space import Space
from mezzo.types import Probe
from tests.conftest import make_batch, make_llama, make_roberta
from tests.torch_engine.test_families import FAMILIES, make

PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))
NO_KERNELS = "no kernels: they need a GPU"


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_lines_count_modules_and_give_reasons():
    engine = TorchEngine(make_roberta(), Space("lora", rank=2), pad_id=1)
    assert engine.plan.lines() == [
        PlanLine(1, "RobertaModel", "readout positions"),
        PlanLine(1, "RobertaLayer", "own forward", NO_KERNELS),
        PlanLine(4, "Linear", "population linear (LoRA)", NO_KERNELS),
        PlanLine(1, "RobertaLayer", "trimmed last layer", NO_KERNELS),
        PlanLine(1, "Linear", "population linear (label words)", NO_KERNELS),
    ]
    assert "    4  Linear        population linear (LoRA)         no kernels: they need a GPU\n" in str(engine.plan)


def test_frozen_layers_return_cached_outputs():
    engine = TorchEngine(make_llama(), Space("full", layers="1:"), pad_id=1, cache_mb=1)
    forwards = {(line.module, line.forward): line.count for line in engine.plan.lines()}
    assert forwards["LlamaDecoderLayer", "cached output"] == 1
    assert forwards["LlamaDecoderLayer", "trimmed last layer"] == 1
    assert forwards["LlamaRMSNorm", "population vmap (weight)"] == 2


def test_unknown_last_layer_has_a_reason():
    engine = TorchEngine(make(*FAMILIES["gemma2"]), Space("full"), pad_id=1)
    reasons = [line.reason for line in engine.plan.lines() if line.module == "Gemma2DecoderLayer"]
    assert reasons == ["no trimmed last layer: its arithmetic is not known"]


@pytest.mark.parametrize("space", [Space("full"), Space("lora", rank=2), Space("prefix")], ids=lambda space: space.kind)
@pytest.mark.parametrize("family", ["bert", "gpt2", "qwen3", "albert"])
def test_only_the_plan_replaces_forwards(family, space):
    engine = TorchEngine(make(*FAMILIES[family]), space, pad_id=1)
    replaced = {module for module in engine.model.modules() if "forward" in vars(module)}
    assert replaced == {override.module for override in engine.plan.overrides if override.attribute == "forward"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in engine.model.modules())


@pytest.mark.parametrize("space", [Space("full"), Space("lora", rank=2), Space("prefix")], ids=lambda space: space.kind)
def test_suspended_plan_leaves_the_models_own_forwards(space):
    model = make_roberta()
    before = {module: dict(vars(module)) for module in model.modules()}
    engine, batch = TorchEngine(model, space, pad_id=1), make_batch(3)
    scores = engine.score(batch, PAIR)
    with engine.plan.suspended():
        assert all(vars(module).keys() == before[module].keys() for module in model.modules())
    np.testing.assert_array_equal(engine.score(batch, PAIR), scores)


def test_forwards_wrap_each_other_in_the_order_of_stages():
    module, plan, calls = torch.nn.Identity(), Plan(), []

    def build(name: str):
        return lambda inner: lambda x: (calls.append(name), inner(x))[1]

    for stage in (Stage.READOUT, Stage.CACHE, Stage.KERNEL, Stage.MEMBERS):
        plan.add(module, stage, Choice(stage.name, build(stage.name)))
    plan.add(module, Stage.KERNEL, Choice("another", reason="it is a test"))
    plan.install()
    assert module(3) == 3 and calls == ["READOUT", "KERNEL", "MEMBERS", "CACHE"]
    assert plan.lines() == [
        PlanLine(1, "Identity", "READOUT, else KERNEL, else MEMBERS, else CACHE", "no another: it is a test")
    ]
    with plan.suspended():
        assert module(4) == 4 and len(calls) == 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_table_of_architectures_names_classes_of_transformers(architecture):
    """With the submodules that their part promises."""
    name = architecture.replace("-", "_")
    code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = next(value for key, value in vars(code).items() if key.lower() == f"{name.replace('_', '')}config")
    tiny = config(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    tiny._attn_implementation = "sdpa"
    arguments = {Part.ROTARY_ATTENTION: (tiny, 0), Part.DECODER_LAYER: (tiny, 0), Part.RMS_NORM: (16,)}
    promised = {
        Part.ENCODER_LAYER: (*(name for group in ENCODER_LINEARS for name in group), *ENCODER_NORMS),
        Part.DECODER_LAYER: ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
        Part.ROTARY_ATTENTION: ("q_proj", "k_proj", "v_proj", "o_proj"),
        Part.GATED_MLP: ("gate_proj", "up_proj", "down_proj"),
    }
    for class_name, part in ARCHITECTURES[architecture].items():
        module = getattr(code, class_name)(*arguments.get(part, (tiny,)))
        assert part_of(module) is part
        for submodule in promised.get(part, ()):
            module.get_submodule(submodule)
