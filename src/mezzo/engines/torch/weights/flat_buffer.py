"""Small tensors (LoRA factors, norms, biases) in one buffer, so that perturbing and updating them all is a few operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.engines.torch.weights.noise import ALIGN
from mezzo.types import TrainedTensor

SMALL = 64 * 1024  # elements; a larger matrix is perturbed on its own


def is_large(trained: TrainedTensor, tensor: Tensor) -> bool:
    """Matrices of the model that are worth perturbing one at a time. Vectors and LoRA factors never are."""
    if trained.rank:
        return True
    return tensor.ndim == 2 and tensor.numel() > SMALL and trained.kind not in ("lora_A", "lora_B")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a small tensor lies in its flat buffer."""

    trained: TrainedTensor
    start: int
    count: int


class FlatBuffer:
    """Small tensors of one type and one decay setting in one buffer; gaps up to the next word belong to nobody."""

    def __init__(self, tensors: Sequence[tuple[TrainedTensor, Tensor]]) -> None:
        self.slots: list[Slot] = []
        end = 0
        for trained, tensor in tensors:
            self.slots.append(Slot(trained, end, tensor.numel()))
            end += -(-tensor.numel() // ALIGN) * ALIGN
        first = tensors[0][1]
        self.values = torch.zeros(end, device=first.device, dtype=first.dtype)
        self.decay = tensors[0][0].decay
        self.named = [(slot.trained.name, slot.count) for slot in self.slots]
        for slot, (_, tensor) in zip(self.slots, tensors, strict=True):
            self.values[slot.start : slot.start + slot.count] = tensor.detach().flatten()

    def view(self, slot: Slot) -> Tensor:
        return self.values[slot.start : slot.start + slot.count].view(slot.trained.shape)


def group_flat_buffers(tensors: Sequence[tuple[TrainedTensor, Tensor]]) -> list[FlatBuffer]:
    """One buffer for each type and decay setting that occurs."""
    groups: dict[tuple[bool, torch.dtype], list[tuple[TrainedTensor, Tensor]]] = {}
    for trained, tensor in tensors:
        groups.setdefault((trained.decay, tensor.dtype), []).append((trained, tensor))
    return [FlatBuffer(group) for group in groups.values()]
