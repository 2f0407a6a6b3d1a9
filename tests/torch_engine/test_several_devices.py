"""The layers of one model over several devices: on CPUs the bits of one, on a GPU and a CPU the same scores to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mezzo
from mezzo.engines.torch import device_map, engine, module_hooks
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.weights import flat_buffer
from mezzo.errors import ConfigError, ModelError, RunFailed
from mezzo.method.space import Space
from mezzo.types import Batch, Generation, GradientStep, Probe, Prompt, Readout, Update
from tests.conftest import make_batch, make_llama, make_roberta

PAIR = (Probe(((7, 1e-2),)), Probe(((7, -1e-2),)))
UPDATE = Update(((5, 0.03125), (6, -0.0625)), keep=0.75)
CANDIDATES = Batch(
    (Prompt((5, 9, 30), candidates=((7, 8), (9,))), Prompt((6, 12), label=1, candidates=((3,), (4, 11, 2)))),
    Readout("candidates"),
)
LORA = Space("lora", rank=2)


def make_untied() -> nn.Module:
    return make_llama(tie=False)


def make_classifier() -> nn.Module:
    from transformers import LlamaForSequenceClassification

    config = make_untied().config
    config.num_labels = 3
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def batch_of(make) -> Batch:
    batch = make_batch(6)
    return Batch(batch.prompts, Readout("head", classes=3)) if make is make_classifier else batch


CASES = {
    "masked-full": (make_roberta, Space("full")),
    "masked-head": (make_roberta, Space("head")),
    "masked-upper": (make_roberta, Space("lora", rank=2, layers="1:")),
    "causal-full": (make_llama, Space("full")),
    "causal-lowrank": (make_untied, Space("full", noise_rank=2)),
    "causal-lora": (make_untied, LORA),
    "causal-prefix": (make_llama, Space("prefix")),
    "classifier-full": (make_classifier, Space("full")),
    "classifier-lora": (make_classifier, Space("lora", rank=2, head=True)),
}


def compare(make, space, devices, same) -> TorchEngine:
    """A model on one device and on several, through every question that an engine answers."""
    batch = batch_of(make)
    plain, split = (TorchEngine(make(), space, device=each, cache_mb=1, pad_id=1) for each in ("cpu", devices))
    split.load_state(plain.state())  # a prefix starts from activations
    for each in (plain, split):
        each.check(batch, 1e-2)
        each.apply([UPDATE])
    assert split.digest() == plain.digest() and split.base_digest == plain.base_digest
    same(split.score(batch, PAIR), plain.score(batch, PAIR))
    if split.causal:
        same(split.score(CANDIDATES, PAIR), plain.score(CANDIDATES, PAIR))
        generation = Generation(3, temperature=1.0, seed=4)
        assert split.generate(batch, PAIR, generation) == plain.generate(batch, PAIR, generation)
        same(split.features(batch.prompts), plain.features(batch.prompts))
    if space.kind != "prefix":
        for (name, ours), (_, theirs) in zip(
            *(e.merged_model().named_parameters() for e in (split, plain)), strict=True
        ):
            assert ours.device.type == "cpu", name
            same(ours.numpy(), theirs.numpy())
    same(split.score(batch, PAIR), plain.score(batch, PAIR))
    return split


@pytest.mark.parametrize(("make", "space"), CASES.values(), ids=CASES)
def test_layers_over_two_cpus_give_the_bits_of_one(make, space):
    split = compare(make, space, "cpu,cpu", np.testing.assert_array_equal)
    layers = module_hooks.find_stack(split.model)
    assert [split.device_map.parts[layer] for layer in layers] == [0, 1]


@pytest.mark.parametrize("case", ["masked-full", "causal-lowrank", "causal-prefix"])
def test_no_operation_mixes_devices(case, monkeypatch):
    """With tensors that have a device but no values, on two kinds of devices that every machine has."""
    monkeypatch.setattr(engine, "devices_of", lambda names: [torch.device(name) for name in names.split(",")])
    monkeypatch.setattr(engine, "is_causal", lambda model: "Causal" in type(model).__name__)  # it reads values
    monkeypatch.setattr(device_map, "move_tensors", replace_tensors)
    monkeypatch.setattr(flat_buffer, "MAX_SMALL_ELEMENTS", 1024)  # some matrices are perturbed alone
    make, space = CASES[case]
    batch = batch_of(make)
    with FakeTensorMode(allow_non_fake_inputs=True):
        split = TorchEngine(make(), space, device="cpu,meta", base_digest="none", pad_id=1)
        assert {p.device.type for p in split.model.parameters()} == {"cpu", "meta"}
        with split.population.at(PAIR):
            for rows in split.padded_rows(batch):
                assert split.forward(rows, batch).device.type == "cpu"
        split.apply([UPDATE])


def replace_tensors(module: nn.Module, device: torch.device) -> None:
    """As `move_tensors`; tensors without values cannot be moved in place."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if not hasattr(parameter, "moved"):
            parameter.moved = nn.Parameter(parameter.to(device), requires_grad=False)
            parameter.moved.moved = parameter.moved
        module._parameters[name] = parameter.moved
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)


