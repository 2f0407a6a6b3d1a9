"""The fast path of an engine whose work is done by kernels: thin factors, vectors and blocks in kernels, forwards in graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mezzo.engines.torch.engine import TorchEngine


def attach(engine: TorchEngine, scaling: float) -> None:
    """Override what has kernels. Where the work is plain torch (a CPU, no Triton), nothing is."""
    population = engine.population
    if not population.ops.uses_kernels:
        return
    from mezzo.engines.torch.gpu import decoder, encoder, lowrank_layers, norms
    from mezzo.engines.torch.gpu.graph_ops import GraphOps

    assert isinstance(population.ops, GraphOps)
    population.ops.allocate(list(population.trained.values()), population.flat_buffers, population.large)
    lowrank_layers.attach(engine.model, population, scaling)
    norms.attach(engine.model, population)
    decoder.attach(engine.model, population)
    encoder.attach(engine.model, population, scaling, engine.frozen_cache.layers if engine.frozen_cache else ())
    if engine.device.type == "cuda":
        from mezzo.engines.torch.gpu.graphs import Graphs
        from mezzo.engines.torch.gpu.pipeline import Pipeline

        engine.graphs = Graphs(engine)
        engine.pipeline = Pipeline(engine, engine.graphs)
