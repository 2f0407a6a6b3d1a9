"""Small tensors (LoRA factors, norms, biases) in one buffer, so that perturbing and updating them all takes a few operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.engines.torch.weights.noise import ALIGN
from mezzo.types import TrainedTensor

# A matrix with more elements is perturbed on its own.
MAX_SMALL_ELEMENTS = 64 * 1024


def is_large(trained: TrainedTensor, tensor: Tensor) -> bool:
    """True for matrices of the model that are worth perturbing one at a time. Vectors and LoRA factors never are."""
    if trained.rank:
        return True
    return tensor.ndim == 2 and tensor.numel() > MAX_SMALL_ELEMENTS and trained.kind not in ("lora_A", "lora_B")


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """The position of a small tensor in its flat buffer, in elements."""

    trained: TrainedTensor
    start: int
    count: int


class FlatBuffer:
    """Small tensors of one device, dtype and decay setting, each at a multiple of `ALIGN` elements; the gaps are unused."""

    def __init__(self, tensors: Sequence[tuple[TrainedTensor, Tensor]]) -> None:
        self.entries: list[FlatEntry] = []
        end = 0
        for trained, tensor in tensors:
            self.entries.append(FlatEntry(trained, end, tensor.numel()))
            end += -(-tensor.numel() // ALIGN) * ALIGN
        padded = [F.pad(tensor.detach().flatten(), (0, -tensor.numel() % ALIGN)) for _, tensor in tensors]
        self.values = torch.cat(padded)
        self.decay = tensors[0][0].decay
        self.sizes = [(entry.trained.name, entry.count) for entry in self.entries]
        """(name, elements) of every tensor, as `NoiseSource` takes them."""

    def view(self, entry: FlatEntry) -> Tensor:
        return self.values[entry.start : entry.start + entry.count].view(entry.trained.shape)


def group_flat_buffers(tensors: Sequence[tuple[TrainedTensor, Tensor]]) -> list[FlatBuffer]:
    """One buffer for each combination of device, dtype and decay setting."""
    groups: dict[tuple[bool, torch.dtype, torch.device], list[tuple[TrainedTensor, Tensor]]] = {}
    for trained, tensor in tensors:
        groups.setdefault((trained.decay, tensor.dtype, tensor.device), []).append((trained, tensor))
    return [FlatBuffer(group) for group in groups.values()]
