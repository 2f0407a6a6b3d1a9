"""Which modules of a model are computed by kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from mezzo.engines.torch.forward.choice import Choice
from mezzo.engines.torch.forward.trained_modules import TrainedModules
from mezzo.engines.torch.gpu import decoder, encoder, lowrank_layers, norms
from mezzo.engines.torch.gpu.graph_ops import GraphOps


class KernelForwards:
    """The choices for a plan. `cached` are the layers of a frozen cache."""

    def __init__(self, modules: TrainedModules, cached: Collection[nn.Module]) -> None:
        self.modules, self.cached = modules, cached
        population = modules.population
        assert isinstance(population.ops, GraphOps)
        population.ops.allocate(list(population.trained.values()), population.flat_buffers, population.large)

    def choose(self, path: str, module: nn.Module) -> Iterator[tuple[nn.Module, Choice]]:
        """What is chosen for a module, and for those of its children that are computed together."""
        yield from lowrank_layers.choose(path, module, self.modules)
        for choice in (
            norms.choose(path, module, self.modules),
            decoder.choose(module, self.modules.population),
            encoder.choose(path, module, self.modules, self.cached),
        ):
            if choice is not None:
                yield module, choice
