"""Blocks of BERT-like encoders in few kernels: residual and norm in one, and with dense noise the bias or GELU too. And the
norms of other models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

from mezzo.engines.torch.catalog import canonical_names, known
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.gpu.kernels import norms

OUTPUTS = tuple(
    f"{family}{part}" for family in ("Bert", "Roberta", "XLMRoberta", "Electra") for part in ("SelfOutput", "Output")
)
INTERMEDIATES = ("BertIntermediate", "RobertaIntermediate", "XLMRobertaIntermediate", "ElectraIntermediate")
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


def attach(model: nn.Module, population: Population) -> None:
    """Override the blocks all of whose tensors are perturbed densely, norms whose tensors are, and those of frozen tensors."""
    names = canonical_names(model)
    for path, module in model.named_modules():
        if (
            known(module, OUTPUTS)
            and _dense(module.dense, names, population)
            and _vectors(module.LayerNorm, names, population)
        ):
            _override(module, population, _output(module, path, population, names))
        elif known(module, OUTPUTS) and not any(
            names[id(p)] in population.trained for p in module.LayerNorm.parameters()
        ):
            _override(module, population, _frozen_output(module), always=True)
        elif known(module, INTERMEDIATES) and _dense(module.dense, names, population):
            if type(module.intermediate_act_fn) is GELUActivation:
                _override(module, population, _intermediate(module, path, population, names))
        elif (type(module) is nn.LayerNorm or known(module, RMS_NORMS)) and _vectors(module, names, population):
            _override(module, population, _norm(module, path, population, names))
        elif known(module, RMS_NORMS) and names[id(module.weight)] not in population.trained:
            _override(module, population, _frozen_norm(module, population), always=True)


def _override(module: nn.Module, population: Population, fused: Callable[..., Any], always: bool = False) -> None:
    """`always`: at any point, not only along one direction."""
    plain = module.forward

    def forward(*tensors: Tensor) -> Any:
        ours = (population.probes if always else population.point.single) and all(t.is_contiguous() for t in tensors)
        return fused(*tensors) if ours else plain(*tensors)

    module.forward = forward  # type: ignore[method-assign]


def _dense(linear: Any, names: dict[int, str], population: Population) -> bool:
    weight = names[id(linear.weight)]
    return (
        weight in population.large
        and not population.trained[weight].rank
        and _vectors(linear, names, population, "bias")
    )


def _vectors(module: Any, names: dict[int, str], population: Population, *only: str) -> bool:
    """True if the module's tensors (those named, or all) are trained and small."""
    own = {key: p for key, p in module.named_parameters(recurse=False) if not only or key in only}
    return bool(own) and all(
        (name := names[id(p)]) in population.trained and name not in population.large for p in own.values()
    )


def _product(linear: Any, path: str, x: Tensor, population: Population, names: dict[int, str]) -> Tensor:
    """x·Wᵀ at every member, without bias: [P·B, …, out]."""
    rows = population.split(x, path)
    weights = population.member_matrix(names[id(linear.weight)])
    found = torch.bmm(rows.reshape(len(rows), -1, rows.shape[-1]), weights.mT)
    return found.view(*x.shape[:-1], -1)


def _output(module: Any, path: str, population: Population, names: dict[int, str]) -> Callable[..., Tensor]:
    dense, norm = module.dense, module.LayerNorm

    def forward(hidden: Tensor, residual: Tensor) -> Tensor:
        member = {key: population.member(names[id(p)]) for key, p in norm.named_parameters()}
        bias = population.member(names[id(dense.bias)])
        y = _product(dense, f"{path}.dense", hidden, population, names)
        return norms.norm(y, member["weight"], member["bias"], norm.eps, residual, bias)

    return forward


def _frozen_output(module: Any) -> Callable[..., Tensor]:
    norm = module.LayerNorm

    def forward(hidden: Tensor, residual: Tensor) -> Tensor:
        return norms.norm(module.dense(hidden), norm.weight[None], norm.bias[None], norm.eps, residual)

    return forward


def _intermediate(module: Any, path: str, population: Population, names: dict[int, str]) -> Callable[..., Tensor]:
    dense = module.dense

    def forward(hidden: Tensor) -> Tensor:
        bias = population.member(names[id(dense.bias)])
        return norms.add_bias(_product(dense, f"{path}.dense", hidden, population, names), bias, gelu=True)

    return forward


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
