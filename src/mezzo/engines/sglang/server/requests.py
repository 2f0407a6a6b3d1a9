"""Scores through SGLang's ordinary requests, in its own words: what servers are asked, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mezzo.engines.sglang.inprocess.forward import Count
from mezzo.engines.sglang.rows import Row, common_prefix, shared_prompts
from mezzo.types import Batch, Readout, Scores

Answers = Sequence[Mapping[str, Any]]


def request(rows: Sequence[Row], adapters: Sequence[str | None], readout: Readout) -> dict[str, Any]:
    """The body of one `/generate` for several sequences, each under its adapter."""
    words = readout.kind == "words"
    body: dict[str, Any] = {
        "input_ids": [list(row.ids) for row in rows],
        # A word is read where the next token would be; candidates are part of the prompt, so nothing is generated.
        "sampling_params": {"max_new_tokens": 1 if words else 0, "temperature": 0},
        "return_logprob": True,
        **_under(adapters),
    }
    if words:
        return body | {"token_ids_logprob": [list(readout.words)] * len(rows)}
    return body | {"logprob_start_len": [row.start for row in rows]}


def prefixes(rows: Sequence[Row], adapters: Sequence[str | None]) -> list[dict[str, Any]]:
    """Requests to send first, one after the other, so that what the rows share is computed once under each adapter."""
    prefix = common_prefix(rows)
    waves = [[prefix] if prefix else [], shared_prompts(rows, len(prefix))]
    return [
        {
            "input_ids": [list(ids) for _ in adapters for ids in wave],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            **_under([adapter for adapter in adapters for _ in wave]),
        }
        for wave in waves
        if wave
    ]


def continuation(batch: Batch, max_new_tokens: int, adapter: str | None = None) -> dict[str, Any]:
    """A request for greedy continuations of the whole prompts."""
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0}
    ids = [list(prompt.ids) for prompt in batch.prompts]
    return {"input_ids": ids, "sampling_params": sampling, **_under([adapter] * len(ids))}


def _under(adapters: Sequence[str | None]) -> dict[str, list[str | None]]:
    """The adapter of each sequence. A server without LoRA takes no such field, not even an empty one."""
    return {"lora_path": list(adapters)} if any(adapters) else {}


def scores_of(rows: Sequence[Row], answers: Answers, readout: Readout) -> list[Any]:
    """The log-probabilities of each row's words, or one number for its candidate."""
    found: list[Any] = []
    for row, answer in zip(rows, answers, strict=True):
        meta = answer["meta_info"]
        if readout.kind == "words":
            by_id = {int(token): value for value, token, *_ in meta["output_token_ids_logprobs"][0]}
            found.append([by_id[word] for word in readout.words])
        else:
            count = len(row.ids) - row.start - 1
            values = [value for value, *_ in meta["input_token_logprobs"][-count:]]
            found.append(sum(values) / (count if readout.reduce == "mean" else 1))
    return found


def counted(answers: Answers) -> Count:
    """Tokens from the prefix cache and computed, by SGLang's own counters."""
    cached = sum(int(answer["meta_info"]["cached_tokens"]) for answer in answers)
    return Count(cached, sum(int(answer["meta_info"]["prompt_tokens"]) for answer in answers) - cached)


def empty_scores(batch: Batch, probes: int) -> Scores:
    """scores[P, B, C] of −∞, which candidates that an example does not have keep."""
    words = batch.readout.kind == "words"
    width = len(batch.readout.words) if words else max(len(p.candidates) for p in batch.prompts)
    return np.full((probes, len(batch), width), -np.inf, dtype=np.float32)


def put(scores: Scores, probe: int, rows: Sequence[Row], values: Sequence[Any]) -> None:
    """Write a probe's values to their examples and candidates."""
    for row, value in zip(rows, values, strict=True):
        example, candidate = row.where
        scores[probe, example, slice(None) if np.ndim(value) else candidate] = value
