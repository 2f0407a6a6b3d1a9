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
from mezzo.engines.torch.forward.population import Population
from mezzo.method.space import lora_names

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
            widened = any(population.value(name).dtype != population.compute for name in own.values())
            always = trained_lora is not None or module is head or widened
            module.forward = _switch(module.forward, grown, population, always)  # type: ignore[method-assign]


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


def _switch(original: Forward, grown: Forward, population: Population, always: bool) -> Forward:
    """`always`: at the unperturbed weights too, where there are LoRA's term, the readout's words, or weights to be widened."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        ours = population.probes if always else population.perturbed
        return grown(*args, **kwargs) if ours else original(*args, **kwargs)

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
        matrix, own_bias = _like(module.weight, x), None if bias or module.bias is None else _like(module.bias, x)
        if is_head and x.dtype != torch.float32:
            y = torch.mm(x.flatten(0, -2), matrix if turned else matrix.T, out_dtype=torch.float32)
            y = y.view(*x.shape[:-1], -1)
            return y if own_bias is None else y.add_(own_bias)
        return F.linear(x, matrix.T if turned else matrix, own_bias)

    def forward(rows: Tensor) -> Tensor:
        x = population.split(rows, path)
        only_words = is_head and population.words is not None
        if only_words:
            y = _word_logits(x, module, weight, bias, population)
        elif weight is None or not population.perturbed:
            y = base(x)
        elif rank:
            y = base(x).add_(_low_rank(x, weight, rank, population, turned))
        else:
            members = _like(_dense(weight, population), x)
            y = _each(x, members.mT if turned else members, wide=is_head)
            y = y if bias or module.bias is None else y.add_(module.bias)
        if bias and not only_words:
            population.ops.add_bias(y, population.member(bias))
        if lora:
            y.add_(_lora_term(x, lora, population, scaling))
        return y.reshape(*rows.shape[:-1], y.shape[-1])

    return forward


def _dense(weight: str, population: Population) -> Tensor:
    return population.member_matrix(weight) if weight in population.large else population.member(weight)


def _like(weight: Tensor, x: Tensor) -> Tensor:
    """A weight in the type of the activations: on a CPU sixteen-bit weights are widened just in time."""
    return weight.to(x.dtype)


def _each(x: Tensor, weights: Tensor, wide: bool = False) -> Tensor:
    """x[P, B, …, in] times weights[P, out, in]ᵀ, member by member; `wide` keeps the float32 sums of sixteen-bit products."""
    flat, turned = x.reshape(x.shape[0], -1, x.shape[-1]), weights.transpose(1, 2)
    if wide and x.dtype != torch.float32:
        y = torch.bmm(flat, turned, out_dtype=torch.float32)
    else:
        y = torch.bmm(flat, turned)
    return y.view(*x.shape[:-1], weights.shape[1])


def _spread(vectors: Tensor, like: Tensor) -> Tensor:
    """[P, n] → [P, 1, …, n], to meet rows of `like`."""
    return vectors.view(vectors.shape[0], *[1] * (like.ndim - 2), vectors.shape[-1])


def _low_rank(x: Tensor, weight: str, rank: int, population: Population, turned: bool) -> Tensor:
    """(x·V)·Uᵀ for all seeds at once; members differ only in the scales between the two products."""
    left, right = population.ops.factors(population.trained[weight], population.point)
    if turned:
        left, right = right, left
    scales = population.factor_scales(rank).repeat_interleave(rank, dim=1)
    inner = x @ right.to(x.dtype)  # ±1 in any type
    return (inner * _spread(scales, inner)).to(x.dtype) @ left.T.to(x.dtype)


def _lora_term(x: Tensor, lora: tuple[str, str], population: Population, scaling: float) -> Tensor:
    """In float32: rounded to bfloat16, a factor would lose an eighth of its perturbation."""
    down, up = (population.member(name) for name in lora)
    return _each(_each(x.float(), down) * scaling, up)


def _word_logits(
    x: Tensor, module: nn.Linear | Conv1D, weight: str | None, bias: str | None, population: Population
) -> Tensor:
    """Logits of the label words only, in float32: the readout never needs the rest of the vocabulary."""
    words = population.words
    assert words is not None
    rows = population.member_rows(weight, words) if weight else module.weight[words].float().expand(len(x), -1, -1)
    y = _each(x.float(), rows)
    if bias:
        return y + _spread(population.member_rows(bias, words), y)
    return y if module.bias is None else y + module.bias[words]


def _embedding(population: Population, weight: str) -> Forward:
    def forward(ids: Tensor) -> Tensor:
        if population.diverged and ids.shape[0] != 1:
            own = ids.view(population.members, population.rows, *ids.shape[1:])
            found = torch.cat([population.member_rows(weight, own[m])[m] for m in range(population.members)])
            return found.to(population.compute)
        # Every member sees the same tokens, so one member's rows are gathered and perturbed P ways.
        shared = ids if ids.shape[0] == 1 else ids[: population.rows]
        rows = population.member_rows(weight, shared).to(population.compute)
        if ids.shape[0] == 1:
            rows = rows.expand(-1, population.rows, *rows.shape[2:])
        return rows.reshape(population.members * population.rows, *rows.shape[2:])

    return forward


def _layer_norm(module: nn.LayerNorm, path: str, population: Population, own: dict[str, str]) -> Forward:
    def forward(rows: Tensor) -> Tensor:
        x = population.split(rows, path)
        y = F.layer_norm(x.float(), module.normalized_shape, None, None, module.eps)
        gain = _spread(population.member(own["weight"]), y) if "weight" in own else module.weight
        shift = _spread(population.member(own["bias"]), y) if "bias" in own else module.bias
        if gain is not None and shift is not None:
            y = torch.addcmul(shift.float(), y, gain.float())
        elif gain is not None:
            y = y.mul_(gain)
        return y.to(rows.dtype).reshape(rows.shape)

    return forward


def _any(module: nn.Module, path: str, population: Population, own: dict[str, str]) -> Forward:
    """Any other leaf: the original forward, mapped over the members' parameters."""
    original = module.forward

    def one(parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        # `functional_call` would run the overriding forward; swap it out for the original.
        with _forward_set(module, original):
            return torch.func.functional_call(module, parameters, args, kwargs)

    def split_of(value: Any) -> Any:
        """A tensor by members; numbers in float32, as the small tensors they meet are."""
        if not isinstance(value, Tensor):
            return value
        parts = population.split(value, path)
        return parts.float() if parts.is_floating_point() and not holds_matrix else parts

    holds_matrix = any(name in population.large for name in own.values())

    def forward(*args: Any, **kwargs: Any) -> Any:
        members = {key: _dense(name, population) for key, name in own.items()}
        if holds_matrix:
            members = {key: value.to(population.compute) for key, value in members.items()}
        else:
            members |= {k: p.float().expand(population.members, *p.shape) for k, p in frozen().items()}
        split = [split_of(a) for a in args]
        named = {k: split_of(v) for k, v in kwargs.items()}
        in_dims = tuple(0 if isinstance(a, Tensor) else None for a in split)
        mapped = torch.func.vmap(
            lambda parameters, tensors, *values: one(
                parameters, *values, **tensors, **{k: v for k, v in named.items() if not isinstance(v, Tensor)}
            ),
            in_dims=(0, 0, *in_dims),
        )
        out = mapped(members, {k: v for k, v in named.items() if isinstance(v, Tensor)}, *split)
        return out.flatten(0, 1).to(population.compute)

    def frozen() -> dict[str, Tensor]:
        """The module's other tensors where they are of sixteen bits."""
        if population.compute == torch.float32:
            return {}
        return {key: p for key, p in module.named_parameters(recurse=False) if key not in own}

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
