"""Reference computations: weights written into an ordinary Hugging Face model, one unpadded example at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from mezzo.method import noise
from mezzo.method.space import Space
from mezzo.types import Batch, Probe, TrainedTensor


def z_of(trained: TrainedTensor, kind: noise.Kind, seed: int) -> np.ndarray:
    """The direction z(seed) of one tensor, in NumPy alone."""
    if trained.rank:
        left, right = noise.factors(seed, trained.name, trained.shape, trained.rank)
        return (left @ right.T) / np.sqrt(np.float32(trained.rank))
    return noise.dense(kind, seed, trained.name, 0, int(np.prod(trained.shape))).reshape(trained.shape)


def plain_model(
    model: torch.nn.Module,
    trained: Sequence[TrainedTensor],
    values: dict[str, np.ndarray],
    kind: noise.Kind,
    probe: Probe,
    space: Space,
) -> torch.nn.Module:
    """A copy of `model` whose own weights are the trained `values`, perturbed to the probe."""
    perturbed = {
        t.name: values[t.name] + sum(scale * z_of(t, kind, seed) for seed, scale in probe.terms) for t in trained
    }
    plain = copy.deepcopy(model)
    parameters = dict(plain.named_parameters())
    with torch.no_grad():
        for name, value in perturbed.items():
            if name in parameters:
                parameters[name].copy_(torch.from_numpy(np.asarray(value, dtype=np.float32)))
        for name in (n for n in perturbed if n.endswith("lora_A.weight")):
            delta = perturbed[name.replace("lora_A", "lora_B")] @ perturbed[name] * space.scaling
            weight = parameters[name.replace("lora_A.weight", "weight")]
            delta = delta.T if "c_" in name else delta  # GPT-2 stores its weights as (in, out)
            weight.add_(torch.from_numpy(delta.astype(np.float32)))
    return plain


@torch.no_grad()
def plain_scores(model: torch.nn.Module, batch: Batch) -> np.ndarray:
    """scores[B, C] of an ordinary model, from full logits, one example at a time."""
    scores = []
    for prompt in batch.prompts:
        logits = model(input_ids=torch.tensor([prompt.ids], device=model.device)).logits[0].float().cpu()
        if batch.readout.kind == "words":
            at_position = logits[prompt.position]
            if batch.readout.vocabulary:
                at_position = at_position.log_softmax(-1)
            scores.append(at_position[list(batch.readout.words)].numpy())
        else:
            reduce = batch.readout.reduce
            scores.append(np.array([_candidate_score(model, prompt.ids, c, reduce) for c in prompt.candidates]))
    return np.stack(scores)


def _candidate_score(model: torch.nn.Module, ids: tuple[int, ...], candidate: tuple[int, ...], reduce: str) -> float:
    logits = model(input_ids=torch.tensor([ids + candidate])).logits[0].log_softmax(-1)
    log_probs = [float(logits[len(ids) - 1 + i, token]) for i, token in enumerate(candidate)]
    return sum(log_probs) / (len(log_probs) if reduce == "mean" else 1)
