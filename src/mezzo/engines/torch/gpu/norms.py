"""LayerNorm and RMSNorm as one kernel, for trained and frozen norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mezzo.engines.architectures import Part, part_of
from mezzo.engines.torch.forward.choice import Choice
from mezzo.engines.torch.forward.modules import Forward
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.forward.trained_modules import TrainedModules
from mezzo.engines.torch.gpu.kernels import norms

NAME = "norm kernel"


def choose(path: str, module: nn.Module, modules: TrainedModules) -> Choice | None:
    """A kernel for norms all of whose tensors are trained, and for frozen RMS norms; torch's own is fine for the others."""
    is_rms = part_of(module) is Part.RMS_NORM
    names = [modules.trained_name(parameter) for parameter in module.parameters(recurse=False)]
    if not names or not (is_rms or type(module) is nn.LayerNorm):
        return None
    if all(names):
        return Choice(NAME, lambda inner: _trained_norm(module, inner, path, modules))
    if any(names):
        return Choice(NAME, reason="only some of its tensors are trained")
    return Choice(NAME, lambda inner: _frozen_rms_norm(module, inner, modules.population)) if is_rms else None


def _frozen_rms_norm(module: Any, inner: Forward, population: Population) -> Forward:
    def forward(rows: Tensor) -> Any:
        if not population.members or not rows.is_contiguous() or rows.dtype != population.compute:
            return inner(rows)
        return norms.norm(rows, module.weight[None], None, module.variance_epsilon, centred=False)

    return forward


def _trained_norm(module: Any, inner: Forward, path: str, modules: TrainedModules) -> Forward:
    """Along one direction; `inner` at any other point."""
    population, centred = modules.population, isinstance(module, nn.LayerNorm)
    eps = module.eps if centred else module.variance_epsilon
    weight, bias = modules.names[id(module.weight)], modules.trained_name(getattr(module, "bias", None))

    def forward(rows: Tensor) -> Any:
        if not population.point.single or not rows.is_contiguous():
            return inner(rows)
        population.split(rows, path)  # raises if these are not the members' rows
        shift = None if bias is None else population.member_tensor(bias)
        return norms.norm(rows, population.member_tensor(weight), shift, eps, centred=centred)

    return forward
