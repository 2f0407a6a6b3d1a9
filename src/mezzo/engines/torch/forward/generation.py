"""Text from a causal model: every member's rows by one call of the model's own `generate`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from mezzo.engines.base import Continuations
from mezzo.engines.microbatch import group_by_length
from mezzo.engines.torch.forward.inputs import pad
from mezzo.method import noise
from mezzo.types import Batch, Generation, Probe

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


def generate_texts(engine: TorchEngine, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
    """Continuations at the members of the current point, which are at these probes."""
    population, members = engine.population, len(probes)
    directions = [probe.terms[0][0] if probe.terms else 0 for probe in probes]
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
            numbers = {
                direction: [
                    _uniforms(generation, direction, prompt, draw)
                    for prompt, (_, draw) in zip(prompts, group, strict=True)
                ]
                for direction in set(directions)
            }
            uniforms = torch.tensor(np.stack([row for direction in directions for row in numbers[direction]]))
            chosen.append(Sampler(generation, uniforms.to(engine.device), ids.shape[1]))
        with population.forward(len(places), ids.shape[1], own_tokens=True):
            generated = engine.model.generate(  # type: ignore[operator]
                input_ids=ids.repeat(members, 1).to(engine.device),
                attention_mask=mask.repeat(members, 1).to(engine.device),
                max_new_tokens=generation.max_new_tokens,
                do_sample=False,
                num_beams=1,
                pad_token_id=engine.pad_id,
                logits_processor=chosen,
            )
        for row, tokens in enumerate(generated[:, ids.shape[1] :].tolist()):
            member, place = divmod(row, len(group))
            index, draw = group[place]
            texts[member][index][draw] = tuple(tokens)
    return texts


class Sampler(LogitsProcessor):  # type: ignore[misc]
    """Leaves one token possible, drawn by inversion of the cumulative probabilities at a row's next uniform number: a global
    random generator would make texts depend on each other."""

    def __init__(self, generation: Generation, uniforms: Tensor, start: int) -> None:
        self.generation, self.uniforms, self.start = generation, uniforms, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        probabilities = (scores.float() / self.generation.temperature).softmax(-1)
        likely, order = probabilities.sort(dim=-1, descending=True, stable=True)
        kept = likely.cumsum(-1) - likely < self.generation.top_p
        mass = (likely * kept).cumsum(-1)
        wanted = self.uniforms[:, input_ids.shape[1] - self.start, None] * mass[:, -1:]
        rank = (mass <= wanted).sum(-1, keepdim=True).clamp(max=mass.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, order.gather(1, rank), 0.0)


def _uniforms(generation: Generation, direction: int, prompt: Sequence[int], draw: int) -> np.ndarray:
    """Numbers in [0, 1), one per token, by (seed, direction, prompt, draw); the seed of a direction follows from its step."""
    name = hashlib.sha256(repr(tuple(prompt)).encode()).hexdigest()
    seed = noise.step_seed(generation.seed, direction, 0)
    words = noise.words(seed, f"generate/{name}/{draw}", 0, generation.max_new_tokens)
    return (words >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
