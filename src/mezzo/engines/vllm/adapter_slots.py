"""vLLM's adapter slots, written in place: the stacked factors that its LoRA layers read, by Hugging Face module name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.engines.lora_factors import module_of
from mezzo.errors import ModelError, RunFailed
from mezzo.types import TrainedTensor


class AdapterSlots:
    """The slots of mezzo's own adapters in vLLM's LoRA layers."""

    def __init__(self, manager: Any, ids: Sequence[int], scaling: float) -> None:
        self.manager, self.ids, self.scaling = manager, ids, scaling
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        """Module → A[slots, r, in] and B[slots, out, r], views of vLLM's own tensors."""
        for path, layer in manager.modules.items():
            names = manager.packed_modules.get(path, [path])  # query, key and value are slices of one layer
            if len(names) == len(layer.lora_a_stacked):
                stacked = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
                self.factors |= {name: (a[:, 0], b[:, 0]) for name, (a, b) in zip(names, stacked, strict=True)}

    def refuse_missing(self, tensors: Sequence[TrainedTensor]) -> None:
        """Raise ModelError for a module that vLLM has no adapter for, or one of another shape."""
        for tensor in tensors:
            module, (rows, cols) = module_of(tensor.name), tensor.shape
            found = self.factors.get(module)
            if found is None or (found[0].shape[2] != cols if tensor.kind == "lora_A" else found[1].shape[1] != rows):
                raise ModelError(f"vLLM attaches no adapter to {module}: choose other --targets, or use --engine torch")

    @torch.no_grad()
    def write(self, factors: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Write (module, A[P, r, in], B[P, out, r]) of P probes into the first P adapters."""
        if any(each not in self.manager.lora_index_to_id for each in self.ids):
            raise RunFailed("vLLM has dropped an adapter of this run; it can be resumed")
        slots = torch.tensor([self.manager.lora_index_to_id.index(each) for each in self.ids])
        for module, a, b in factors:
            stacked_a, stacked_b = self.factors[module]
            at = slots[: len(a)].to(stacked_a.device)
            # vLLM multiplies by nothing: LoRA's scale is part of B.
            stacked_a[:, : a.shape[1]][at] = a.to(stacked_a.dtype)
            stacked_b[:, :, : b.shape[2]][at] = (b * self.scaling).to(stacked_b.dtype)
