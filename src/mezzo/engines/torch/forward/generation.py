"""Text from a causal model: every member's rows by one call of the model's own `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mezzo.engines.microbatch import group_by_length
from mezzo.engines.torch.forward.inputs import pad
from mezzo.types import Batch

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


def generate_greedily(engine: TorchEngine, batch: Batch, max_new_tokens: int) -> list[list[tuple[int, ...]]]:
    """Continuations at the members of the current point, [P][B]."""
    population, members = engine.population, engine.population.members
    texts: list[list[tuple[int, ...]]] = [[()] * len(batch) for _ in range(members)]
    for places in group_by_length([p.ids for p in batch.prompts], engine.micro_batch.rows):
        reversed_ids = [batch.prompts[place].ids[::-1] for place in places]  # generation pads on the left
        ids = pad(reversed_ids, None, engine.pad_id).flip(1)
        mask = pad([(1,) * len(row) for row in reversed_ids], None, 0).flip(1)
        with population.forward(len(places), ids.shape[1], own_tokens=True):
            generated = engine.model.generate(  # type: ignore[operator]
                input_ids=ids.repeat(members, 1).to(engine.device),
                attention_mask=mask.repeat(members, 1).to(engine.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                pad_token_id=engine.pad_id,
            )
        for row, tokens in enumerate(generated[:, ids.shape[1] :].tolist()):
            member, index = divmod(row, len(places))
            texts[member][places[index]] = tuple(tokens)
    return texts
