"""Which kind of workers a run has: the ranks of torchrun, actors of Ray, processes of this machine, or none."""

from __future__ import annotations

import dataclasses

from mezzo.config import RunConfig
from mezzo.engines import ENGINES
from mezzo.engines.base import Engine, EngineSpec
from mezzo.errors import ConfigError
from mezzo.parallel.messages import Post
from mezzo.parallel.transports import torchrun
from mezzo.parallel.transports.base import Transport


def open_workers(config: RunConfig, spec: EngineSpec) -> Engine | None:
    """The engine made of workers that the configuration asks for; None when the run is a single process."""
    # Bits depend on the number of threads: one each, so that they do not depend on the number of workers.
    post = Post(ENGINES[config.engine].factory, dataclasses.replace(spec, threads=spec.threads or 1))
    if torchrun.Exchange.opened is not None:
        if config.workers:
            raise ConfigError("torchrun starts the workers of this run: leave --workers out")
        if config.url:
            raise ConfigError("servers in --url share each batch by themselves: start one process, without torchrun")
        return torchrun.RankEngine(torchrun.Exchange.opened, post, config.worker_timeout, config.check_workers)
    if not config.workers:
        return None
    from mezzo.parallel.pool import PoolEngine

    return PoolEngine(_transport(config, post), post, config.workers, config.worker_timeout, config.check_workers)


def _transport(config: RunConfig, post: Post) -> Transport:
    if config.ray_address:
        from mezzo.parallel.transports.ray import Actors

        return Actors(config.ray_address, config.workers or 1, post)
    from mezzo.parallel.transports.processes import Processes

    return Processes()
