"""The published MeZO step, in place and in plain code: the reference of tests and benchmarks. Not an engine.

It writes the weights for every probe and draws its noise four times from torch's generator, as the released code does, so
its result depends on device, dtype and library version. The engines do neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class StepResult:
    """The losses and the slope of one published step."""

    loss_plus: float
    loss_minus: float
    slope: float


@torch.no_grad()
def step(
    model: nn.Module, loss: Callable[[], Tensor], *, seed: int, eps: float, lr: float, weight_decay: float = 0.0
) -> StepResult:
    """θ+εz, θ−εz, back to θ, then θ ← θ − lr·(g·z + decay·θ), with z redrawn from `seed` each time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    perturb(parameters, seed, eps, 1)
    plus = loss()
    perturb(parameters, seed, eps, -2)
    minus = loss()
    slope = float((plus - minus) / (2 * eps))
    perturb(parameters, seed, eps, 1)
    torch.manual_seed(seed)
    for parameter in parameters:
        z = draw_noise(parameter)
        parameter.data = parameter.data - lr * (slope * z + weight_decay * parameter.data)
    return StepResult(float(plus), float(minus), slope)


@torch.no_grad()
def perturb(parameters: Iterable[Tensor], seed: int, eps: float, factor: int) -> None:
    """θ ← θ + factor·z·ε, in place."""
    torch.manual_seed(seed)
    for parameter in parameters:
        parameter.data = parameter.data + factor * draw_noise(parameter) * eps


def draw_noise(parameter: Tensor) -> Tensor:
    """z as in the published code: torch.normal in the parameter's dtype, on its device."""
    return torch.normal(
        mean=0, std=1, size=parameter.data.size(), device=parameter.data.device, dtype=parameter.data.dtype
    )
