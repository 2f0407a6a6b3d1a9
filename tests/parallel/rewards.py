"""A reward over generated text, found by name."""

from __future__ import annotations

from mezzo.evaluation.rewards import text_reward
from mezzo.types import Prompt


@text_reward
def short(text: str, prompt: Prompt) -> float:
    return 1.0 / (1 + len(text))
