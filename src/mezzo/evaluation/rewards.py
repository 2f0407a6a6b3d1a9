"""Objectives over generated text: an engine whose scores are rewards, so that the training loop stays the same loop."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mezzo.engines.base import Engine
from mezzo.errors import ConfigError
from mezzo.types import Batch, Probe, Prompt, Scores

Reward = Callable[[str, Prompt], float]
Decode = Callable[[Sequence[int]], str]


def over_texts(function: Reward) -> Reward:
    """Mark a function of (generated text, prompt) that returns a reward, higher is better, as an objective."""
    function.over_texts = True  # type: ignore[attr-defined]
    return function


def text_f1(text: str, prompt: Prompt) -> float:
    """Overlap of words with the best of the prompt's answers: case, punctuation and articles do not count."""
    return max((_overlap(_words(text), _words(answer)) for answer in prompt.answers), default=0.0)


def exact_match(text: str, prompt: Prompt) -> float:
    return float(any(_words(text) == _words(answer) for answer in prompt.answers))


class Rewarded:
    """An engine seen through generated text: `score` returns the reward of each continuation as its only candidate."""

    def __init__(self, engine: Engine, decode: Decode, reward: Reward, max_new_tokens: int) -> None:
        self._engine, self._decode, self._reward, self._length = engine, decode, reward, max_new_tokens

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        texts = self.texts(batch, probes)
        rewards = [[[float(self._reward(t, p))] for t, p in zip(row, batch.prompts, strict=True)] for row in texts]
        found = np.array(rewards, dtype=np.float32)
        if not np.isfinite(found).all():
            raise ConfigError(
                f"{getattr(self._reward, '__name__', 'the reward')} returned a reward that is not a finite number"
            )
        return found

    def texts(self, batch: Batch, probes: Sequence[Probe]) -> list[list[str]]:
        """What is generated up to the end of the first line: an answer is one line."""
        found = self._engine.generate(batch, probes, self._length)
        return [[self._decode(ids).strip().split("\n")[0].strip() for ids in row] for row in found]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def mean_reward(scores: Scores, batch: Batch) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The objective of a rewarded engine: minus the mean reward."""
    return -scores[:, :, 0].astype(np.float64).mean(axis=1)


def _words(text: str) -> list[str]:
    plain = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _overlap(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))
