"""Candidates of one prompt share its keys and values: the prompt is computed once per probe, each candidate continues it.

Exact, because a causal prompt does not attend to what follows it. The cache lives for one forward of one probe and is never
kept. Only where no layer's window ends within a row: windows are counted in places of the cache, the padding behind a prompt
included.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.engines.architectures import attention_windows
from mezzo.engines.torch.forward.inputs import pad, select_positions, sum_log_probabilities
from mezzo.types import Batch, Prompt, Scores

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


def can_share(model: nn.Module) -> bool:
    """True where a continuation is placed by the positions it is given, behind padding as without it.

    Not so for models that count places in the cache, nor for decoders like BERT's, which count from their padding id; and
    not where rotary positions depend on how long a forward is.
    """
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {settings.get("rope_type") for settings in (rope, *rope.values()) if isinstance(settings, dict)}
    return (
        "position_ids" in inspect.signature(model.forward).parameters
        and not getattr(config, "is_decoder", False)
        and not kinds & {"longrope", "dynamic"}
    )


def within_windows(config: Any, prompts: Sequence[Prompt]) -> bool:
    """True where every position of these rows attends to all before it, whatever windows the model's layers have."""
    longest = max(len(p.ids) for p in prompts) + max(len(candidate) for p in prompts for candidate in p.candidates)
    return all(longest < window for window in attention_windows(config))


def score_candidates(engine: TorchEngine, batch: Batch, out: Scores) -> None:
    """Write scores[P, B, C] inside an active population: log-probabilities of each prompt's continuations."""
    population, device, prompts = engine.population, engine.device, batch.prompts
    members = population.members
    ids = pad([p.ids for p in prompts], None, engine.pad_id).to(device).repeat(members, 1)
    mask = pad([(1,) * len(p.ids) for p in prompts], None, 0).to(device).repeat(members, 1)
    last = torch.tensor([[len(p.ids) - 1] for p in prompts], device=device)
    candidates = [candidate for p in prompts for candidate in p.candidates]
    places = [(index, number) for index, p in enumerate(prompts) for number in range(len(p.candidates))]
    examples, numbers = np.array(places).T
    longest = max(map(len, candidates))
    with population.forward(
        len(prompts), ids.shape[1], positions=last.repeat(members, 1), trim_last_layer=engine.forward.trim_last_layer
    ) as context:
        output = engine.model(input_ids=ids, attention_mask=mask, use_cache=longest > 1)
    prompt_of_row = torch.from_numpy(examples).to(device)
    cache_rows = torch.cat([prompt_of_row + member * len(prompts) for member in range(members)])
    first = torch.tensor([candidate[0] for candidate in candidates], device=device).repeat(members)
    positions = context.claim_positions()
    logits = output.logits if positions is None else select_positions(output.logits, positions)
    total = logits[:, 0].to(device).float().log_softmax(-1)[cache_rows, first]
    if longest > 1:
        total = total + _continuation_scores(
            engine, candidates, output.past_key_values, cache_rows, mask, last[prompt_of_row]
        )
    if batch.readout.reduce == "mean":
        total = total / torch.tensor([float(len(c)) for c in candidates], device=device).repeat(members)
    out[:, examples, numbers] = total.view(members, -1).cpu().numpy()


def _continuation_scores(
    engine: TorchEngine, candidates: list[tuple[int, ...]], cache: Any, cache_rows: Tensor, mask: Tensor, last: Tensor
) -> Tensor:
    """[P·rows] log-probability of each candidate's tokens after its first, on top of its prompt's cache."""
    population, device = engine.population, engine.device
    members, count = population.members, len(candidates)
    # Layers on other devices cannot be indexed from this one, but from the host.
    cache.batch_select_indices(cache_rows.cpu() if engine.device_map else cache_rows)
    ids = pad([c[:-1] for c in candidates], None, engine.pad_id).to(device)
    targets = pad([c[1:] for c in candidates], None, -1).to(device).repeat(members, 1)
    position_ids = last + 1 + torch.arange(ids.shape[1], device=device)
    own_mask = torch.ones(members * count, ids.shape[1], dtype=mask.dtype, device=device)
    with population.forward(count, ids.shape[1]):
        logits = engine.model(
            input_ids=ids.repeat(members, 1),
            attention_mask=torch.cat([mask[cache_rows], own_mask], dim=1),
            position_ids=position_ids.repeat(members, 1),
            past_key_values=cache,
            use_cache=True,
        ).logits.to(device)
    return sum_log_probabilities(logits.float(), targets, targets >= 0)
