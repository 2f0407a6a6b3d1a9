"""Which forward every module of a model gets. This is the only place that replaces forwards.

Forwards are wrapped around each other in the order of `Stage`. Each falls back to the one inside it where it cannot be used,
the innermost is the module's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import partial
from typing import Any

from torch import Tensor, nn

from mezzo.engines.architectures import Part, part_of
from mezzo.engines.torch import catalog
from mezzo.engines.torch.forward import last_layer, prefix
from mezzo.engines.torch.forward.choice import Choice
from mezzo.engines.torch.forward.frozen_cache import FrozenCache
from mezzo.engines.torch.forward.modules import kind_of, member_forward
from mezzo.engines.torch.forward.trained_modules import TrainedModule, TrainedModules
from mezzo.engines.torch.gpu.availability import kernel_refusal

WITH_KERNELS = (Part.ENCODER_LAYER, Part.ROTARY_ATTENTION, Part.GATED_MLP, Part.RMS_NORM)


class Stage(IntEnum):
    """The order of wrapping, the innermost first."""

    CACHE = 0
    """A frozen layer that returns a cached output."""
    MEMBERS = 1
    """Each member's weights, in plain torch."""
    KERNEL = 2
    """Kernels for some of the points that `MEMBERS` computes at, or for a whole layer."""
    READOUT = 3
    """Only at the positions that are read."""


@dataclass(frozen=True, slots=True)
class Override:
    """A value for an attribute of a module, nearly always its forward, built around the value it has."""

    module: nn.Module
    stage: Stage
    name: str
    build: Callable[[Any], Any]
    attribute: str


@dataclass(frozen=True, slots=True)
class PlanLine:
    """Modules of one class that are computed in the same way, and why not in a faster one."""

    count: int
    module: str
    forward: str
    reason: str = ""


class Plan:
    """The overrides of a model: printed, installed, and taken off again."""

    def __init__(self) -> None:
        self.overrides: list[Override] = []
        self.refusals: dict[nn.Module, list[str]] = {}
        """Why implementations do not take a module, for every module of the plan."""
        self._installed: list[tuple[nn.Module, str, Any]] = []

    def add(self, module: nn.Module, stage: Stage, choice: Choice, attribute: str = "forward") -> None:
        refusals = self.refusals.setdefault(module, [])
        if choice.build is None:
            refusals.append(f"no {choice.name}: {choice.reason}")
        else:
            self.overrides.append(Override(module, stage, choice.name, choice.build, attribute))

    def install(self) -> None:
        for override in sorted(self.overrides, key=lambda override: override.stage):
            module, attribute = override.module, override.attribute
            self._installed.append((module, attribute, vars(module).get(attribute)))
            setattr(module, attribute, override.build(getattr(module, attribute, None)))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The model as it was before `install`, for the duration."""
        current = [(module, attribute, vars(module)[attribute]) for module, attribute, _ in self._installed]
        for module, attribute, original in reversed(self._installed):
            if original is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, original)
        try:
            yield
        finally:
            for module, attribute, value in current:
                setattr(module, attribute, value)

    def lines(self) -> list[PlanLine]:
        """One line for each class of modules and way of computing them, in the order of the model."""
        forwards: dict[nn.Module, list[str]] = {module: [] for module in self.refusals}
        for override in sorted(self.overrides, key=lambda override: -override.stage):
            forwards[override.module].append(override.name)
        counts = Counter(
            (type(module).__name__, ", else ".join(forwards[module]) or "own forward", "; ".join(reasons))
            for module, reasons in self.refusals.items()
        )
        return [PlanLine(count, *line) for line, count in counts.items()]

    def to_list(self) -> list[dict[str, Any]]:
        return [asdict(line) for line in self.lines()]

    def __str__(self) -> str:
        lines = self.lines()
        module, forward = (max(len(getattr(line, key)) for line in lines) for key in ("module", "forward"))
        rows = [f"{line.count:>5}  {line.module:<{module}}  {line.forward:<{forward}}  {line.reason}" for line in lines]
        return "\n".join(row.rstrip() for row in rows)


def make_plan(modules: TrainedModules, cache: FrozenCache | None, prefix_override: Mapping[str, Tensor]) -> Plan:
    """Choose the forwards of a model. `prefix_override` may hold tensors that take the place of a trained prefix."""
    plan, model, population = Plan(), modules.model, modules.population
    cached = cache.layers if cache else {}
    last, base_models = last_layer.find_last_layer(model), catalog.base_models(model)
    kernels = None
    if population.ops.uses_kernels:
        from mezzo.engines.torch.gpu.kernel_forwards import KernelForwards  # needs Triton

        kernels = KernelForwards(modules, cached)
    for path, module in model.named_modules():
        trained = modules.find(path, module)
        if cache and module in cached:
            plan.add(module, Stage.CACHE, Choice("cached output", partial(cache.layer_forward, module)))
        if trained:
            plan.add(module, Stage.MEMBERS, _members(module, trained, modules))
        if source := prefix.member_source(population, path, prefix_override):
            plan.add(module, Stage.MEMBERS, Choice("prefix", partial(_replace_by, source)), prefix.SOURCE)
        if kernels is not None:
            for chosen, choice in kernels.choose(path, module):
                plan.add(chosen, Stage.KERNEL, choice)
        elif trained or part_of(module) in WITH_KERNELS:
            reason = kernel_refusal(population.source.device) or "not with gradients, --offload or several devices"
            plan.add(module, Stage.KERNEL, Choice("kernels", reason=reason))
        if module is last and module not in cached:
            plan.add(module, Stage.READOUT, _trim(module, modules))
        if module in base_models:
            plan.add(module, Stage.READOUT, Choice("readout positions", partial(last_layer.readout_only, population)))
    return plan


def _replace_by(value: Any, inner: Any) -> Any:
    return value


def _members(module: nn.Module, trained: TrainedModule, modules: TrainedModules) -> Choice:
    population = modules.population
    ranks = {key: population.trained[name].rank for key, name in trained.tensors.items()}
    parts = [f"{key} of noise rank {rank}" if rank else key for key, rank in ranks.items()]
    parts += ["LoRA"] * (trained.lora is not None) + ["label words"] * trained.is_head
    name = f"population {kind_of(module)[0]} ({', '.join(parts)})"
    return Choice(name, lambda inner: member_forward(module, inner, trained, population))


def _trim(layer: nn.Module, modules: TrainedModules) -> Choice:
    reason = last_layer.trim_refusal(layer, modules.model.config)
    build = None if reason else partial(last_layer.trimmed_forward, layer, modules.population)
    return Choice("trimmed last layer", build, reason)
