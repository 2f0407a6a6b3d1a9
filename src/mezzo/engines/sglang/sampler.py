"""Draws in SGLang: a logit processor that its scheduler imports by name, in process and in a server with mezzo beside it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

from mezzo.engines.draws import uniforms
from mezzo.engines.torch.forward.generation import leave_one


class Sampler(CustomLogitProcessor):  # type: ignore[misc]
    """Leaves the token possible that a row's next number draws. SGLang calls it once for every token of the rows of a batch;
    each row's parameters remember how far it is."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        assert custom_param_list
        # A server may draw for several clients at a time.
        said = [(_next_number(row), row["temperature"], row["top_p"]) for row in custom_param_list]
        numbers, temperature, top_p = torch.tensor(said, device=logits.device).unbind(1)
        return leave_one(logits, numbers, temperature[:, None], top_p[:, None])


def _next_number(row: dict[str, Any]) -> float:
    if "numbers" not in row:
        row["numbers"] = iter(uniforms((row["seed"], row["name"]), row["count"]).tolist())
    # With overlap, SGLang makes one token more of a text before it sees that the text has ended.
    return float(next(row["numbers"], 0.0))
