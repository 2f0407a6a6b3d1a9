"""LoRA and low-rank noise in kernels: the linear layers that read the same input share one pass over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engines.architectures import OUTPUT_LINEARS
from mezzo.engines.torch.forward.choice import Choice
from mezzo.engines.torch.forward.modules import Forward
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.forward.trained_modules import TrainedModules
from mezzo.engines.torch.gpu.graph_ops import GraphOps
from mezzo.engines.torch.gpu.kernels import lowrank

NAME = "low-rank kernels"
MAX_RANK = 32


@dataclass(frozen=True, eq=False)
class LowRankLinear:
    """A linear layer, its two factors, and the name of its bias if that is trained."""

    module: nn.Linear
    path: str
    bias: str | None
    rank: int
    scaling: float
    components: Tensor
    """The buffer in which the factors begin at `down` and `up`."""
    down: int
    up: int


def join_factors(layers: Sequence[LowRankLinear]) -> lowrank.Factors:
    """The factors of layers that share a buffer."""
    first, down = layers[0], tuple(layer.down for layer in layers)
    up = torch.tensor([layer.up for layer in layers], device=first.components.device)
    return lowrank.Factors(first.rank, first.scaling, first.components, down, up)


def find_factors(path: str, module: nn.Module, modules: TrainedModules) -> LowRankLinear | str | None:
    """A module with LoRA or low-rank noise as the kernels see it, or why they do not take it; None: it has neither."""
    trained, population, ops = modules.find(path, module), modules.population, modules.population.ops
    assert isinstance(ops, GraphOps)
    weight = trained.tensors.get("weight") if trained else None
    rank = population.trained[weight].rank if weight else 0
    if trained is None or not (trained.lora or rank):
        return None
    if trained.is_head:
        return "it is the LM head"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}"
    if trained.lora:
        down, up = trained.lora
        if down not in population.trained or up not in population.trained:
            return "only one of LoRA's factors is trained"
        tables = ((flat, {e.trained.name: e.start for e in flat.entries}) for flat in population.flat_buffers)
        buffer = next(((flat, starts) for flat, starts in tables if down in starts and up in starts), None)
        if buffer is None:
            return "its factors are stored in different types"
        rank, scaling = population.trained[down].shape[0], trained.scaling
        components, offsets = ops.lora_components(buffer[0]), buffer[1]
    else:
        down, up, scaling = f"{weight}/V", f"{weight}/U", rank**-0.5
        components, offsets = ops.factor_noise[None], ops.factor_offsets
    if rank > MAX_RANK or rank & (rank - 1):
        return f"rank {rank} is not a power of two up to {MAX_RANK}"
    bias = trained.tensors.get("bias")
    return LowRankLinear(module, path, bias, rank, scaling, components, offsets[down], offsets[up])


def choose(parent_path: str, parent: nn.Module, modules: TrainedModules) -> Iterator[tuple[nn.Module, Choice]]:
    """Group the linear layers of one parent that have factors."""
    groups: dict[tuple[object, ...], list[LowRankLinear]] = {}
    for name, module in parent.named_children():
        layer = find_factors(f"{parent_path}.{name}" if parent_path else name, module, modules)
        if isinstance(layer, str):
            yield module, Choice(NAME, reason=layer)
        elif layer is not None:
            linear, has_trained_bias = layer.module, layer.bias is not None
            key = linear.in_features, layer.rank, len(layer.components), linear.bias is not None, has_trained_bias
            groups.setdefault((name in OUTPUT_LINEARS, *key), []).append(layer)
    for layers in groups.values():
        group = LowRankGroup(tuple(layers), modules.population)
        for index, layer in enumerate(layers):
            yield layer.module, Choice(NAME, partial(group.forward_of, index))


class LowRankGroup:
    """Layers of one parent: the first that runs computes all that follow it, which will read the same input."""

    def __init__(self, layers: tuple[LowRankLinear, ...], population: Population) -> None:
        self.layers, self.population = layers, population
        self.factors = [join_factors(layers[first:]) for first in range(len(layers))]
        self.spans = [list(_equal_widths(layers, first)) for first in range(len(layers))]
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def forward_of(self, index: int, inner: Forward) -> Forward:
        """The forward of one of the layers, along one direction; `inner` at any other point."""
        population = self.population

        def forward(rows: Tensor) -> Any:
            usable = population.point.single and not population.context.own_tokens and rows.is_contiguous()
            return self.output(index, rows) if usable else inner(rows)

        return forward

    def output(self, index: int, rows: Tensor) -> Tensor:
        if self._input is not rows or index not in self._outputs:
            self._outputs = self._compute(index, rows)
        self._input = rows
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output

    def _compute(self, first: int, rows: Tensor) -> dict[int, Tensor]:
        """The outputs of the layers from `first` on."""
        population = self.population
        population.split(rows, self.layers[first].path)  # raises if these are not the members' rows
        x = rows.view(-1, rows.shape[-1])
        scales, rank = population.point.scales, self.factors[first].rank
        t = lowrank.project_down(x, self.factors[first], scales)
        outputs: dict[int, Tensor] = {}
        for span in self.spans[first]:
            width = span.layers[0].module.out_features
            y = x.new_empty((len(span.layers), len(x), width))
            columns = t[..., (span.start - first) * rank :]
            lowrank.project_up(y, lowrank.LowRankTerm(columns, span.factors, scales), span.bias)
            for place, layer in enumerate(span.layers):
                y[place].addmm_(x, layer.module.weight.T)
                if layer.bias is not None:
                    members = population.member_tensor(layer.bias)
                    population.ops.add_bias(y[place].view(len(members), -1, width), members)
                outputs[span.start + place] = y[place].view(*rows.shape[:-1], -1)
        return outputs


@dataclass(frozen=True)
class Span:
    """Layers with equally many outputs: their low-rank products are one launch. `bias` holds those that are not trained."""

    start: int
    layers: list[LowRankLinear]
    factors: lowrank.Factors
    bias: Tensor | None


def _equal_widths(layers: tuple[LowRankLinear, ...], first: int) -> Iterator[Span]:
    for _, group in groupby(layers[first:], key=lambda layer: layer.module.out_features):
        span = list(group)
        frozen = [layer.module.bias.detach() for layer in span if layer.module.bias is not None and layer.bias is None]
        yield Span(first, span, join_factors(span), torch.stack(frozen) if frozen else None)
        first += len(span)
