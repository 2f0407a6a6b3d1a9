"""LayerNorm and RMSNorm as one kernel, for trained and frozen norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mezzo.engines.architectures import Part, part_of
from mezzo.engines.torch.catalog import canonical_names
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.gpu.kernels import norms


def attach(model: nn.Module, population: Population) -> None:
    """Override norms all of whose tensors are trained, and frozen RMS norms."""
    names = canonical_names(model)
    for path, module in model.named_modules():
        rms = part_of(module) is Part.RMS_NORM
        if (type(module) is nn.LayerNorm or rms) and _vectors(module, names, population):
            _override(module, population, _norm(module, path, population, names))
        elif rms and names[id(module.weight)] not in population.trained:
            _override(module, population, _frozen_norm(module, population), always=True)


def _override(module: nn.Module, population: Population, fused: Callable[..., Any], always: bool = False) -> None:
    """`always`: at any point, not only along one direction."""
    plain = module.forward

    def forward(rows: Tensor) -> Any:
        ours = (population.probes if always else population.point.single) and rows.is_contiguous()
        return fused(rows) if ours else plain(rows)

    module.forward = forward  # type: ignore[method-assign]


def _vectors(module: Any, names: dict[int, str], population: Population) -> bool:
    """True if the module's tensors are trained and small."""
    own = [names[id(p)] for p in module.parameters(recurse=False)]
    return bool(own) and all(name in population.trained and name not in population.large for name in own)


def _frozen_norm(module: Any, population: Population) -> Callable[..., Tensor]:
    plain = module.forward

    def forward(rows: Tensor) -> Tensor:
        if rows.dtype != population.compute:
            return plain(rows)  # type: ignore[no-any-return]
        return norms.norm(rows, module.weight[None], None, module.variance_epsilon, centred=False)

    return forward


def _norm(module: Any, path: str, population: Population, names: dict[int, str]) -> Callable[..., Tensor]:
    centred = isinstance(module, nn.LayerNorm)
    eps = module.eps if centred else module.variance_epsilon
    bias = getattr(module, "bias", None)

    def forward(rows: Tensor) -> Tensor:
        population.split(rows, path)  # says so if the rows are not the members' own
        shift = None if bias is None else population.member(names[id(bias)])
        return norms.norm(rows, population.member(names[id(module.weight)]), shift, eps, centred=centred)

    return forward
