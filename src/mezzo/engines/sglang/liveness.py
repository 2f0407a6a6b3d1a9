"""Before step 1: does a perturbation reach the scores that SGLang serves?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mezzo import noise
from mezzo.errors import SpaceError
from mezzo.types import Batch, Probe

if TYPE_CHECKING:
    from mezzo.engines.base import Engine


def refuse_dead(engine: Engine, batch: Batch, eps: float) -> None:
    """A direction that changes nothing would train nothing."""
    few = Batch(batch.prompts[:2], batch.readout)
    seed = noise.step_seed(0, 0, 0)
    scores = engine.score(few, [Probe(((seed, eps),)), Probe(((seed, -eps),))])
    base = engine.score(few, [Probe()])
    finite = np.isfinite(base)
    if np.abs(np.where(finite, scores, 0) - np.where(finite, base, 0)).max() > 0:
        return
    names = [t.name for t in engine.trained]
    hint = ""
    if all(t.kind == "lora_A" for t in engine.trained):
        hint = " LoRA's A alone changes nothing while B is zero: train both."
    raise SpaceError(
        f"the chosen tensors ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}) do not change the "
        f"scores at all, so nothing could be learned.{hint} Choose a wider --space or --only"
    )
