"""Objectives over generated text: a question for continuations, and a reward of each as the negative loss."""

from __future__ import annotations

import dataclasses
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mezzo.engines.base import Continuations
from mezzo.errors import ConfigError
from mezzo.method import noise
from mezzo.method.objectives import Losses, describe_failure
from mezzo.types import Batch, Generation, Probe, Prompt, Question

Reward = Callable[[str, Prompt], float]
Decode = Callable[[Sequence[int]], str]
# What ends an answer: the end of its line.
LINE_END = ("\n",)


def text_reward(function: Reward) -> Reward:
    """Mark a function of (generated text, prompt) that returns a reward, higher is better, as an objective."""
    function.is_text_reward = True  # type: ignore[attr-defined]
    return function


def is_text_reward(objective: Any) -> bool:
    return getattr(objective, "is_text_reward", False) is True


def text_f1(text: str, prompt: Prompt) -> float:
    """Word overlap with the best of the prompt's answers; case, punctuation and articles do not count."""
    return max((_overlap(_words(text), _words(answer)) for answer in prompt.answers), default=0.0)


def exact_match(text: str, prompt: Prompt) -> float:
    return float(any(_words(text) == _words(answer) for answer in prompt.answers))


# What the metrics of a generation task mean, as rewards of one text.
TEXT_METRICS: dict[str, Reward] = {"f1": text_f1}


def read_texts(continuations: Continuations, decode: Decode, stop: Sequence[str] = LINE_END) -> list[list[list[str]]]:
    """The generated texts by probe, example and draw, each up to the first of the texts in `stop`."""
    return [[[_cut(decode(ids).strip(), stop) for ids in draws] for draws in row] for row in continuations]


def _cut(text: str, stop: Sequence[str]) -> str:
    ends = [at for end in stop if (at := text.find(end)) >= 0]
    return text[: min(ends)].strip() if ends else text


@dataclass(frozen=True, slots=True)
class RewardObjective:
    """Minus the mean reward of what is generated at each probe."""

    reward: Reward
    decode: Decode
    generation: Generation
    stop: tuple[str, ...] = LINE_END
    on_device: bool = False

    def question(self, batch: Batch, probes: tuple[Probe, ...]) -> Question:
        """Drawn texts differ from step to step, as the directions do, and are drawn alike at both probes of a pair."""
        direction = next((seed for probe in probes for seed, _ in probe.terms), 0)
        seed = noise.step_seed(self.generation.seed, direction, 0)
        return Question(batch, probes, dataclasses.replace(self.generation, seed=seed))

    def losses(self, answer: Continuations, batch: Batch) -> Losses:
        texts = read_texts(answer, self.decode, self.stop)
        name = getattr(self.reward, "__name__", "the reward")
        try:
            rewards = [
                [float(self.reward(text, p)) for p, drawn in zip(batch.prompts, row, strict=True) for text in drawn]
                for row in texts
            ]
        except Exception as error:  # the message must name the function that failed
            raise ConfigError(f"{name} failed: {describe_failure(error)}") from error
        table = np.array(rewards, dtype=np.float32)
        if not np.isfinite(table).all():
            raise ConfigError(f"{name} returned a reward that is not a finite number")
        losses: Losses = -table.astype(np.float64).mean(axis=1)
        return losses


def _words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _overlap(given: list[str], expected: list[str]) -> float:
    if not given or not expected:
        return float(given == expected)
    common = sum((Counter(given) & Counter(expected)).values())
    return 2 * common / (len(given) + len(expected))
