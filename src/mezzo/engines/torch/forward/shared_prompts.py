"""Candidates of one prompt share its keys and values: the prompt is computed once per probe, each candidate continues it.

Exact, because a causal prompt does not see what follows it. The cache lives for one forward of one probe and is never kept.
Only where no layer's window ends within a row: windows are counted in places of the cache, the padding behind a prompt included.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.engines.architectures import attention_windows
from mezzo.engines.torch.forward.inputs import padded, picked
from mezzo.types import Prompt, Readout, Scores

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


def can_share(model: nn.Module) -> bool:
    """True where a continuation is placed by the positions it is given, behind padding as without it.

    Not so for models that count places in the cache, nor for decoders of the BERT kind, which count from their padding id; and
    not where rotary positions depend on how long a forward is.
    """
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    return (
        "position_ids" in inspect.signature(model.forward).parameters
        and not getattr(config, "is_decoder", False)
        and not kinds & {"longrope", "dynamic"}
    )


def within_windows(config: Any, prompts: Sequence[Prompt]) -> bool:
    """True where every position of these rows sees all before it, whatever windows the model's layers have."""
    longest = max(len(p.ids) for p in prompts) + max(len(candidate) for p in prompts for candidate in p.candidates)
    return all(longest < window for window in attention_windows(config))


def score_candidates(engine: TorchEngine, prompts: Sequence[Prompt], readout: Readout) -> Scores:
    """scores[P, prompts, C] inside an active population: log-probabilities of each prompt's continuations."""
    population, device = engine.population, engine.device
    members = population.members
    ids = padded([p.ids for p in prompts], None, engine.pad_id).to(device).repeat(members, 1)
    mask = padded([(1,) * len(p.ids) for p in prompts], None, 0).to(device).repeat(members, 1)
    last = torch.tensor([[len(p.ids) - 1] for p in prompts], device=device)

    population.rows, population.length, population.words = len(prompts), ids.shape[1], None
    population.gather = last.repeat(members, 1)
    rows = [(index, candidate) for index, p in enumerate(prompts) for candidate in p.candidates]
    longest = max(len(candidate) for _, candidate in rows)
    out = engine.model(input_ids=ids, attention_mask=mask, use_cache=longest > 1)
    owner = torch.tensor([index for index, _ in rows], device=device)
    owners = torch.cat([owner + member * len(prompts) for member in range(members)])
    first = torch.tensor([candidate[0] for _, candidate in rows], device=device).repeat(members)
    logits = out.logits if population.gather is None else picked(out.logits, population.gather)
    total = logits[:, 0].float().log_softmax(-1)[owners, first]
    if longest > 1:
        total = total + _continued(engine, [c for _, c in rows], out.past_key_values, owners, mask, last[owner])
    if readout.reduce == "mean":
        total = total / torch.tensor([float(len(c)) for _, c in rows], device=device).repeat(members)
    return _placed(total.view(members, -1).cpu().numpy(), prompts)


def _continued(
    engine: TorchEngine, candidates: list[tuple[int, ...]], cache: object, owners: Tensor, mask: Tensor, last: Tensor
) -> Tensor:
    """[P·rows] log-probability of each candidate's tokens after its first, on top of its prompt's cache."""
    population, device = engine.population, engine.device
    members, count = population.members, len(candidates)
    cache.batch_select_indices(owners)  # type: ignore[attr-defined]
    steps = padded([c[:-1] for c in candidates], None, engine.pad_id).to(device)
    targets = padded([c[1:] for c in candidates], None, -1).to(device).repeat(members, 1)
    positions = last + 1 + torch.arange(steps.shape[1], device=device)
    population.rows, population.length, population.gather = count, steps.shape[1], None
    seen = torch.cat(
        [mask[owners], torch.ones(members * count, steps.shape[1], dtype=mask.dtype, device=device)], dim=1
    )
    logits = engine.model(
        input_ids=steps.repeat(members, 1),
        attention_mask=seen,
        position_ids=positions.repeat(members, 1),
        past_key_values=cache,
        use_cache=True,
    ).logits
    found = logits.float().log_softmax(-1).gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]
    return (found * (targets >= 0)).sum(1)


def _placed(scores: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
    """[P, rows] → [P, prompts, C], −inf where a prompt has fewer candidates."""
    out = np.full((len(scores), len(prompts), max(len(p.candidates) for p in prompts)), -np.inf, dtype=np.float32)
    row = 0
    for index, prompt in enumerate(prompts):
        out[:, index, : len(prompt.candidates)] = scores[:, row : row + len(prompt.candidates)]
        row += len(prompt.candidates)
    return out
