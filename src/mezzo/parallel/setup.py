"""Which kind of workers a run has: torchrun ranks, Ray actors, local processes, or none."""

from __future__ import annotations

import dataclasses

from mezzo.config import RunConfig
from mezzo.engines import ENGINES
from mezzo.engines.base import Engine, EngineSpec
from mezzo.errors import ConfigError
from mezzo.parallel.messages import WorkerSpec
from mezzo.parallel.transports.base import Transport
from mezzo.parallel.transports.torchrun import RankGroup


def open_workers(config: RunConfig, engine_spec: EngineSpec) -> Engine | None:
    """Open the engine made of workers that the configuration asks for; None if the run is a single process."""
    # Scores depend on the number of threads: with one each, they do not depend on the number of workers.
    spec = WorkerSpec(ENGINES[config.engine], dataclasses.replace(engine_spec, threads=engine_spec.threads or 1))
    if RankGroup.current is not None:
        if config.workers:
            raise ConfigError("torchrun starts the workers of this run: leave --workers out")
        if config.splits_layers:
            raise ConfigError("a rank of torchrun has one device: start one process, or name one --device")
        if config.url:
            raise ConfigError("servers in --url share each batch by themselves: start one process, without torchrun")
        from mezzo.parallel.torchrun_engine import TorchrunEngine

        return TorchrunEngine(RankGroup.current, spec, config.worker_timeout, config.check_workers)
    if not config.workers:
        return None
    from mezzo.parallel.pool_engine import PoolEngine

    transport = _open_transport(config, spec)
    return PoolEngine(transport, spec, config.workers, config.worker_timeout, config.check_workers)


def _open_transport(config: RunConfig, spec: WorkerSpec) -> Transport:
    if config.ray_address:
        from mezzo.parallel.transports.ray import RayTransport

        return RayTransport(config.ray_address, config.workers or 1, spec)
    from mezzo.parallel.transports.processes import ProcessTransport

    return ProcessTransport()
