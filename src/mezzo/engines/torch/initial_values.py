"""Initial values of trained tensors: the model's own, LoRA's factors from a seed, a prefix from the activations of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.engines.torch.forward import prefix
from mezzo.method import noise
from mezzo.method.space import Space, lora_names, prefix_names, select
from mezzo.types import TensorInfo, TrainedTensor


class InitialValues:
    """The values before step 1, a pure function of the model, the space, the seed and a prefix's text."""

    def __init__(
        self, model: nn.Module, space: Space, seed: int, device: torch.device, prefix_ids: Sequence[int]
    ) -> None:
        self.model, self.space, self.seed, self.device = model, space, seed, device
        self.added_tensors: list[TensorInfo] = []
        """Tensors that the model itself does not have."""
        self._prefixes = self._prefix_values(prefix_ids) if space.kind == "prefix" else {}

    def tensors(
        self, trained: Sequence[TrainedTensor], stored: Mapping[str, Tensor]
    ) -> list[tuple[TrainedTensor, Tensor]]:
        """`stored`: parameters as they were before the model was widened."""
        parameters = {**dict(self.model.named_parameters()), **stored}
        return [(t, parameters[t.name] if t.name in parameters else self._added_value(t)) for t in trained]

    def frozen_partners(self, trained: Sequence[TrainedTensor], catalogue: Sequence[TensorInfo]) -> dict[str, Tensor]:
        """The values of `untrained_partners`."""
        return {t.name: self._added_value(t) for t in untrained_partners(self.space, trained, catalogue)}

    def _prefix_values(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """The keys and values of a text at each attention module; without a text, of some tokens of the vocabulary."""
        size: int = self.model.config.vocab_size  # type: ignore[assignment, union-attr]
        text = list(ids) or [int(n) for n in noise.order(self.seed, "prefix", size)[: self.space.tokens]]
        activations = prefix.record_activations(self.model, torch.tensor([text], device=self.device))
        self.added_tensors = prefix.tensor_infos(activations)
        return {
            name: value
            for path, pair in activations.items()
            for name, value in zip(prefix_names(path), pair, strict=True)
        }

    def _added_value(self, trained: TrainedTensor) -> Tensor:
        if trained.kind == "prefix":
            return self._prefixes[trained.name]
        return initial_lora_factor(trained, self.seed).to(self.device)


def initial_lora_factor(trained: TrainedTensor, seed: int) -> Tensor:
    """A uniform like a linear layer's weight, B zero, so that the model is unchanged at first."""
    if trained.kind != "lora_A":
        return torch.zeros(trained.shape)
    count, bound = int(np.prod(trained.shape)), trained.shape[1] ** -0.5
    return torch.from_numpy(noise.uniform(seed, f"init/{trained.name}", count, bound)).view(trained.shape)


def untrained_partners(
    space: Space, trained: Sequence[TrainedTensor], catalogue: Sequence[TensorInfo]
) -> tuple[TrainedTensor, ...]:
    """The other tensor of each pair of which only one is trained: LoRA factors, or a prefix's keys and values."""
    if not space.adapter:
        return ()
    names = {t.name for t in trained}
    every = select(replace(space, only=(), layers=""), catalogue)
    return tuple(t for t in every if t.name not in names and partner_name(t.name) in names)


def partner_name(name: str) -> str:
    """The other tensor of a pair."""
    if name.endswith((".prefix_key", ".prefix_value")):
        a, b = prefix_names(name.rsplit(".", 1)[0])
    else:
        a, b = lora_names(name.replace(".lora_A.weight", ".weight").replace(".lora_B.weight", ".weight"))
    return b if name == a else a
