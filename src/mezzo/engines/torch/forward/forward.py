"""How a micro-batch runs through the model: inputs for all members, the positions that are read, the scores that come out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mezzo.engines.architectures import Part, part_of
from mezzo.engines.torch import catalog
from mezzo.engines.torch.forward.frozen_cache import FrozenCache
from mezzo.engines.torch.forward.inputs import Rows, picked
from mezzo.engines.torch.forward.population import Population
from mezzo.types import Batch, Readout

SHORT = 64
FOR_SHORT = [
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]


class Forward:
    """The forward of one model over the population that is active."""

    def __init__(
        self, model: nn.Module, population: Population, trunk: FrozenCache | None, device: torch.device, causal: bool
    ) -> None:
        self.model, self.population, self.frozen_cache, self.device, self.causal = (
            model,
            population,
            trunk,
            device,
            causal,
        )
        self._words: dict[tuple[int, ...], Tensor] = {}
        for body in catalog.base_models(model):
            body.register_forward_hook(self._keep_readout_positions)

    def __call__(self, rows: Rows, batch: Batch) -> Tensor:
        """[P·rows, *tail] on the device, inside an active population."""
        population, members = self.population, len(self.population.probes)
        only_words = batch.readout.kind == "words" and not batch.readout.vocabulary
        population.words = self.words_of(batch.readout) if only_words else None
        standing_in = (
            self.frozen_cache.standing_in(rows, members, self._alone) if self.frozen_cache else nullcontext(rows)
        )
        with standing_in as seen, attention_for(self.device, seen.ids.shape[1]):
            population.rows, population.length = seen.count, seen.ids.shape[1]
            population.gather = self._read_at(rows, members) if seen is rows else None
            logits = self.model(**self.inputs(seen, members)).logits
        if population.gather is not None:  # no trunk of this model could be trimmed to the readout
            logits = picked(logits, population.gather)
        return rows.read(logits.float(), batch.readout, self.words_of(batch.readout), members)

    def words_of(self, readout: Readout) -> Tensor:
        """The label words' ids on the device; sent there once."""
        if readout.words not in self._words:
            self._words[readout.words] = torch.tensor(readout.words, dtype=torch.long, device=self.device)
        return self._words[readout.words]

    def _read_at(self, rows: Rows, members: int) -> Tensor | None:
        """[P·B, k]: the positions whose hidden states matter; None where all may."""
        if rows.positions is not None:
            return rows.positions.to(self.device).repeat(members, 1)
        first = part_of(self.model) is Part.FIRST_TOKEN_CLASSIFIER
        return torch.zeros((members * rows.count, 1), dtype=torch.long, device=self.device) if first else None

    def inputs(self, rows: Rows, members: int) -> dict[str, Any]:
        # Behind a causal mask nothing before the readout sees the padding on its right.
        unseen = not rows.padded or (self.causal and rows.positions is not None)
        return self._inputs(rows.ids, rows.segments, None if unseen else rows.mask, members)

    def _inputs(self, ids: Tensor, segments: Tensor | None, mask: Tensor | None, members: int) -> dict[str, Any]:
        inputs = {"input_ids": ids}
        if mask is not None:
            inputs["attention_mask"] = mask
        types = getattr(self.model.config, "type_vocab_size", 0)
        if segments is not None and types > 1:
            inputs["token_type_ids"] = segments.clamp(max=types - 1)
        found = {key: value.to(self.device, non_blocking=True).repeat(members, 1) for key, value in inputs.items()}
        return {**found, "use_cache": False} if self.causal else found

    def _alone(self, ids: Tensor, segments: Tensor | None) -> dict[str, Any]:
        """One example without padding."""
        return self._inputs(ids, segments, None, 1)

    def _keep_readout_positions(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The LM head runs on the hidden states that are read, not on whole sequences."""
        if self.population.gather is not None and self.population.probes:
            output.last_hidden_state = picked(output.last_hidden_state, self.population.gather)
            self.population.gather = None
        return output


def attention_for(device: torch.device, length: int) -> AbstractContextManager[None]:
    """On a GPU, short rows go to the kernel that is fastest for them: 25 µs instead of 38 at 128 rows of 32 tokens."""
    if device.type != "cuda" or length > SHORT:
        return nullcontext()
    return sdpa_kernel(FOR_SHORT, set_priority=True)


@torch.no_grad()
def is_causal(model: nn.Module) -> bool:
    """True for a decoder, unless it turns out to look ahead: configurations have many ways to let a decoder do so."""
    name = type(model).__name__
    if "CausalLM" not in name and "LMHeadModel" not in name:
        return False
    device = next(model.parameters()).device
    first, other = (
        model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[:, 0]
        for ids in ((0, 1, 0), (0, 1, 1))
    )
    allowed = 1e-4 if first.dtype == torch.float32 else 1e-2  # a causal model differs in no bit
    return bool((first - other).abs().max() <= allowed * first.abs().max()) or bool(first.isnan().any())
