"""Workers as actors of Ray, on this machine or on a cluster. Ray carries the bytes and places the processes, no more."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Sequence
from typing import Any, cast

from mezzo.errors import ConfigError
from mezzo.parallel.messages import Post
from mezzo.parallel.transports.base import Gone, Link
from mezzo.parallel.worker import Service

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0 before Ray is imported, all its servers listen on 127.0.0.1 only, on every system. Its own default is 0.0.0.0."""


class Actor:
    """What Ray runs: a worker behind bytes."""

    def __init__(self) -> None:
        self.service = Service()

    def reply(self, data: bytes) -> bytes:
        reply, _ = self.service.reply(data)  # the driver ends an actor whose reply says it cannot go on
        return reply


class ActorLink:
    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.reply: Any = None

    def send(self, data: bytes) -> None:
        self.reply = self.actor.reply.remote(data)

    def release(self) -> None:
        self.actor.__ray_terminate__.remote()

    def kill(self) -> None:
        import ray

        ray.kill(self.actor, no_restart=True)


class Actors:
    """The transport. `local` starts a Ray that listens on the loopback address only, and ends it with the run."""

    def __init__(self, address: str, workers: int, post: Post) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--ray-address needs Ray: pip install 'mezzo[ray]', or leave it out for local processes")
        if address == "local":
            os.environ[LOOPBACK] = "0"
        import ray

        self.gpus = _gpus(post)
        self.cpus = float(max(post.spec.threads or 1, 1 if self.gpus else post.spec.tp))
        self.started = not ray.is_initialized()
        if self.started:
            start(address, int(self.cpus * (workers + 1)))

    def hire(self) -> ActorLink:
        import ray

        try:
            made = ray.remote(Actor).options(num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=0, max_task_retries=0)
            return ActorLink(made.remote())
        except ray.exceptions.RayError:
            raise Gone from None

    def wait(self, links: Sequence[Link], seconds: float) -> list[tuple[Link, bytes | None]]:
        import ray

        known = {link.reply: link for link in cast("Sequence[ActorLink]", links)}
        ready, _ = ray.wait(list(known), num_returns=1, timeout=seconds)
        found: list[tuple[Link, bytes | None]] = []
        for reply in ready:
            try:
                found.append((known[reply], ray.get(reply)))
            except ray.exceptions.RayError:
                found.append((known[reply], None))
        return found

    def close(self) -> None:
        import ray

        if self.started and ray.is_initialized():
            ray.shutdown()


def start(address: str, cpus: int) -> None:
    import logging

    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address == "local":
            ray.init(
                address="local",
                num_cpus=max(cpus, os.cpu_count() or 1),
                include_dashboard=False,
                **quiet,
            )
        else:
            _refuse_silence(address)
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({reason}); 'ray start --head' starts one, and --ray-address local "
            "needs none"
        ) from None
    if address == "local" and (listens := ray.util.get_node_ip_address()) != "127.0.0.1":
        ray.shutdown()
        raise ConfigError(
            f"Ray was imported before mezzo could confine it, and would listen on {listens}: set {LOOPBACK}=0 in the environment"
        )


def _refuse_silence(address: str) -> None:
    """One short try: Ray itself would ask an address where nobody is for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "//" not in address:
        socket.create_connection((host, int(port)), timeout=10).close()


def _gpus(post: Post) -> float:
    """A GPU each where there are GPUs, as many as the ranks of a worker's own tensor parallelism."""
    from mezzo.engines.torch.loading import gpu_count

    wanted = post.spec.device.startswith("cuda") or (post.spec.device == "auto" and gpu_count() > 0)
    return float(post.spec.tp) if wanted else 0.0
