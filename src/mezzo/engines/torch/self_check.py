"""Three questions before step 1: does the population forward equal plain forwards, does a perturbation reach the loss, and are
scores of a row its own, whatever stands beside it?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from mezzo.engines.architectures import has_experts
from mezzo.engines.liveness import distance, first_look, refuse_dead
from mezzo.engines.torch.forward.inputs import pack, picked
from mezzo.engines.torch.quantized import lora_beside
from mezzo.errors import ModelError
from mezzo.method import noise
from mezzo.types import Batch, MicroBatch, Probe, Scores, TrainedTensor

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine

TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.float16: (1e-2, 2e-2), torch.bfloat16: (5e-2, 1e-1)}
"""Largest accepted difference by the type computed in: of the scores' size (their rounding), and of the perturbation's effect."""


def self_check(engine: TorchEngine, batch: Batch, eps: float) -> None:
    """Compare a few examples at θ±εz with an ordinary forward whose weights are written in; refuse on a mismatch."""
    few, probes = first_look(batch, eps)
    try:
        ours = engine.score(few, probes)
    except (ModelError, RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{type(engine.model).__name__} cannot be trained in --space {engine.space.kind}: its modules do not take several "
            f"sets of weights in one forward ({reason}); {_way_out(engine)}"
        ) from None
    plain = np.stack([_plain_scores(engine, few, probe) for probe in probes])
    base = engine.score(few, [Probe()] * len(probes))  # as many rows: other shapes would round differently
    refuse_dead(engine.trained, ours, base)
    finite = np.isfinite(ours)
    scale = np.abs(plain[finite]).max()
    of_scale, of_effect = TOLERANCE[engine.population.compute]
    if not distance(ours, plain) <= of_scale * max(1.0, scale) + of_effect * distance(plain, base):
        raise ModelError(
            f"{type(engine.model).__name__} cannot be trained here: perturbed scores differ from an ordinary forward by "
            f"{distance(ours, plain):.2g}, first in {_first_difference(engine, few, probes[0])}; try "
            "another --space, or --only and --layers without that module, and please report the architecture"
        )
    alone = _plain_scores(engine, few, Probe(), MicroBatch(rows=1))
    if not distance(base[0], alone) <= of_scale * max(1.0, scale):
        raise ModelError(
            f"{type(engine.model).__name__} cannot be trained in batches: a row's scores change by "
            f"{distance(base[0], alone):.2g} where longer rows stand beside it, because its padding is seen; "
            "use --micro-batch 1 on a CPU, or another model"
        )


def _way_out(engine: TorchEngine) -> str:
    if has_experts(engine.model.config):
        return "experts cannot be trained: use --space lora, matrices, prefix or head, which leave them as they are"
    return "use --space head, or another model"


def written_in(engine: TorchEngine, probe: Probe) -> dict[str, Tensor]:
    """The trained tensors at a probe, LoRA's as the weights they make, from NumPy's noise."""
    moved = {t.name: _moved(engine, t, probe) for t in engine.trained}
    values = {t.name: moved[t.name] for t in engine.trained if t.kind not in ("lora_A", "lora_B")}
    if not engine.quantized:
        for name, parameter in engine.model.named_parameters():
            if (delta := engine.lora_delta(name, moved)) is not None:
                values[name] = parameter + delta
    return {name: value.to(engine.population.compute) for name, value in values.items()}


def _beside(engine: TorchEngine, probe: Probe) -> dict[str, tuple[Tensor, Tensor]]:
    """LoRA's factors at a probe by module, where the weights they belong to cannot be written."""
    if not engine.quantized or engine.space.kind != "lora":
        return {}
    moved = {t.name: _moved(engine, t, probe) for t in engine.trained} | engine.population.frozen
    paths = dict.fromkeys(name.split(".lora_")[0] for name in moved)
    return {path: (moved[f"{path}.lora_A.weight"], moved[f"{path}.lora_B.weight"]) for path in paths}


def _moved(engine: TorchEngine, trained: TrainedTensor, probe: Probe) -> Tensor:
    value = engine.population.value(trained.name).to(torch.float32, copy=True)
    for seed, scale in probe.terms:
        if trained.rank:
            left, right = noise.factors(seed, trained.name, trained.shape, trained.rank)  # type: ignore[arg-type]
            z = left @ right.T * np.float32(trained.rank**-0.5)
        else:
            z = noise.dense(engine.population.source.kind, seed, trained.name, 0, value.numel()).reshape(trained.shape)
        value += scale * torch.from_numpy(z).to(value.device)
    return value


@torch.no_grad()
def _plain_scores(engine: TorchEngine, batch: Batch, probe: Probe, micro_batch: MicroBatch | None = None) -> Scores:
    values = written_in(engine, probe)
    before = {t.name: values.pop(t.name) for t in engine.trained if t.kind == "prefix"}
    beside = _beside(engine, probe)
    width = engine.width(batch)
    out = np.full((1, len(batch), width), -np.inf, dtype=np.float32)
    for rows in pack(batch, micro_batch or engine.micro_batch, engine.pad_id):
        inputs = engine.forward.inputs(rows, 1)
        engine.stated.update(before)
        try:
            with lora_beside(engine.model, beside, engine.space.scaling):
                logits = torch.func.functional_call(engine.model, values, (), inputs, tie_weights=True).logits.float()
        finally:
            engine.stated.clear()
        if rows.positions is not None:
            logits = picked(logits, rows.positions.to(logits.device))
            if batch.readout.kind == "words" and not batch.readout.vocabulary:
                logits = logits[:, :, list(batch.readout.words)]
        rows.place(
            out,
            rows.read(logits, batch.readout, engine.forward.words_of(batch.readout), 1)
            .reshape(1, -1, *rows.tail)
            .cpu()
            .numpy(),
        )
    return out[0]


def _first_difference(engine: TorchEngine, batch: Batch, probe: Probe) -> str:
    """The first leaf whose output differs between the two ways, for the error message."""
    with _outputs(engine.model) as plain:
        _plain_scores(engine, batch, probe)
    with _outputs(engine.model) as ours, _every_leaf_runs(engine):
        engine.score(batch, [probe])
    allowed = TOLERANCE[engine.population.compute][0]
    for name, a in plain.items():
        b = ours.get(name)
        if b is None or a.shape != b.shape:
            continue  # a kernel did the work of what is inside; fewer words may be computed
        if (a - b).abs().max() > allowed * max(1.0, float(a.abs().max())):
            return name
    return "its readout"


@contextmanager
def _every_leaf_runs(engine: TorchEngine) -> Iterator[None]:
    """No last layer is trimmed, no graph replayed, no kept outcome used."""
    population, graphs, trunk = engine.population, engine.graphs, engine.frozen_cache
    population.trims, engine.graphs, engine.frozen_cache = False, None, None
    try:
        yield
    finally:
        population.trims, engine.graphs, engine.frozen_cache = True, graphs, trunk


@contextmanager
def _outputs(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """What each leaf gave when it first ran, in the order they ran; those inside a vmap have nothing to show."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and name not in seen and not is_functorch_wrapped_tensor(output):
                seen[name] = output.detach().to(torch.float32, copy=True)  # kernels may write into it later

        return hook

    hooks = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if not list(m.children())]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
