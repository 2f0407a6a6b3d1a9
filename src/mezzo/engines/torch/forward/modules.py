"""Forwards of single modules whose rows belong to several members, each with weights of its own.

Every function takes a module, the forward it has, and what is trained in it, and returns another forward. `plan` decides
which module gets which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.forward.trained_modules import TrainedModule

Forward = Callable[..., Any]


def member_forward(module: nn.Module, inner: Forward, trained: TrainedModule, population: Population) -> Forward:
    """The module's own forward outside a population, and the members' inside one.

    At the unperturbed weights the members' forward runs only where it computes something else: LoRA's term, the label words'
    logits, or products with weights that are stored in another type.
    """
    computed = kind_of(module)[1](module, inner, trained, population)
    stored = {population.value(name).dtype for name in trained.tensors.values()}
    always = trained.lora is not None or trained.is_head or bool(stored - {population.compute})

    def forward(*args: Any, **kwargs: Any) -> Any:
        active = population.members if always else population.perturbed
        return computed(*args, **kwargs) if active else inner(*args, **kwargs)

    return forward


def kind_of(module: nn.Module) -> tuple[str, Callable[[Any, Forward, TrainedModule, Population], Forward]]:
    """The implementation for a class of modules, and its name."""
    if isinstance(module, (nn.Linear, Conv1D)):
        return "linear", linear
    if type(module) is nn.Embedding:
        return "embedding", embedding
    if type(module) is nn.LayerNorm:
        return "layer norm", layer_norm
    return "vmap", vmapped


def linear(module: nn.Linear | Conv1D, inner: Forward, trained: TrainedModule, population: Population) -> Forward:
    """x·Wᵀ + b with each member's weights, and LoRA's term."""
    weight, bias = trained.tensors.get("weight"), trained.tensors.get("bias")
    rank = population.trained[weight].rank if weight else 0
    transposed = isinstance(module, Conv1D)  # stored as (in, out)
    quantized = not module.weight.is_floating_point()

    def base(x: Tensor) -> Tensor:
        if quantized:
            return inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # type: ignore[no-any-return]
        # On a CPU 16-bit weights are widened just in time.
        matrix = module.weight.to(x.dtype)
        frozen_bias = None if bias or module.bias is None else module.bias.to(x.dtype)
        if trained.is_head and x.dtype != torch.float32:
            y = torch.mm(x.flatten(0, -2), matrix if transposed else matrix.T, out_dtype=torch.float32)
            y = y.view(*x.shape[:-1], -1)
            return y if frozen_bias is None else y.add_(frozen_bias)
        return F.linear(x, matrix.T if transposed else matrix, frozen_bias)

    def forward(rows: Tensor) -> Tensor:
        x = population.split(rows, trained.path)
        words = population.context.words if trained.is_head else None
        if words is not None:
            y = _word_logits(x, words.to(x.device), module, weight, bias, population)
        elif weight is None or not population.perturbed:
            y = base(x)
        elif rank:
            y = base(x).add_(_low_rank_term(x, weight, rank, population, transposed))
        else:
            members = _members(weight, population).to(x.dtype)
            y = _batched_linear(x, members.mT if transposed else members, float32_sums=trained.is_head)
            y = y if bias or module.bias is None else y.add_(module.bias)
        if bias and words is None:
            population.ops.add_bias(y, population.member_tensor(bias))
        if trained.lora:
            y.add_(_lora_term(x, trained.lora, population, trained.scaling))
        return y.reshape(*rows.shape[:-1], y.shape[-1])

    return forward


def _members(name: str, population: Population) -> Tensor:
    return population.member_matrix(name) if name in population.large else population.member_tensor(name)


def _batched_linear(x: Tensor, weights: Tensor, float32_sums: bool = False) -> Tensor:
    """x[P, B, …, in] times weights[P, out, in]ᵀ; `float32_sums` keeps the sums of 16-bit products in float32."""
    flat, matrices = x.reshape(x.shape[0], -1, x.shape[-1]), weights.transpose(1, 2)
    if float32_sums and x.dtype != torch.float32:
        y = torch.bmm(flat, matrices, out_dtype=torch.float32)
    else:
        y = torch.bmm(flat, matrices)
    return y.view(*x.shape[:-1], weights.shape[1])


def _broadcast(vectors: Tensor, like: Tensor) -> Tensor:
    """[P, n] → [P, 1, …, n], to be combined with the rows of `like`."""
    return vectors.view(vectors.shape[0], *[1] * (like.ndim - 2), vectors.shape[-1])


def _low_rank_term(x: Tensor, weight: str, rank: int, population: Population, transposed: bool) -> Tensor:
    """(x·V)·Uᵀ for all seeds at once; members differ only in the scales between the two products."""
    left, right = population.ops.factors(population.trained[weight], population.point)
    if transposed:
        left, right = right, left
    scales = (population.point.scales * (1 / rank**0.5)).repeat_interleave(rank, dim=1).to(x.device)
    inner = x @ right.to(x)  # ±1 in any type
    return (inner * _broadcast(scales, inner)).to(x.dtype) @ left.T.to(x)


def _lora_term(x: Tensor, names: tuple[str, str], population: Population, scaling: float) -> Tensor:
    """In float32: rounded to bfloat16, a factor would lose an eighth of its perturbation."""
    down, up = (population.member_tensor(name) for name in names)
    return _batched_linear(_batched_linear(x.float(), down) * scaling, up)


def _word_logits(
    x: Tensor, words: Tensor, module: nn.Linear | Conv1D, weight: str | None, bias: str | None, population: Population
) -> Tensor:
    """Logits of the label words only, in float32: the readout never needs the rest of the vocabulary."""
    rows = population.member_rows(weight, words) if weight else module.weight[words].float().expand(len(x), -1, -1)
    y = _batched_linear(x.float(), rows)
    if bias:
        return y + _broadcast(population.member_rows(bias, words), y)
    return y if module.bias is None else y + module.bias[words]


def embedding(module: nn.Embedding, inner: Forward, trained: TrainedModule, population: Population) -> Forward:
    """Rows of each member's table, perturbed only where a token occurs."""
    weight = trained.tensors["weight"]

    def forward(ids: Tensor) -> Tensor:
        members, count = population.members, population.context.rows
        if population.context.own_tokens and ids.shape[0] != 1:
            own_ids = ids.view(members, count, *ids.shape[1:])
            rows = torch.cat([population.member_rows(weight, own_ids[m])[m] for m in range(members)])
            return rows.to(population.compute)
        # Every member reads the same tokens, so one member's rows are gathered and perturbed P ways.
        shared_ids = ids if ids.shape[0] == 1 else ids[:count]
        rows = population.member_rows(weight, shared_ids).to(population.compute)
        if ids.shape[0] == 1:
            rows = rows.expand(-1, count, *rows.shape[2:])
        return rows.reshape(members * count, *rows.shape[2:])

    return forward


