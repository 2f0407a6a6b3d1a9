"""Gradients of the trained tensors through the engine's own forward at the unperturbed weights, and AdamW on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mezzo.engines.microbatch import group_by_length
from mezzo.engines.torch.forward.inputs import make_rows
from mezzo.errors import SpaceError
from mezzo.method.objectives import is_normalised
from mezzo.types import Batch, GradientStep, Probe

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


class GradientDescent:
    """AdamW over the trained tensors of an engine. It keeps a gradient and two moments of each."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.values = {t.name: engine.population.value(t.name) for t in engine.trained}
        if any(value.dtype != torch.float32 for value in self.values.values()):
            raise SpaceError("--method adam moves float32 weights: use --dtype float32, or --space lora or prefix")
        # A trained tensor of the model is read as its parameter or, by the LM head, as the population's tensor.
        self.parameters = {n: p for n, p in engine.model.named_parameters() if n in self.values}
        groups = [[self.values[t.name] for t in engine.trained if t.decay is decay] for decay in (True, False)]
        self.optimizer = torch.optim.AdamW([{"params": g, "decays": i == 0} for i, g in enumerate(groups) if g])

    def step(self, step: GradientStep) -> tuple[float, float]:
        """The loss before the step, and the gradient's norm; without finite numbers nothing moves."""
        loss, gradients = self.gradients(step.batch)
        norm = float(torch.stack([gradient.norm().to(self.engine.device) for gradient in gradients.values()]).norm())
        if math.isfinite(loss) and math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group.update(lr=step.lr, weight_decay=step.weight_decay if group["decays"] else 0.0)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def gradients(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """The loss of a batch, and its gradient by the name of each trained tensor that it depends on."""
        with self.engine.explain_out_of_memory(1), torch.enable_grad(), self._tracked():
            loss = sum(self._backward(part, len(part) / len(batch)) for part in self._parts(batch))
        return loss, {name: value.grad for name, value in self.values.items() if value.grad is not None}

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Examples whose activations are kept at the same time."""
        for places in group_by_length([p.ids for p in batch.prompts], self.engine.micro_batch.rows):
            yield Batch(tuple(batch.prompts[place] for place in places), batch.readout)

    def _backward(self, batch: Batch, share: float) -> float:
        loss = share * cross_entropy(self._scores(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _scores(self, batch: Batch) -> Tensor:
        """[B, C], differentiable; −inf where an example has fewer candidates."""
        readout = batch.readout
        width = len(readout.words) or readout.classes or max(len(p.candidates) for p in batch.prompts)
        scores = torch.full((len(batch), width), -torch.inf, device=self.engine.device)
        with self.engine.population.at((Probe(),)):
            for rows in make_rows(batch, self.engine.micro_batch, self.engine.pad_id):
                places = torch.from_numpy(rows.places).to(self.engine.device)
                index = (places[0],) if rows.tail else (places[0], places[1])
                scores = scores.index_put(index, self.engine.forward(rows, batch))
        return scores

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Gradients of the trained tensors, for the duration; afterwards each is in its value's `grad`."""
        leaves = [*self.values.values(), *self.parameters.values()]
        for leaf in leaves:
            leaf.requires_grad_(True)
        try:
            yield
        finally:
            for leaf in leaves:
                leaf.requires_grad_(False)
            for name, parameter in self.parameters.items():
                value = self.values[name]
                if parameter.grad is not None:
                    value.grad = parameter.grad if value.grad is None else value.grad + parameter.grad
                    parameter.grad = None


def cross_entropy(scores: Tensor, batch: Batch) -> Tensor:
    """As `mezzo.method.objectives.cross_entropy`, differentiable."""
    logs = scores if is_normalised(batch) else scores.log_softmax(1)
    labels = torch.from_numpy(batch.labels).to(scores.device)
    return -logs.gather(1, labels[:, None]).mean()
