"""LoRA and low-rank noise in kernels: the linear layers that read the same input share one pass over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engines.architectures import OUTPUT_LINEARS
from mezzo.engines.torch.forward.choice import Choice
from mezzo.engines.torch.forward.modules import Forward
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.forward.trained_modules import TrainedModule, TrainedModules
from mezzo.engines.torch.gpu.graph_ops import GraphOps
from mezzo.engines.torch.gpu.kernels import lowrank

NAME = "low-rank kernels"
MAX_RANK = 32


@dataclass(frozen=True)
class FactorBuffer:
    """Where the factors of layers lie, and how these are scaled."""

    rank: int
    scaling: float
    components: Tensor
    """As `lowrank.Factors` has them."""

    def factors(self, layers: Sequence[LowRankLinear]) -> lowrank.Factors:
        down_offsets = tuple(layer.down for layer in layers)
        up_offsets = torch.tensor([layer.up for layer in layers], device=self.components.device)
        return lowrank.Factors(self.rank, self.scaling, self.components, down_offsets, up_offsets)


@dataclass(frozen=True)
class LowRankLinear:
    """A linear layer, where its two factors begin in their buffer, and the name of its bias if that is trained."""

    module: nn.Linear
    path: str
    down: int
    up: int
    bias: str | None
    buffer: FactorBuffer


def has_factors(trained: TrainedModule | None, population: Population) -> bool:
    """True for a module with LoRA or low-rank noise."""
    weight = trained.tensors.get("weight") if trained else None
    return trained is not None and (trained.lora is not None or bool(weight and population.trained[weight].rank))


def find_factors(module: nn.Module, trained: TrainedModule, modules: TrainedModules) -> LowRankLinear | str:
    """A module that has factors as the kernels see it, or why they do not take it."""
    population, ops = modules.population, modules.population.ops
    assert isinstance(ops, GraphOps)
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}"
    bias = trained.tensors.get("bias")
    if trained.lora is None:
        weight = trained.tensors["weight"]
        rank = population.trained[weight].rank
        buffer = FactorBuffer(rank, rank**-0.5, ops.factor_noise[None])
        starts = ops.factor_offsets[f"{weight}/V"], ops.factor_offsets[f"{weight}/U"]
        return _rank_refusal(rank) or LowRankLinear(module, trained.path, *starts, bias, buffer)
    if not all(name in population.trained for name in trained.lora):
        return "only one of LoRA's factors is trained"
    rank = population.trained[trained.lora[0]].shape[0]
    for flat in population.flat_buffers:
        start = {entry.trained.name: entry.start for entry in flat.entries}
        if all(name in start for name in trained.lora):
            buffer = FactorBuffer(rank, trained.scaling, ops.lora_components(flat))
            down, up = (start[name] for name in trained.lora)
            return _rank_refusal(rank) or LowRankLinear(module, trained.path, down, up, bias, buffer)
    return "its factors are stored in different types"


def _rank_refusal(rank: int) -> str:
    fits = rank <= MAX_RANK and rank & (rank - 1) == 0
    return "" if fits else f"rank {rank} is not a power of two up to {MAX_RANK}"


def choose(parent_path: str, parent: nn.Module, modules: TrainedModules) -> Iterator[tuple[nn.Module, Choice]]:
    """Group the linear layers of one parent that have factors."""
    groups: dict[tuple[object, ...], list[LowRankLinear]] = {}
    for name, module in parent.named_children():
        path = f"{parent_path}.{name}" if parent_path else name
        trained = modules.find(path, module)
        if trained is None or not has_factors(trained, modules.population):
            continue
        layer = "it is the LM head" if trained.is_head else find_factors(module, trained, modules)
        if isinstance(layer, str):
            yield module, Choice(NAME, reason=layer)
            continue
        key: tuple[object, ...] = (
            layer.module.in_features,
            layer.buffer.rank,
            len(layer.buffer.components),
            name in OUTPUT_LINEARS,
            layer.module.bias is not None,
            layer.bias is not None,
        )
        groups.setdefault(key, []).append(layer)
    for layers in groups.values():
        group = LowRankGroup(tuple(layers), modules.population)
        for index, layer in enumerate(layers):
            yield layer.module, Choice(NAME, partial(group.forward_of, index))


class LowRankGroup:
    """Layers of one parent: the first that runs computes all that follow it, which will read the same input."""

    def __init__(self, layers: tuple[LowRankLinear, ...], population: Population) -> None:
        self.layers, self.population = layers, population
        buffer = layers[0].buffer
        self.spans = {first: _equal_widths(layers, first) for first in range(len(layers))}
        self.factors = {first: buffer.factors(layers[first:]) for first in range(len(layers))}
        self.span_factors = {
            (span.start, span.stop): buffer.factors(layers[span.start : span.stop])
            for spans in self.spans.values()
            for span in spans
        }
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
            y = x.new_empty((span.stop - span.start, len(x), span.width))
            columns = t[..., (span.start - first) * rank : (span.stop - first) * rank]
            lowrank.project_up(
                y, lowrank.LowRankTerm(columns, self.span_factors[span.start, span.stop], scales), span.bias
            )
            for place, layer in enumerate(self.layers[span.start : span.stop]):
                y[place].addmm_(x, layer.module.weight.T)
                if layer.bias is not None:
                    members = population.member_tensor(layer.bias)
                    population.ops.add_bias(y[place].view(len(members), -1, span.width), members)
                outputs[span.start + place] = y[place].view(*rows.shape[:-1], -1)
        return outputs


@dataclass(frozen=True)
class Span:
    """Layers with equally many outputs: their low-rank products are one launch. `bias` holds those that are not trained."""

    start: int
    stop: int
    width: int
    bias: Tensor | None


def _equal_widths(layers: tuple[LowRankLinear, ...], first: int) -> list[Span]:
    cuts = [first]
    for index in range(first + 1, len(layers)):
        if layers[index].module.out_features != layers[index - 1].module.out_features:
            cuts.append(index)
    spans = []
    for start, stop in zip(cuts, [*cuts[1:], len(layers)], strict=True):
        linears = [layer.module for layer in layers[start:stop]]
        has_frozen_bias = linears[0].bias is not None and layers[start].bias is None  # as for the whole group
        bias = torch.stack([linear.bias.detach() for linear in linears]) if has_frozen_bias else None
        spans.append(Span(start, stop, linears[0].out_features, bias))
    return spans
