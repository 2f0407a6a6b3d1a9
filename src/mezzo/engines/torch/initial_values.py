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
        """The other one of every pair of which only one is trained: LoRA's factors, a prefix's keys and values."""
        names = {t.name for t in trained}
        if self.space.kind not in ("lora", "prefix"):
            return {}
        pairs = select(replace(self.space, only=(), layers=""), catalogue)
        return {t.name: self._added_value(t) for t in pairs if t.name not in names and _partner(t.name) in names}

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
        """LoRA starts with A uniform as a linear layer's weight and B zero, so that the model is unchanged at first."""
        if trained.kind == "prefix":
            return self._prefixes[trained.name]
        if trained.kind != "lora_A":
            return torch.zeros(trained.shape, device=self.device)
        count, bound = int(np.prod(trained.shape)), trained.shape[1] ** -0.5
        values = noise.uniform(self.seed, f"init/{trained.name}", count, bound)
        return torch.from_numpy(values).view(trained.shape).to(self.device)


def _partner(name: str) -> str:
    if name.endswith((".prefix_key", ".prefix_value")):
        a, b = prefix_names(name.rsplit(".", 1)[0])
    else:
        a, b = lora_names(name.replace(".lora_A.weight", ".weight").replace(".lora_B.weight", ".weight"))
    return b if name == a else a
