"""Numbers by which texts are drawn: each engine reads the same ones, so that a text does not depend on what stands beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mezzo.method import noise
from mezzo.types import Generation, Probe

Key = tuple[int, str]


def draw_key(generation: Generation, probe: Probe, prompt: Sequence[int], draw: int) -> Key:
    """What the numbers of one text follow from: (seed, direction, prompt, draw). Both signs of a direction have the same, and
    the seed of a direction follows from its step."""
    direction = probe.terms[0][0] if probe.terms else 0
    name = hashlib.sha256(repr(tuple(prompt)).encode()).hexdigest()
    return noise.step_seed(generation.seed, direction, 0), f"generate/{name}/{draw}"


def uniforms(key: Key, count: int) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1), one per token."""
    words = noise.words(*key, 0, count)
    return (words >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