def layer_norm(module: nn.LayerNorm, inner: Forward, trained: TrainedModule, population: Population) -> Forward:
    """In float32, with each member's gain and shift."""
    weight, bias = trained.tensors.get("weight"), trained.tensors.get("bias")

    def forward(rows: Tensor) -> Tensor:
        x = population.split(rows, trained.path)
        y = F.layer_norm(x.float(), module.normalized_shape, None, None, module.eps)
        gain = _broadcast(population.member_tensor(weight), y) if weight else module.weight
        shift = _broadcast(population.member_tensor(bias), y) if bias else module.bias
        if gain is not None and shift is not None:
            y = torch.addcmul(shift.float(), y, gain.float())
        elif gain is not None:
            y = y.mul_(gain)
        return y.to(rows.dtype).reshape(rows.shape)

    return forward


class _OwnForward(nn.Module):
    """A module's own forward under a root of its own, so that `functional_call` does not run the forward that replaced it."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module, self.own_forward = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


def vmapped(module: nn.Module, inner: Forward, trained: TrainedModule, population: Population) -> Forward:
    """Any other module: its own forward, mapped over the members' parameters."""
    root, tensors = _OwnForward(module, inner), trained.tensors
    holds_matrix = any(name in population.large for name in tensors.values())

    def split(value: Any) -> Any:
        """A tensor by members; numbers in float32, as the small tensors they are combined with."""
        if not isinstance(value, Tensor):
            return value
        parts = population.split(value, trained.path)
        return parts.float() if parts.is_floating_point() and not holds_matrix else parts

    def forward(*args: Any, **kwargs: Any) -> Any:
        members = {key: _members(name, population) for key, name in tensors.items()}
        if holds_matrix:
            members = {key: value.to(population.compute) for key, value in members.items()}
        elif population.compute != torch.float32:
            frozen = {key: p for key, p in module.named_parameters(recurse=False) if key not in tensors}
            members |= {key: p.float().expand(population.members, *p.shape) for key, p in frozen.items()}
        members = {f"module.{key}": value for key, value in members.items()}
        positional = [split(value) for value in args]
        named = {key: split(value) for key, value in kwargs.items()}
        named_tensors = {key: value for key, value in named.items() if isinstance(value, Tensor)}
        constants = {key: value for key, value in named.items() if not isinstance(value, Tensor)}

        def one_member(parameters: dict[str, Tensor], by_name: dict[str, Tensor], *values: Any) -> Any:
            return torch.func.functional_call(root, parameters, values, {**by_name, **constants})

        in_dims = (0, 0, *(0 if isinstance(value, Tensor) else None for value in positional))
        out = torch.func.vmap(one_member, in_dims=in_dims)(members, named_tensors, *positional)
        return out.flatten(0, 1).to(population.compute)

    return forward
