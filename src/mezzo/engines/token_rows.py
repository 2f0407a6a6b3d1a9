"""A batch as rows of tokens: what each row computes, what rows share, and where its scores belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mezzo.types import Batch, Scores

# Tokens that several rows must have in common before computing them once is worth a forward of its own.
MIN_SHARED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token sequence: a prompt, or a prompt with one of its candidates.

    With `logprob_start` ≥ 0 the log-probabilities of the tokens after that position are read. With −1 the logits of the
    last position are read, or in an encoder those at `position`.
    """

    ids: tuple[int, ...]
    example: int
    candidate: int = 0
    logprob_start: int = -1
    prompt_length: int = 0
    """Tokens at the front that all candidates of the example have in common."""
    position: int = -1

    @property
    def cacheable(self) -> int:
        """Leading tokens whose keys and values may come from a cache: those whose logits are not read."""
        return self.logprob_start if self.logprob_start >= 0 else len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens taken from the prefix cache, and tokens computed."""

    cached: int = 0
    computed: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.cached + other.cached, self.computed + other.computed)


def token_rows(batch: Batch, causal: bool = True) -> list[TokenRow]:
    """The rows of a batch sorted by length, with candidates of one prompt side by side.

    In a causal model nothing after the position that is read matters, so it is left out; an encoder needs all tokens.
    """
    prompts = list(enumerate(batch.prompts))
    if not causal:
        rows = [TokenRow(p.ids, example, position=p.position % len(p.ids)) for example, p in prompts]
    elif batch.readout.kind == "candidates":
        rows = [
            TokenRow(p.ids + ids, example, candidate, logprob_start=len(p.ids) - 1, prompt_length=len(p.ids))
            for example, p in prompts
            for candidate, ids in enumerate(p.candidates)
        ]
    else:
        rows = [TokenRow(p.ids[: p.position % len(p.ids) + 1], example) for example, p in prompts]
    return sorted(rows, key=lambda row: (row.prompt_length or len(row.ids), row.example, row.candidate))


def common_prefix(rows: Sequence[TokenRow]) -> tuple[int, ...]:
    """The tokens that all rows begin with and may take from a cache; empty if they are too few to matter."""
    if len(rows) < 2:
        return ()
    low, high = min(row.ids for row in rows), max(row.ids for row in rows)  # all rows share what these two share
    differing = (at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    length = min(next(differing, min(len(low), len(high))), *(row.cacheable for row in rows))
    return low[:length] if length >= MIN_SHARED_TOKENS else ()


def shared_prompts(rows: Sequence[TokenRow], cached: int) -> list[tuple[int, ...]]:
    """Prompts with several candidates among the rows, worth caching beyond the first `cached` tokens."""
    by_example: dict[int, list[TokenRow]] = {}
    for row in rows:
        by_example.setdefault(row.example, []).append(row)
    return [
        group[0].ids[: group[0].cacheable]
        for group in by_example.values()
        if len(group) > 1 and group[0].logprob_start >= 0 and group[0].cacheable - cached >= MIN_SHARED_TOKENS
    ]


def write_scores(scores: Scores, probe: int, rows: Sequence[TokenRow], values: Sequence[Any]) -> None:
    """Write the values of rows at a probe to their examples: one number, or one for each label word."""
    for row, value in zip(rows, values, strict=True):
        scores[probe, row.example, slice(None) if np.ndim(value) else row.candidate] = value
