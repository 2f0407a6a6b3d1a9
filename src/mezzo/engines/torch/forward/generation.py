"""Text from a causal model: every member's rows by one call of the model's own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from mezzo.engines.base import Continuations
from mezzo.engines.draws import draw_key, uniforms
from mezzo.engines.microbatch import group_by_length
from mezzo.engines.torch.forward.inputs import pad
from mezzo.types import Batch, Generation, Probe

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


def generate_texts(engine: TorchEngine, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
    """Continuations at the members of the current point, which are at these probes."""
    population, members = engine.population, len(probes)
    ends = end_tokens(engine.model) + generation.stop_ids
    texts: Continuations = [[[()] * generation.draws for _ in batch.prompts] for _ in range(members)]
    rows = [(index, draw) for index in range(len(batch)) for draw in range(generation.draws)]
    for places in group_by_length([batch.prompts[index].ids for index, _ in rows], engine.micro_batch.rows):
        group = [rows[place] for place in places]
        prompts = [batch.prompts[index].ids for index, _ in group]
        reversed_ids = [ids[::-1] for ids in prompts]  # generation pads on the left
        ids = pad(reversed_ids, None, engine.pad_id).flip(1)
        mask = pad([(1,) * len(row) for row in reversed_ids], None, 0).flip(1)
        chosen = LogitsProcessorList()
        if generation.temperature:
            drawn = list(zip(prompts, (draw for _, draw in group), strict=True))
            keys = [draw_key(generation, probe, prompt, draw) for probe in probes for prompt, draw in drawn]
            known = {key: uniforms(key, generation.max_new_tokens) for key in set(keys)}  # both signs have the same
            numbers = torch.tensor(np.stack([known[key] for key in keys])).to(engine.device)
            chosen.append(Sampler(generation, numbers, ids.shape[1]))
        with population.forward(len(places), ids.shape[1], own_tokens=True):
            generated = engine.model.generate(  # type: ignore[operator]
                input_ids=ids.repeat(members, 1).to(engine.device),
                attention_mask=mask.repeat(members, 1).to(engine.device),
                max_new_tokens=generation.max_new_tokens,
                do_sample=False,
                num_beams=1,
                eos_token_id=list(ends) or None,
                pad_token_id=engine.pad_id,
                logits_processor=chosen,
            )
        for row, tokens in enumerate(generated[:, ids.shape[1] :].tolist()):
            member, place = divmod(row, len(group))
            index, draw = group[place]
            texts[member][index][draw] = _until_end(tokens, ends)
    return texts


def _until_end(tokens: list[int], ends: tuple[int, ...]) -> tuple[int, ...]:
    """Without the padding behind an end token."""
    return tuple(tokens[: next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))])


def end_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that end a text of this model."""
    found = model.generation_config.eos_token_id
    return tuple(found) if isinstance(found, (list, tuple)) else () if found is None else (found,)


class Sampler(LogitsProcessor):  # type: ignore[misc]
    """Draws by inversion of the cumulative probabilities at a row's next uniform number: a global random generator would make
    texts depend on each other."""

    def __init__(self, generation: Generation, uniforms: Tensor, start: int) -> None:
        self.generation, self.uniforms, self.start = generation, uniforms, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        numbers = self.uniforms[:, input_ids.shape[1] - self.start]
        return leave_one(scores, numbers, self.generation.temperature, self.generation.top_p)


def leave_one(scores: Tensor, numbers: Tensor, temperature: float | Tensor, top_p: float | Tensor) -> Tensor:
    """Scores of next tokens in which one of each row is possible: the one that its number draws.

    The number falls between tokens in the order of their ids. In that of their probabilities, engines that differ by rounding
    would draw different ones, wherever two unlikely tokens are nearly as likely.
    """
    probabilities = (scores.float() / temperature).softmax(-1)
    likely, order = probabilities.sort(dim=-1, descending=True, stable=True)
    kept = likely.cumsum(-1) - likely < top_p
    mass = torch.zeros_like(likely).scatter_(1, order, likely * kept)
    # In float64: a GPU adds up in parallel, and what rounding does to float32 sums could be more than an unlikely token's share.
    reached = mass.cumsum(-1, dtype=torch.float64)
    possible = (reached > numbers[:, None].double() * reached[:, -1:]) & (mass > 0)
    first = possible.to(torch.uint8).argmax(-1, keepdim=True)
    return torch.full_like(scores, -torch.inf).scatter_(1, first, 0.0)
