"""Texts of a population: one request of SGLang's for all members, prompts and draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

from mezzo.engines.base import Continuations
from mezzo.engines.draws import draw_key, uniforms
from mezzo.engines.sglang.requests import generation_body
from mezzo.engines.torch.forward.generation import leave_one
from mezzo.types import Batch, Generation, Probe


def population_body(batch: Batch, probes: Sequence[Probe], generation: Generation) -> dict[str, Any]:
    """The request for continuations of the complete prompts: by probe, prompt and draw."""
    prompts = [prompt for prompt in batch.prompts for _ in range(generation.draws)]
    body = generation_body(prompts, generation, [None] * len(probes))
    if not generation.temperature:
        return body
    said = {
        "count": generation.max_new_tokens,
        "temperature": generation.temperature,
        "top_p": generation.top_p,
    }
    draws = range(generation.draws)
    rows = ((probe, prompt.ids, draw) for probe in probes for prompt in batch.prompts for draw in draws)
    keys = [draw_key(generation, *row) for row in rows]  # the numbers themselves are made where they are used
    params = [body["sampling_params"] | {"custom_params": said | {"seed": seed, "name": name}} for seed, name in keys]
    return body | {"sampling_params": params, "custom_logit_processor": Sampler.to_str()}


def group_texts(texts: Sequence[tuple[int, ...]], prompts: int, draws: int) -> Continuations:
    """The answers to such a request, by probe, prompt and draw."""
    drawn = [list(texts[first : first + draws]) for first in range(0, len(texts), draws)]
    return [drawn[first : first + prompts] for first in range(0, len(drawn), prompts)]


class Sampler(CustomLogitProcessor):  # type: ignore[misc]
    """Leaves the token possible that a row's next number draws. SGLang calls it once for every token of the rows of a batch;
    each row's parameters remember how far it is."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        assert custom_param_list
        numbers = torch.tensor([_next_number(row) for row in custom_param_list], device=logits.device)
        first = custom_param_list[0]
        return leave_one(logits, numbers, first["temperature"], first["top_p"])


def _next_number(row: dict[str, Any]) -> float:
    if "numbers" not in row:
        row["numbers"] = iter(uniforms((row["seed"], row["name"]), row["count"]).tolist())
    return float(next(row["numbers"]))
