"""Whole layers of BERT-like encoders in few kernels: query, key and value by one product, and one kernel between products.

At the unperturbed weights and along one direction, whatever is trained. A layer that this file does not know, or one whose
tensors are trained in a mixture it does not know, keeps its own code with what `layers`, `thin_layers` and `blocks` override.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

from mezzo.engines.torch.catalog import canonical_names, known
from mezzo.engines.torch.forward.last_layer import ENCODERS, last_of
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.gpu.fused_ops import STACK_ALIGN
from mezzo.engines.torch.gpu.graph_ops import GraphOps
from mezzo.engines.torch.gpu.kernels import encoder, lowrank, norms
from mezzo.engines.torch.gpu.lowrank_layers import adapter_of
from mezzo.method.space import lora_names

LINES = 16
"""Lines below weights come in so many, so that rows of a product begin where kernels read whole vectors."""


def attach(model: nn.Module, population: Population, scaling: float, aside: Sequence[nn.Module] = ()) -> None:
    """Override the forward of every layer that can be computed this way, but for those that step aside."""
    config: Any = model.config
    if getattr(config, "_attn_implementation", "") != "sdpa" or getattr(config, "is_decoder", False):
        return
    names, trimmed = canonical_names(model), last_of(model)
    for path, module in model.named_modules():
        if known(module, ENCODERS) and module is not trimmed and module not in aside:
            Layer.override(module, path, population, names, scaling)


class Product:
    """Linear layers that read one input, as one product without bias. All are trained densely, or none is.

    Factors V of low-rank noise lie below the weights, so that the product's last columns are x·V.
    """

    def __init__(self, modules: Sequence[nn.Linear], paths: Sequence[str], population: Population,
                 names: dict[int, str], scaling: float) -> None:  # fmt: skip
        self.population = population
        self.names = [names[id(module.weight)] for module in modules]
        self.biases = [(module.bias, names[id(module.bias)]) for module in modules]
        self.dense = all(self._is_dense(name) for name in self.names)
        work = population.ops
        assert isinstance(work, GraphOps)
        adapters = [
            None if self.dense else adapter_of(module, path, population, work, names, scaling)
            for module, path in zip(modules, paths, strict=True)
        ]
        found = [pair for pair in adapters if pair is not None]
        self.factors = found[0][1].factors([adapter for adapter, _ in found]) if found else None
        numbers = iter(range(len(found)))
        self.places = tuple(-1 if pair is None else next(numbers) for pair in adapters)
        few = (
            self.factors is not None and len(self.factors.components) == 1 and self.factors.rank <= norms.MAX_TERM_RANK
        )
        self.below = len(found) * self.factors.rank if few and self.factors else 0
        """Lines below the weights that hold factors."""
        self.all = self._together(modules)
        self.weight = self.all[: sum(module.out_features for module in modules)]
        if self.below:
            shape = (len(found), -1, modules[0].out_features)
            self.up = self.weight.new_zeros(self.below * modules[0].out_features).view(shape)
            lines = self.all[len(self.weight) :][: self.below].chunk(len(found))
            for (adapter, _), down, up in zip(found, lines, self.up, strict=True):
                work.keep_transposed(adapter.down, down)
                work.keep_transposed(adapter.up, up)

    def __call__(self, x: Tensor) -> tuple[Tensor, lowrank.LowRankTerm | None]:
        """[rows, outputs of all layers side by side], and their thin term, which is still to be added."""
        population = self.population
        if self.dense and population.perturbed:
            members = population.joint_matrix(self.names, self.weight)
            return torch.bmm(x.view(len(members), -1, x.shape[1]), members.mT).view(len(x), -1), None
        if self.factors is None or not population.perturbed:
            return torch.mm(x, self.weight.T), None
        if self.below:
            return self._with_beside(x, self.factors)
        return torch.mm(x, self.weight.T), self._term(x, self.factors)

    def alone(self, x: Tensor) -> tuple[Tensor, lowrank.LowRankTerm | None]:
        """The same of one layer for those who add low-rank noise only: LoRA's term is in the product already."""
        if self.factors is None or not self.population.perturbed:
            return self(x)[0], None
        if self.below:
            return self._with_beside(x, self.factors)
        y = torch.empty((len(x), len(self.weight)), device=x.device, dtype=x.dtype)
        lowrank.project_up(y[None], self._term(x, self.factors), None)
        return y.addmm_(x, self.weight.T), None

    def _with_beside(self, x: Tensor, factors: lowrank.Factors) -> tuple[Tensor, lowrank.LowRankTerm]:
        y, width = torch.mm(x, self.all.T), len(self.weight)
        t = y[None, :, width : width + self.below]
        return y[:, :width], lowrank.LowRankTerm(t, factors, self.population.point.scales, self.places, self.up)

    def _term(self, x: Tensor, factors: lowrank.Factors) -> lowrank.LowRankTerm:
        scales = self.population.point.scales
        return lowrank.LowRankTerm(lowrank.project_down(x, factors, scales), factors, scales, self.places)

    def bias(self, number: int = 0) -> Tensor:
        """[P, n] of one of the layers."""
        return _vectors(*self.biases[number], self.population)

    def _is_dense(self, name: str) -> bool:
        return name in self.population.large and not self.population.trained[name].rank

    def _together(self, modules: Sequence[nn.Linear]) -> Tensor:
        """The weights below each other in one tensor, of which the model's own are views from now on, and room below them."""
        if len(modules) == 1 and not self.below:
            return modules[0].weight.detach()
        held = [module.weight.detach() for module in modules]
        room = -(-self.below // LINES) * LINES
        joint = torch.cat([*held, held[0].new_zeros((room, held[0].shape[1]))])
        parts = torch.split(joint, [*(len(one) for one in held), room])
        for module, name, part in zip(modules, self.names, parts[:-1], strict=True):
            module.weight.data = part
            if name in self.population.large:
                self.population.large[name] = part
        return joint


class Layer:
    """One layer: attention, residual and norm, the two products of the block and GELU between them, residual and norm."""

    def __init__(self, layer: Any, path: str, population: Population, names: dict[int, str], scaling: float) -> None:
        self.population, self.names = population, names
        attention = layer.attention.self
        self.heads, self.scaling = attention.num_attention_heads, attention.scaling
        products = [
            Product(
                [_at(layer, name) for name in group], [f"{path}.{name}" for name in group], population, names, scaling
            )
            for group in PRODUCTS
        ]
        self.first, self.out, self.wide, self.narrow = products
        self.norms = (layer.attention.output.LayerNorm, layer.output.LayerNorm)
        self.lora = any(product.factors is not None and len(product.factors.components) > 1 for product in products)

    @classmethod
    def override(cls, layer: Any, path: str, population: Population, names: dict[int, str], scaling: float) -> None:
        """Take over a layer's forward, if all that is in it is known."""
        if not _known(layer, path, population, names, scaling):
            return
        found, plain = cls(layer, path, population, names, scaling), layer.forward

        def forward(hidden: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
            if found.usable(hidden, attention_mask):
                return found.forward(hidden, attention_mask)
            return plain(hidden, attention_mask, *args, **kwargs)

        layer.forward = forward

    def usable(self, hidden: Tensor, mask: Tensor | None) -> bool:
        population = self.population
        return (
            bool(population.probes)
            and (
                population.point.single or not (population.perturbed or self.lora)
            )  # LoRA's term is there at any point
            and not population.diverged
            and hidden.is_contiguous()
            and hidden.dtype == population.compute
            and hidden.shape[0] == population.members * population.rows
            and hidden.shape[1] <= encoder.MAX_TOKENS[hidden.dtype]
            and (mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1))
        )

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        x = hidden.view(-1, hidden.shape[-1])
        biases, members = (self.first.bias(0), self.first.bias(1), self.first.bias(2)), self.population.members
        y, term = self.first(x)
        seen = encoder.attend(y, biases, hidden.shape[1], self.heads, self.scaling, members, term, mask)
        x = self._normed(self.out, seen, x, self.norms[0])
        wide, term = self.wide(x)
        if term is None:
            norms.add_bias(wide, self.wide.bias(), gelu=True)
        else:
            encoder.gelu(wide, self.wide.bias(), members, term)
        return self._normed(self.narrow, wide, x, self.norms[1]).view(hidden.shape)

    def _normed(self, product: Product, x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> Tensor:
        gain, shift = (_vectors(p, self.names[id(p)], self.population) for p in (norm.weight, norm.bias))
        y, term = product.alone(x)
        return norms.norm(y, gain, shift, norm.eps, residual, product.bias(), term=term)


PRODUCTS = (
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    ("attention.output.dense",),
    ("intermediate.dense",),
    ("output.dense",),
)


def _vectors(parameter: nn.Parameter, name: str, population: Population) -> Tensor:
    """[P, n]: the members' own, or one vector seen P times."""
    if population.perturbed and name in population.trained:
        return population.member(name)
    return parameter.detach().expand(population.members, -1)


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _known(layer: Any, path: str, population: Population, names: dict[int, str], scaling: float) -> bool:
    """True for a layer all of whose parts are what this file computes."""
    work = population.ops
    assert isinstance(work, GraphOps)
    for name in (name for group in PRODUCTS for name in group):
        module, trained = _at(layer, name), population.trained
        here = f"{path}.{name}"
        is_thin = any(one in trained for one in lora_names(f"{here}.weight")) or (
            (own := trained.get(names.get(id(module.weight), ""))) is not None and own.rank > 0
        )
        if is_thin and adapter_of(module, here, population, work, names, scaling) is None:
            return False
    linears = [[_at(layer, name) for name in group] for group in PRODUCTS]
    norms = (layer.attention.output.LayerNorm, layer.output.LayerNorm)
    return (
        not getattr(layer, "add_cross_attention", False)
        and type(layer.intermediate.intermediate_act_fn) is GELUActivation
        and all(type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None for norm in norms)
        and all(_alike(group, population, names) for group in linears)
    )


def _alike(group: Sequence[Any], population: Population, names: dict[int, str]) -> bool:
    """True where all weights are dense and large, or none is; and all biases are trained, or none is."""
    if not all(type(one) is nn.Linear and one.bias is not None for one in group):
        return False
    weights = [names[id(one.weight)] for one in group]
    biases = {names[id(one.bias)] in population.trained for one in group}
    dense = [name in population.trained and not population.trained[name].rank for name in weights]
    if all(dense):
        own = all(name in population.large for name in weights)
        if not own or (len(group) > 1 and group[0].weight.numel() % STACK_ALIGN):
            return False
    return (
        len(biases) == 1
        and (all(dense) or not any(dense))
        and all(one.weight.dtype == population.compute and one.weight.shape == group[0].weight.shape for one in group)
    )
