"""Workers as Ray actors, on this machine or on a cluster. Ray only places the processes and carries the bytes."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Sequence
from typing import Any, cast

from mezzo.errors import ConfigError
from mezzo.parallel.messages import WorkerSpec
from mezzo.parallel.transports.base import WorkerConnection, WorkerLost
from mezzo.parallel.worker import WorkerServer

# If it is 0 before Ray is imported, all of Ray's servers listen on 127.0.0.1 only, on every system, instead of
# 0.0.0.0.
LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class WorkerActor:
    """The actor that Ray runs."""

    def __init__(self) -> None:
        self.server = WorkerServer()

    def handle(self, data: bytes) -> bytes:
        return self.server.handle(data)  # after a fatal failure the driver ends the actor


class ActorConnection:
    def __init__(self, ray: Any, actor: Any) -> None:
        self.ray, self.actor = ray, actor
        self.pending_reply: Any = None

    def send(self, data: bytes) -> None:
        self.pending_reply = self.actor.handle.remote(data)

    def stop(self) -> None:
        self.actor.__ray_terminate__.remote()

    def kill(self) -> None:
        self.ray.kill(self.actor, no_restart=True)


class RayTransport:
    """Ray actors. `local` starts a Ray that listens on the loopback address only, and ends it with the run."""

    def __init__(self, address: str, worker_count: int, spec: WorkerSpec) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--ray-address needs Ray: pip install 'mezzo[ray]', or leave it out for local processes")
        if address == "local":
            os.environ[LOOPBACK_VARIABLE] = "0"
        import ray

        self.ray: Any = ray
        self.gpus_per_worker = _gpus_per_worker(spec)
        tp = 1 if self.gpus_per_worker else spec.engine_spec.tp
        self.cpus_per_worker = float(max(spec.engine_spec.threads or 1, tp))
        self.owns_ray = not ray.is_initialized()
        if self.owns_ray:
            start_ray(address, int(self.cpus_per_worker * (worker_count + 1)))

    def start_worker(self) -> ActorConnection:
        ray = self.ray
        resources = {"num_cpus": self.cpus_per_worker, "num_gpus": self.gpus_per_worker}
        try:
            actor_class = ray.remote(WorkerActor).options(**resources, max_restarts=0, max_task_retries=0)
            return ActorConnection(ray, actor_class.remote())
        except ray.exceptions.RayError:
            raise WorkerLost from None

    def wait_for_replies(
        self, connections: Sequence[WorkerConnection], seconds: float
    ) -> list[tuple[WorkerConnection, bytes | None]]:
        ray = self.ray
        by_reply = {worker.pending_reply: worker for worker in cast("Sequence[ActorConnection]", connections)}
        ready, _ = ray.wait(list(by_reply), num_returns=1, timeout=seconds)
        replies: list[tuple[WorkerConnection, bytes | None]] = []
        for reply in ready:
            try:
                replies.append((by_reply[reply], ray.get(reply)))
            except ray.exceptions.RayError:
                replies.append((by_reply[reply], None))
        return replies

    def close(self) -> None:
        if self.owns_ray and self.ray.is_initialized():
            self.ray.shutdown()


def start_ray(address: str, cpus: int) -> None:
    """Start a local Ray with at least that many CPUs, or connect to the cluster at `address`."""
    import logging

    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address == "local":
            options |= {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
        else:
            _check_reachable(address)
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({reason}); 'ray start --head' starts one, and --ray-address local "
            "needs none"
        ) from None
    if address == "local" and (listens_on := ray.util.get_node_ip_address()) != "127.0.0.1":
        ray.shutdown()
        raise ConfigError(
            f"Ray was imported before mezzo could restrict it to the loopback address, and would listen on {listens_on}: "
            f"set {LOOPBACK_VARIABLE}=0 in the environment"
        )


def _check_reachable(address: str) -> None:
    """Try to connect once: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "//" not in address:
        socket.create_connection((host, int(port)), timeout=10).close()


def _gpus_per_worker(spec: WorkerSpec) -> float:
    """One GPU per tensor-parallel rank, if the engine runs on GPUs."""
    from mezzo.engines.torch.loading import gpu_count

    device = spec.engine_spec.device
    uses_gpus = device.startswith("cuda") or (device == "auto" and gpu_count() > 0)
    return float(spec.engine_spec.tp) if uses_gpus else 0.0
