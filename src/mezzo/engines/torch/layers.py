"""The forward of each kind of module when its rows belong to several members.

Every function here replaces `forward` on one module instance; the class and its parameters stay where Hugging Face code
expects them. Outside a population (`Population.at`) the original forward runs untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mezzo.engines.torch.catalog import canonical_names
from mezzo.engines.torch.population import Population
from mezzo.space import lora_names

Forward = Callable[..., Any]


def attach(model: nn.Module, population: Population, scaling: float) -> None:
    """Override the forward of every module that holds a trained tensor, and of the LM head."""
    names = canonical_names(model)
    head = output_head(model)
    modules = dict(model.named_modules())
    in_leaves = {id(p) for m in modules.values() if not list(m.children()) for p in m.parameters(recurse=False)}
    for path, module in modules.items():
        own = {
            own: names[id(p)] for own, p in module.named_parameters(recurse=False) if names[id(p)] in population.trained
        }
        if list(module.children()):
            # A parent that only shares a leaf's tensor (RoBERTa's lm_head.bias) leaves the work to the leaf.
            own = {key: name for key, name in own.items() if id(getattr(module, key)) not in in_leaves}
        lora = lora_names(f"{path}.weight")
        trained_lora = lora if any(name in population.trained for name in lora) else None
        if own or trained_lora or module is head:
            grown = _grown(module, path, population, own, trained_lora, scaling, module is head)
            module.forward = _switch(module.forward, grown, population)  # type: ignore[method-assign]


def output_head(model: nn.Module) -> nn.Module | None:
    """The linear layer that turns hidden states into logits of the vocabulary, if the model has one."""
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if getter else None


def _grown(
    module: nn.Module,
    path: str,
    population: Population,
    own: dict[str, str],
    lora: tuple[str, str] | None,
    scaling: float,
    is_head: bool,
) -> Forward:
    if isinstance(module, (nn.Linear, Conv1D)):
        return _linear(module, path, population, own, lora, scaling, is_head)
    if type(module) is nn.Embedding:
        return _embedding(population, own["weight"])
    if type(module) is nn.LayerNorm:
        return _layer_norm(module, path, population, own)
    return _any(module, path, population, own)


def _switch(original: Forward, grown: Forward, population: Population) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return grown(*args, **kwargs) if population.probes else original(*args, **kwargs)

    return forward


def _linear(
    module: nn.Linear | Conv1D,
    path: str,
    population: Population,
    own: dict[str, str],
    lora: tuple[str, str] | None,
    scaling: float,
    is_head: bool,
) -> Forward:
    weight, bias = own.get("weight"), own.get("bias")
    rank = population.trained[weight].rank if weight else 0
    turned = isinstance(module, Conv1D)  # stored as (in, out)
    packed = module.forward if not module.weight.is_floating_point() else None  # a quantised layer unpacks itself

    def base(x: Tensor) -> Tensor:
        if packed is not None:
            return packed(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # type: ignore[no-any-return]
        return F.linear(x, module.weight.T if turned else module.weight, None if bias else module.bias)

    def forward(rows: Tensor) -> Tensor:
        x = population.split(rows, path)
        only_words = is_head and population.words is not None
        if only_words:
            y = _word_logits(x, module, weight, bias, population)
        elif weight is None or not population.perturbed:
            y = base(x)
        elif rank:
            y = base(x) + _low_rank(x, weight, rank, population, turned)
        else:
            y = _each(x, _dense(weight, population).mT if turned else _dense(weight, population))
            y = y if bias or module.bias is None else y + module.bias
        if bias and not only_words:
            y = y + _spread(population.member(bias), y)
        if lora:
            y = y + _lora_term(x, lora, population, scaling)
        return y.reshape(*rows.shape[:-1], y.shape[-1])

    return forward


def _dense(weight: str, population: Population) -> Tensor:
    return population.member_matrix(weight) if weight in population.large else population.member(weight)


def _each(x: Tensor, weights: Tensor) -> Tensor:
    """x[P, B, …, in] times weights[P, out, in]ᵀ, member by member."""
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    return torch.bmm(flat, weights.transpose(1, 2)).view(*x.shape[:-1], weights.shape[1])


def _spread(vectors: Tensor, like: Tensor) -> Tensor:
    """[P, n] → [P, 1, …, n], to meet rows of `like`."""
    return vectors.view(vectors.shape[0], *[1] * (like.ndim - 2), vectors.shape[-1])


def _low_rank(x: Tensor, weight: str, rank: int, population: Population, turned: bool) -> Tensor:
    """(x·V)·Uᵀ for all seeds at once; members differ only in the scales between the two products."""
    trained = population.trained[weight]
    pairs = [population.source.factors(seed, weight, trained.shape, rank) for seed in population.seeds]
    left, right = torch.cat([u for u, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1)
    if turned:
        left, right = right, left
    scales = population.factor_scales(rank).repeat_interleave(rank, dim=1)
    inner = x @ right
    return (inner * _spread(scales, inner)) @ left.T


def _lora_term(x: Tensor, lora: tuple[str, str], population: Population, scaling: float) -> Tensor:
    down, up = (population.member(name) for name in lora)
    return _each(_each(x, down) * scaling, up)


def _word_logits(
    x: Tensor, module: nn.Linear | Conv1D, weight: str | None, bias: str | None, population: Population
) -> Tensor:
    """Logits of the label words only: the readout never needs the rest of the vocabulary."""
    words = population.words
    assert words is not None
    rows = population.member_rows(weight, words) if weight else module.weight[words].expand(len(x), -1, -1)
    y = _each(x, rows)
    if bias:
        return y + _spread(population.member_rows(bias, words), y)
    return y if module.bias is None else y + module.bias[words]


def _embedding(population: Population, weight: str) -> Forward:
    def forward(ids: Tensor) -> Tensor:
        if population.diverged and ids.shape[0] != 1:
            own = ids.view(population.members, population.rows, *ids.shape[1:])
            return torch.cat([population.member_rows(weight, own[m])[m] for m in range(population.members)])
        # Every member sees the same tokens, so one member's rows are gathered and perturbed P ways.
        shared = ids if ids.shape[0] == 1 else ids[: population.rows]
        rows = population.member_rows(weight, shared)
        if ids.shape[0] == 1:
            rows = rows.expand(-1, population.rows, *rows.shape[2:])
        return rows.reshape(population.members * population.rows, *rows.shape[2:])

    return forward


def _layer_norm(module: nn.LayerNorm, path: str, population: Population, own: dict[str, str]) -> Forward:
    def forward(rows: Tensor) -> Tensor:
        x = population.split(rows, path)
        y = F.layer_norm(x, module.normalized_shape, None, None, module.eps)
        gain = _spread(population.member(own["weight"]), y) if "weight" in own else module.weight
        shift = _spread(population.member(own["bias"]), y) if "bias" in own else module.bias
        y = y if gain is None else y * gain
        y = y if shift is None else y + shift
        return y.reshape(rows.shape)

    return forward


def _any(module: nn.Module, path: str, population: Population, own: dict[str, str]) -> Forward:
    """Any other leaf: the original forward, mapped over the members' parameters."""
    original = module.forward

    def one(parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        # `functional_call` would run the overriding forward; swap it out for the original.
        with _forward_set(module, original):
            return torch.func.functional_call(module, parameters, args, kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        members = {key: _dense(name, population) for key, name in own.items()}
        split = [population.split(a, path) if isinstance(a, Tensor) else a for a in args]
        named = {k: population.split(v, path) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        in_dims = tuple(0 if isinstance(a, Tensor) else None for a in split)
        mapped = torch.func.vmap(
            lambda parameters, tensors, *values: one(
                parameters, *values, **tensors, **{k: v for k, v in named.items() if not isinstance(v, Tensor)}
            ),
            in_dims=(0, 0, *in_dims),
        )
        out = mapped(members, {k: v for k, v in named.items() if isinstance(v, Tensor)}, *split)
        return out.flatten(0, 1)

    return forward


class _forward_set:
    """The instance's forward replaced for a moment."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self.module, self.forward = module, forward

    def __enter__(self) -> None:
        self.kept = self.module.__dict__.pop("forward", None)
        self.module.__dict__["forward"] = self.forward

    def __exit__(self, *_: object) -> None:
        self.module.__dict__.pop("forward", None)
        if self.kept is not None:
            self.module.__dict__["forward"] = self.kept
