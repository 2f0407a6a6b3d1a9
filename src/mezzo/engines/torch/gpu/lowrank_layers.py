"""LoRA and low-rank noise in kernels: the linear layers that read the same input share one pass over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engines.torch.catalog import canonical_names
from mezzo.engines.torch.forward.modules import output_head
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.gpu.graph_ops import GraphOps
from mezzo.engines.torch.gpu.kernels import lowrank
from mezzo.method.space import lora_names


@dataclass(frozen=True)
class Adapter:
    """A linear layer, where its two thin factors begin in their buffer, and the name of its bias if that is trained."""

    module: nn.Linear
    path: str
    down: int
    up: int
    bias: str | None


@dataclass(frozen=True)
class Kind:
    """What the layers of a group have in common: where their factors lie and how these are scaled."""

    rank: int
    factor: float
    parts: Tensor

    def factors(self, adapters: Sequence[Adapter]) -> lowrank.Factors:
        up_at = torch.tensor([adapter.up for adapter in adapters], device=self.parts.device)
        return lowrank.Factors(self.rank, self.factor, self.parts, tuple(a.down for a in adapters), up_at)


LATER = ("o_proj", "out_proj", "down_proj", "fc2", "dense", "dense_4h_to_h")
"""Layers that read what their neighbours have made, even where it is as wide as what those read."""


def attach(model: nn.Module, population: Population, scaling: float) -> None:
    """Group the linear layers of each parent that carry thin factors and override their forward."""
    work = population.ops
    assert isinstance(work, GraphOps)
    names, head = canonical_names(model), output_head(model)
    for parent_path, parent in model.named_modules():
        groups: dict[tuple[object, ...], list[Adapter]] = {}
        kinds: dict[tuple[object, ...], Kind] = {}
        for own_name, module in parent.named_children():
            path = f"{parent_path}.{own_name}" if parent_path else own_name
            found = adapter_of(module, path, population, work, names, scaling)
            if found is not None and module is not head:
                adapter, kind = found
                bias = adapter.module.bias is not None, adapter.bias is not None  # there, and trained
                key: tuple[object, ...] = (
                    adapter.module.in_features,
                    kind.rank,
                    len(kind.parts),
                    own_name in LATER,
                    *bias,
                )
                groups.setdefault(key, []).append(adapter)
                kinds[key] = kind
        for key, adapters in groups.items():
            _override(Group(tuple(adapters), kinds[key], population), adapters, population)


def adapter_of(
    module: nn.Module, path: str, population: Population, work: GraphOps, names: dict[int, str], scaling: float
) -> tuple[Adapter, Kind] | None:
    """A linear layer with thin factors that the kernels take; None where it has none, or others."""
    if type(module) is not nn.Linear or "forward" not in vars(module):
        return None  # a transposed layer, or one that has nothing to add
    found = None if module.bias is None else names[id(module.bias)]
    bias = found if found in population.trained else None
    down, up = lora_names(f"{path}.weight")
    if down in population.trained and up in population.trained:
        rank = population.trained[down].shape[0]
        for flat in population.flat_buffers:
            at = {entry.trained.name: entry.start for entry in flat.entries}
            if down in at and up in at and _fits(rank):
                return Adapter(module, path, at[down], at[up], bias), Kind(rank, scaling, work.lora_components(flat))
        return None
    weight = names[id(module.weight)]
    trained = population.trained.get(weight)
    if trained is None or not trained.rank or not _fits(trained.rank):
        return None
    places = work.factor_offsets[f"{weight}/V"], work.factor_offsets[f"{weight}/U"]
    return Adapter(module, path, *places, bias), Kind(trained.rank, trained.rank**-0.5, work.factor_noise[None])


def _fits(rank: int) -> bool:
    """Ranks that the kernels take; others are left to plain torch."""
    return rank <= 32 and rank & (rank - 1) == 0


def _override(group: Group, adapters: list[Adapter], population: Population) -> None:
    for index, adapter in enumerate(adapters):
        plain = adapter.module.forward

        def forward(rows: Tensor, index: int = index, plain: Callable[..., Any] = plain) -> Tensor:
            usable = population.point.single and not population.diverged and rows.is_contiguous()
            return group.output(index, rows) if usable else plain(rows)

        adapter.module.forward = forward  # type: ignore[method-assign,assignment]


class Group:
    """Layers of one parent: the first that is asked computes all that follow it, for whom the same input will come."""

    def __init__(self, adapters: tuple[Adapter, ...], kind: Kind, population: Population) -> None:
        self.adapters, self.population = adapters, population
        self.runs = {first: _same_width(adapters, first) for first in range(len(adapters))}
        self.factors = {first: kind.factors(adapters[first:]) for first in range(len(adapters))}
        self.of_run = {
            (run.start, run.stop): kind.factors(adapters[run.start : run.stop])
            for runs in self.runs.values()
            for run in runs
        }
        self._of: Tensor | None = None
        self._ready: dict[int, Tensor] = {}

    def output(self, index: int, rows: Tensor) -> Tensor:
        if self._of is not rows or index not in self._ready:
            self._ready = self._computed(index, rows)
        self._of = rows
        found = self._ready.pop(index)
        if not self._ready:
            self._of = None
        return found

    def _computed(self, first: int, rows: Tensor) -> dict[int, Tensor]:
        population = self.population
        population.split(rows, self.adapters[first].path)  # says so if the rows are not the members' own
        x = rows.view(-1, rows.shape[-1])
        scales, rank = population.point.scales, self.factors[first].rank
        t = lowrank.project_down(x, self.factors[first], scales)
        found: dict[int, Tensor] = {}
        for run in self.runs[first]:
            y = x.new_empty((run.stop - run.start, len(x), run.width))
            own = t[..., (run.start - first) * rank : (run.stop - first) * rank]
            lowrank.project_up(y, lowrank.LowRankTerm(own, self.of_run[run.start, run.stop], scales), run.bias)
            for place, adapter in enumerate(self.adapters[run.start : run.stop]):
                y[place].addmm_(x, adapter.module.weight.T)
                if adapter.bias is not None:
                    members = population.member(adapter.bias)
                    population.ops.add_bias(y[place].view(len(members), -1, run.width), members)
                found[run.start + place] = y[place].view(*rows.shape[:-1], -1)
        return found


@dataclass(frozen=True)
class Run:
    """Layers with equally many outputs: their thin products are one launch. `bias` holds those that are not trained."""

    start: int
    stop: int
    width: int
    bias: Tensor | None


def _same_width(adapters: tuple[Adapter, ...], first: int) -> list[Run]:
    cuts = [first]
    for index in range(first + 1, len(adapters)):
        if adapters[index].module.out_features != adapters[index - 1].module.out_features:
            cuts.append(index)
    runs = []
    for start, stop in zip(cuts, [*cuts[1:], len(adapters)], strict=True):
        modules = [a.module for a in adapters[start:stop]]
        frozen = modules[0].bias is not None and adapters[start].bias is None  # as for all of the group
        bias = torch.stack([m.bias.detach() for m in modules]) if frozen else None
        runs.append(Run(start, stop, modules[0].out_features, bias))
    return runs
