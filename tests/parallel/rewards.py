"""A reward over generated text, found by name."""

from __future__ import annotations


def short(completion: str) -> float:
    return 1.0 / (1 + len(completion))
