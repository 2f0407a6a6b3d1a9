"""The check before step 1: the population forward equals plain forwards, a perturbation changes the loss, and the scores of a
row do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from mezzo.engines.architectures import has_experts
from mezzo.engines.liveness import distance, first_look, refuse_dead
from mezzo.engines.microbatch import empty_scores
from mezzo.engines.torch.forward.inputs import make_rows, select_positions
from mezzo.engines.torch.quantized import lora_hooks
from mezzo.errors import ModelError
from mezzo.method import noise
from mezzo.types import Batch, MicroBatch, Probe, Scores, TrainedTensor

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine

# By the type computed in, the largest difference allowed: as a share of the scores, for their rounding, and of the
# perturbation's effect.
TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.float16: (1e-2, 2e-2), torch.bfloat16: (5e-2, 1e-1)}


def self_check(engine: TorchEngine, batch: Batch, eps: float) -> None:
    """Compare a few examples at θ±εz with an ordinary forward whose weights are written in; refuse on a mismatch."""
    few, probes = first_look(batch, eps)
    try:
        ours = engine.score(few, probes)
    except (ModelError, RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{type(engine.model).__name__} cannot be trained in --space {engine.space.kind}: its modules do not take several "
            f"sets of weights in one forward ({reason}); {_advice(engine)}"
        ) from None
    plain = np.stack([_plain_scores(engine, few, probe) for probe in probes])
    base = engine.score(few, [Probe()] * len(probes))  # as many rows: other shapes would round differently
    refuse_dead(engine.trained, ours, base)
    scale = np.abs(plain[np.isfinite(ours)]).max()
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
            f"{distance(base[0], alone):.2g} next to longer rows, because it attends to padding; "
            "use --micro-batch 1 on a CPU, or another model"
        )


def _advice(engine: TorchEngine) -> str:
    if has_experts(engine.model.config):
        return "experts cannot be trained: use --space lora, matrices, prefix or head, which leave them as they are"
    return "use --space head, or another model"


def _weights_at(engine: TorchEngine, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights that a probe's `tensors` change, with LoRA merged into them."""
    weights = {t.name: tensors[t.name] for t in engine.trained if t.kind not in ("lora_A", "lora_B")}
    if not engine.frozen_base:
        for name, parameter in engine.model.named_parameters():
            if (delta := engine.lora_delta(name, tensors)) is not None:
                weights[name] = parameter + delta
    return {name: value.to(engine.population.compute) for name, value in weights.items()}


def _quantized_lora(engine: TorchEngine, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Module → LoRA's factors at a probe, where they cannot be merged into weights that stay as they are."""
    if not engine.frozen_base or engine.space.kind != "lora":
        return {}
    tensors = {**tensors, **engine.population.frozen}
    paths = dict.fromkeys(name.split(".lora_")[0] for name in tensors if ".lora_" in name)
    return {path: (tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]) for path in paths}


def _perturbed(engine: TorchEngine, trained: TrainedTensor, probe: Probe) -> Tensor:
    """A tensor at a probe, by NumPy's noise."""
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
    """Scores by the model's own forward, whose weights are really those of the probe."""
    tensors = {t.name: _perturbed(engine, t, probe) for t in engine.trained}
    weights, lora = _weights_at(engine, tensors), _quantized_lora(engine, tensors)
    prefixes = {t.name: weights.pop(t.name) for t in engine.trained if t.kind == "prefix"}
    out = empty_scores(batch, 1)
    for rows in make_rows(batch, micro_batch or engine.micro_batch, engine.pad_id):
        inputs = engine.forward.inputs(rows, 1)
        engine.prefix_override.update(prefixes)
        try:
            with lora_hooks(engine.model, lora, engine.space.scaling):
                logits = torch.func.functional_call(engine.model, weights, (), inputs, tie_weights=True).logits
        finally:
            engine.prefix_override.clear()
        logits = logits.to(engine.device, torch.float32)
        if rows.positions is not None:
            logits = select_positions(logits, rows.positions.to(logits.device))
            if batch.readout.kind == "words" and not batch.readout.vocabulary:
                logits = logits[:, :, list(batch.readout.words)]
        scores = rows.read_scores(logits, batch.readout, engine.forward.words_of(batch.readout), 1)
        rows.write_scores(out, scores.reshape(1, -1, *rows.tail).cpu().numpy())
    return out[0]


def _first_difference(engine: TorchEngine, batch: Batch, probe: Probe) -> str:
    """The first leaf module whose output differs between the two forwards, for the error message."""
    with _outputs(engine.model) as plain:
        _plain_scores(engine, batch, probe)
    with _outputs(engine.model) as ours, _every_leaf_runs(engine):
        engine.score(batch, [probe])
    allowed = TOLERANCE[engine.population.compute][0]
    for name, a in plain.items():
        b = ours.get(name)
        if b is None or a.shape != b.shape:
            continue  # a kernel computed a whole layer, or the LM head computed label words only
        if (a - b).abs().max() > allowed * max(1.0, float(a.abs().max())):
            return name
    return "its readout"


@contextmanager
def _every_leaf_runs(engine: TorchEngine) -> Iterator[None]:
    """No last layer is trimmed, no graph replayed, no cached output used."""
    forward, graphs, cache = engine.forward, engine.graphs, engine.forward.frozen_cache
    forward.trim_last_layer, forward.frozen_cache, engine.graphs = False, None, None
    try:
        yield
    finally:
        forward.trim_last_layer, forward.frozen_cache, engine.graphs = True, cache, graphs


@contextmanager
def _outputs(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """The first output of each leaf module, in the order they ran; those inside a vmap cannot be recorded."""
    outputs: dict[str, Tensor] = {}

    def record(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and name not in outputs and not is_functorch_wrapped_tensor(output):
            outputs[name] = output.detach().to(torch.float32, copy=True)  # kernels may write into it later

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not list(module.children()):
                hooks.enter_context(module.register_forward_hook(partial(record, name)))
        yield outputs