def test_a_run_continues_on_other_devices_and_ends_with_the_same_weights(tiny_run, tmp_path):
    split = {**tiny_run, "space": "full", "method": "spsa", "device": "cpu,cpu"}
    plain = mezzo.finetune(**{**split, "device": "cpu"}, steps=4)
    half = mezzo.finetune(**split, steps=2, out=str(tmp_path / "run"))
    whole = mezzo.finetune(resume=half.out, steps=4, device="cpu,cpu")
    assert whole.digest == plain.digest
    assert mezzo.verify(half.out, device="cpu,cpu").ok
    assert mezzo.evaluate(half.out, device="cpu,cpu", data=tiny_run["dev"]) == mezzo.evaluate(
        half.out, data=tiny_run["dev"]
    )
    exported = mezzo.export(half.out, "model", tmp_path / "model", device="cpu,cpu")
    assert (exported / "model.safetensors").exists()


def test_gradients_of_layers_on_two_devices():
    batch = make_batch(4)
    plain, split = (
        TorchEngine(make_llama(), Space("full"), device=each, gradients=True) for each in ("cpu", "cpu,cpu")
    )
    step = GradientStep(batch, 1e-3, 0.1)
    assert split.descend(step) == plain.descend(step)
    assert split.digest() == plain.digest()


def test_what_cannot_be_split_is_refused(tiny_run):
    for other, hint in {
        "workers": "a worker has one device",
        "offload": "--offload is for one device",
        "quantize": "--quantize is for one device",
        "engine": "sglang splits a model with --tp N",
    }.items():
        value = {"workers": 2, "offload": True, "quantize": "8bit", "engine": "sglang"}[other]
        with pytest.raises(ConfigError, match=hint):
            mezzo.finetune(**{**tiny_run, "device": "cpu,cpu", other: value})
    with pytest.raises(ConfigError, match="did you mean 'device'"):
        mezzo.finetune(**tiny_run, device_map="auto")
    with pytest.raises(ConfigError, match="device 'gpu' cannot be used"):
        TorchEngine(make_llama(), LORA, device="cpu,gpu")
    with pytest.raises(ModelError, match="no stack of layers to split"):
        device_map.split_modules(nn.Linear(2, 2), 2)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"--device all is all GPUs, and torch .* sees none"):
            TorchEngine(make_llama(), LORA, device="all")


def test_a_model_that_does_not_fit_names_the_remedies(monkeypatch):
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(nn.Module, "to", run_out)
    with pytest.raises(RunFailed, match=r"0\.0 GB do not fit cpu: use .*--device all.*--offload"):
        TorchEngine(make_llama(), LORA)


def test_layers_are_divided_by_bytes_and_tied_tensors_stay_together():
    model = make_llama()
    parts = device_map.split_modules(model, 3)
    assert parts[model.model.embed_tokens] == parts[model.lm_head] == 0
    assert [parts[layer] for layer in model.model.layers] == [1, 2] and parts[model.model.norm] == 2
    untied = make_untied()
    assert device_map.split_modules(untied, 2)[untied.lm_head] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("make", "space"), CASES.values(), ids=CASES)
def test_layers_over_a_gpu_and_a_cpu_give_the_weights_of_a_cpu(make, space, monkeypatch):
    monkeypatch.setattr(flat_buffer, "MAX_SMALL_ELEMENTS", 1024)

    def same(ours, theirs):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)

    split = compare(make, space, "cuda:0,cpu", same)
    assert {parameter.device.type for parameter in split.model.parameters()} == {"cuda", "cpu"}
