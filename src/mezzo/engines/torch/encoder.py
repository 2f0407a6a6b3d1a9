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

from mezzo.engines.torch import encoder_kernels, thin, vectors
from mezzo.engines.torch.catalog import canonical_names
from mezzo.engines.torch.encoder_kernels import Term
from mezzo.engines.torch.fused import WHOLE
from mezzo.engines.torch.last_layer import ENCODERS, last_of
from mezzo.engines.torch.on_device import OnDevice
from mezzo.engines.torch.population import Population
from mezzo.engines.torch.thin_layers import adapter_of
from mezzo.space import lora_names


def attach(model: nn.Module, population: Population, scaling: float, aside: Sequence[nn.Module] = ()) -> None:
    """Override the forward of every layer that can be computed this way, but for those that step aside."""
    config: Any = model.config
    if getattr(config, "_attn_implementation", "") != "sdpa" or getattr(config, "is_decoder", False):
        return
    names = canonical_names(model)
    before: Layer | None = None
    for path, module in model.named_modules():
        if type(module).__name__ not in ENCODERS:
            continue
        trimmed = module is last_of(model)
        own = None if module in aside or trimmed else Layer.of(module, path, population, names, scaling)
        if before is not None:
            before.after = own
        before = own


class Product:
    """Linear layers that read one input, as one product without bias. All are trained densely, or none is."""

    def __init__(self, modules: Sequence[nn.Linear], paths: Sequence[str], population: Population,
                 names: dict[int, str], scaling: float) -> None:  # fmt: skip
        self.population = population
        self.names = [names[id(module.weight)] for module in modules]
        self.biases = [(module.bias, names[id(module.bias)]) for module in modules]
        self.dense = all(self._is_dense(name) for name in self.names)
        self.weight = self._together(modules)
        assert isinstance(population.work, OnDevice)
        adapters = [
            None if self.dense else adapter_of(module, path, population, population.work, names, scaling)
            for module, path in zip(modules, paths, strict=True)
        ]
        found = [pair for pair in adapters if pair is not None]
        self.factors = found[0][1].factors([adapter for adapter, _ in found]) if found else None
        numbers = iter(range(len(found)))
        self.places = tuple(-1 if pair is None else next(numbers) for pair in adapters)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, outputs of all layers side by side]"""
        if not (self.dense and self.population.perturbed):
            return torch.mm(x, self.weight.T)
        members = self.population.joint_matrix(self.names, self.weight)
        found = torch.bmm(x.view(len(members), -1, x.shape[1]), members.mT)
        return found.view(len(x), -1)

    def bias(self, number: int = 0) -> Tensor:
        """[P, n] of one of the layers."""
        return _vectors(*self.biases[number], self.population)

    def down(self, x: Tensor) -> Tensor | None:
        """The thin products of x, where this product has thin factors and members differ in them."""
        return None if self.then is None else thin.down(x, self.then, self.population.point.scales)

    @property
    def then(self) -> thin.Factors | None:
        """The factors whose products are wanted."""
        return self.factors if self.population.perturbed else None

    def term(self, t: Tensor | None) -> Term | None:
        return None if t is None or self.factors is None else Term(t, self.factors, self.places)

    def _is_dense(self, name: str) -> bool:
        return name in self.population.large and not self.population.trained[name].rank

    def _together(self, modules: Sequence[nn.Linear]) -> Tensor:
        """The weights below each other in one tensor, of which the model's own are views from now on."""
        if len(modules) == 1:
            return modules[0].weight.detach()
        joint = torch.cat([module.weight.detach() for module in modules])
        for module, name, part in zip(modules, self.names, joint.chunk(len(modules)), strict=True):
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
        self.lora = any(product.factors is not None and len(product.factors.parts) > 1 for product in products)
        self.after: Layer | None = None
        self._given: tuple[Tensor, Tensor | None] | None = None

    @classmethod
    def of(cls, layer: Any, path: str, population: Population, names: dict[int, str], scaling: float) -> Layer | None:
        """The layer with its forward overridden; None where it cannot be."""
        if not _known(layer, path, population, names, scaling):
            return None
        found, plain = cls(layer, path, population, names, scaling), layer.forward

        def forward(hidden: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
            if found.usable(hidden, attention_mask):
                return found.forward(hidden, attention_mask)
            return plain(hidden, attention_mask, *args, **kwargs)

        layer.forward = forward
        return found

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
            and hidden.shape[1] <= encoder_kernels.LONGEST
            and (mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1))
        )

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        x = hidden.view(-1, hidden.shape[-1])
        given, self._given = self._given, None
        t = given[1] if given is not None and given[0] is hidden else self.first.down(x)
        members, term = self.population.members, self.first.term(t)
        biases = self.first.bias(0), self.first.bias(1), self.first.bias(2)
        seen = encoder_kernels.attend(
            self.first(x), biases, hidden.shape[1], self.heads, self.scaling, members, term, mask
        )
        x, t = self._normed(self.out(seen), x, self.out, self.out.down(seen), 0, self.wide)
        wide = self.wide(x)
        t = self._activated(wide, t)
        after = self.after.first if self.after else None
        x, t = self._normed(self.narrow(wide), x, self.narrow, t, 1, after)
        found = x.view(hidden.shape)
        if self.after:
            self.after._given = found, t
        return found

    def _normed(
        self, y: Tensor, residual: Tensor, of: Product, t: Tensor | None, number: int, after: Product | None
    ) -> tuple[Tensor, Tensor | None]:
        """The norm behind the product `of`, and the thin products of its outcome for the product `after`."""
        norm, members = self.norms[number], self.population.members
        gain, shift = (_vectors(p, self.names[id(p)], self.population) for p in (norm.weight, norm.bias))
        term, then = of.term(t), after.then if after else None
        if (term is None and then is None) or y.shape[1] > encoder_kernels.WIDEST:
            return vectors.norm(y, gain, shift, norm.eps, residual, of.bias()), None
        return encoder_kernels.norm(
            y, residual, of.bias(), gain, shift, norm.eps, members, term, then, self.population.point.scales
        )

    def _activated(self, y: Tensor, t: Tensor | None) -> Tensor | None:
        """GELU in place, and the thin products of its outcome."""
        term, then = self.wide.term(t), self.narrow.then
        if term is None and then is None:
            vectors.add_bias(y, self.wide.bias(), gelu=True)
            return None
        return encoder_kernels.gelu(
            y, self.wide.bias(), self.population.members, term, then, self.population.point.scales
        )


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
    work = population.work
    assert isinstance(work, OnDevice)
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
        and norms[0].weight.shape[0] <= encoder_kernels.WIDEST
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
        if not own or (len(group) > 1 and group[0].weight.numel() % WHOLE):
            return False
    return (
        len(biases) == 1
        and (all(dense) or not any(dense))
        and all(one.weight.dtype == population.compute and one.weight.shape == group[0].weight.shape for one in group)
    )
