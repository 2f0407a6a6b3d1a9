"""How a micro-batch runs through the model: inputs for all members, the positions that are read, the scores that come out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mezzo.engines.architectures import Part, part_of
from mezzo.engines.torch.forward.frozen_cache import FrozenCache
from mezzo.engines.torch.forward.inputs import PaddedRows, select_positions
from mezzo.engines.torch.forward.population import Population
from mezzo.types import Batch, Readout

SHORT = 64
FOR_SHORT = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


class Forward:
    """The forward of one model over the members of its population."""

    def __init__(self, model: nn.Module, population: Population, cache: FrozenCache | None, causal: bool) -> None:
        self.model, self.population, self.frozen_cache = model, population, cache
        self.device, self.causal = population.source.device, causal
        self.trim_last_layer = True
        """False: the last layer computes every position, as its own code does."""
        self._words: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, rows: PaddedRows, batch: Batch) -> Tensor:
        """[P·rows, *tail] on the device, inside an active population."""
        population, readout, cache = self.population, batch.readout, self.frozen_cache
        members, words = population.members, self.words_of(readout)
        cached = cache.skip_layers(rows, members, self._inputs) if cache else nullcontext(rows)
        with (
            cached as seen,
            attention_for(self.device, seen.ids.shape[1]),
            population.forward(
                seen.count,
                seen.ids.shape[1],
                words=words if readout.kind == "words" and not readout.vocabulary else None,
                positions=self._positions(rows, members) if seen is rows else None,
                trim_last_layer=self.trim_last_layer,
            ) as context,
        ):
            logits = self.model(**self.inputs(seen, members)).logits.to(self.device)
        positions = context.claim_positions()
        if positions is not None:  # the model has no base model whose hidden states could be selected
            logits = select_positions(logits, positions)
        return rows.read_scores(logits.float(), readout, words, members)

    def words_of(self, readout: Readout) -> Tensor:
        """The label words' ids on the device; sent there once."""
        if readout.words not in self._words:
            self._words[readout.words] = torch.tensor(readout.words, dtype=torch.long, device=self.device)
        return self._words[readout.words]

    def _positions(self, rows: PaddedRows, members: int) -> Tensor | None:
        """[P·B, k]: the positions whose hidden states are read; None where all may be."""
        if rows.positions is not None:
            return rows.positions.to(self.device).repeat(members, 1)
        if part_of(self.model) is not Part.FIRST_TOKEN_CLASSIFIER:
            return None
        return torch.zeros((members * rows.count, 1), dtype=torch.long, device=self.device)

    def inputs(self, rows: PaddedRows, members: int) -> dict[str, Any]:
        # Behind a causal mask nothing up to the readout attends to the padding on its right.
        no_mask = not rows.has_padding or (self.causal and rows.positions is not None)
        return self._inputs(rows.ids, rows.segments, None if no_mask else rows.mask, members)

    def _inputs(
        self, ids: Tensor, segments: Tensor | None, mask: Tensor | None = None, members: int = 1
    ) -> dict[str, Any]:
        tensors = {"input_ids": ids}
        if mask is not None:
            tensors["attention_mask"] = mask
        types = getattr(self.model.config, "type_vocab_size", 0)
        if segments is not None and types > 1:
            tensors["token_type_ids"] = segments.clamp(max=types - 1)
        inputs = {key: value.to(self.device, non_blocking=True).repeat(members, 1) for key, value in tensors.items()}
        return {**inputs, "use_cache": False} if self.causal else inputs


def attention_for(device: torch.device, length: int) -> AbstractContextManager[None]:
    """On a GPU, short rows go to the kernel that is fastest for them: 25 µs instead of 38 at 128 rows of 32 tokens."""
    if device.type != "cuda" or length > SHORT:
        return nullcontext()
    return sdpa_kernel(FOR_SHORT, set_priority=True)


@torch.no_grad()
def is_causal(model: nn.Module) -> bool:
    """True for a decoder, unless its tokens turn out to attend to later ones: configurations have many ways to ask for that."""
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
