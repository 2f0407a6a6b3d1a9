"""Does a perturbation reach the scores? A direction that changes nothing would train nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mezzo.engines.base import Engine
from mezzo.errors import SpaceError
from mezzo.method import noise
from mezzo.types import Batch, Probe, Scores, TrainedTensor


def check_alive(engine: Engine, batch: Batch, eps: float) -> None:
    """Refuse a space whose perturbation the engine's scores do not feel."""
    few, probes = first_look(batch, eps)
    refuse_dead(engine.trained, engine.score(few, probes), engine.score(few, [Probe()]))


def first_look(batch: Batch, eps: float) -> tuple[Batch, tuple[Probe, Probe]]:
    """A few examples, as different in length as there are, and one pair of probes: cheap, and enough to see what goes wrong."""
    seed = noise.step_seed(0, 0, 0)
    lengths = [len(prompt.ids) for prompt in batch.prompts]
    continued = [max(map(len, prompt.candidates), default=0) for prompt in batch.prompts]
    places = lengths.index(min(lengths)), lengths.index(max(lengths)), continued.index(max(continued))
    few = {id(prompt): prompt for prompt in (*(batch.prompts[place] for place in places), *batch.prompts[:2])}
    return Batch(tuple(few.values())[:3], batch.readout), (Probe(((seed, eps),)), Probe(((seed, -eps),)))


def refuse_dead(trained: Sequence[TrainedTensor], perturbed: Scores, base: Scores) -> None:
    """Raise SpaceError when scores[P, B, C] at the probes are those of the base, or no numbers."""
    if not np.isfinite(np.where(np.isneginf(perturbed), 0, perturbed)).all():
        raise SpaceError("perturbed scores are not numbers: --eps is far too large, or the model's weights are damaged")
    if distance(perturbed, np.broadcast_to(base, perturbed.shape)) > 0:
        return
    only_a = all(t.kind == "lora_A" for t in trained)
    hint = " LoRA's A alone changes nothing while B is zero: train both." if only_a else ""
    more = f" and {len(trained) - 1} more" if len(trained) > 1 else ""
    raise SpaceError(
        f"the chosen tensors ({trained[0].name}{more}) do not change the "
        f"scores at all, so nothing could be learned.{hint} Choose a wider --space or --only, or a larger --eps"
    )


def distance(a: Scores, b: Scores) -> float:
    """Largest difference of scores, up to the constant per row that scores leave open."""
    finite = np.isfinite(a)
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    if a.shape[-1] > 1:
        a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    return float(np.abs(a - b).max())
