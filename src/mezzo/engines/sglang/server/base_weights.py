"""Whose weights a server holds: the checkpoint's, or those of a run that trains matrices in it; and how to put the base back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from mezzo.engines.arrays import Array, to_tensor
from mezzo.engines.sglang.requests import SAMPLER
from mezzo.engines.sglang.server.answers import DISAGREE, WeightStatus
from mezzo.engines.sglang.server.client_names import PREFIX, is_gone
from mezzo.engines.sglang.server.loader import Order, digest_part, group_by_size
from mezzo.engines.sglang.server.replica import Replica
from mezzo.errors import ConfigError
from mezzo.method import noise

# A run that trains matrices is heard of that often, and taken for dead after that many seconds of silence.
HEARTBEAT_SECONDS, SILENCE_SECONDS = 5.0, 30.0
# SGLang's `weight_version` of a model that nobody has named.
UNNAMED = "default"
# Reads the checkpoint's matrices of these names.
ReadMatrices = Callable[[Sequence[str]], Mapping[str, Array]]


def reset_to_base(replica: Replica, client: str, read_matrices: ReadMatrices) -> None:
    """Put the checkpoint's weights back into a server that a dead run has left behind; refuse one that a living run uses."""
    status, name = replica.weight_status(), replica.weight_version()
    same_noise = status is not None and status.noise == noise.VERSION
    replica.makes_adapters = status is not None and status.makes_adapters and same_noise
    replica.draws_texts = (
        status is not None and status.sampler == SAMPLER and same_noise and replica.info.logit_processors
    )
    if status is None or not (status.version or status.error):
        if name.startswith(PREFIX):
            raise ConfigError(
                f"a training run has changed the weights of the server at {replica.url}. Restart it: {replica.command}"
            )
        return
    restore_base(replica, client, _wait_for_silence(replica, status, client), read_matrices)


def restore_base(replica: Replica, client: str, status: WeightStatus, read_matrices: ReadMatrices) -> None:
    """Write the checkpoint's matrices over those that a run has moved, check them by digest and restore their name."""
    replica.loader_version = None if status.version == DISAGREE else status.version
    base_name = status.base_name or UNNAMED
    write_matrices(replica, client, base_name, read_matrices(status.moved))
    order = Order(owner=client, expected=replica.loader_version, version=base_name, base_name=base_name, is_base=True)
    replica.write_weights(order)


def write_matrices(replica: Replica, client: str, base_name: str, matrices: Mapping[str, Array]) -> None:
    """Write complete matrices, and check by digest that the server holds them."""
    for number, group in enumerate(group_by_size(matrices)):
        version = f"{client}.{time.time_ns():x}.{number}"
        replica.write_weights(
            Order(owner=client, expected=replica.loader_version, version=version, base_name=base_name), group
        )
    check_digests(replica, matrices)


def check_digests(replica: Replica, matrices: Mapping[str, Array]) -> None:
    """Raise unless the server's matrices are these, bit for bit."""
    import torch

    parts = replica.digests()
    if other := sorted(set(matrices) ^ {part.name for part in parts}):
        raise replica.failure(f"the server at {replica.url} names other matrices than the run: {other[0]}")
    for part in parts:
        values = to_tensor(matrices[part.name])[slice(*part.rows), slice(*part.cols)]
        if digest_part(values.to(getattr(torch, part.dtype))) != part.digest:
            raise replica.failure(f"{part.name} on the server at {replica.url} differs from the run's")


def _wait_for_silence(replica: Replica, status: WeightStatus, client: str) -> WeightStatus:
    """The status when nothing has been heard of another owner for long enough; ConfigError if it is alive."""
    if status.owner == client or is_gone(status.owner):
        return status
    end = time.monotonic() + SILENCE_SECONDS
    while status.silent_seconds < SILENCE_SECONDS:
        if time.monotonic() > end:
            raise ConfigError(
                f"another run is training the weights of the server at {replica.url}: wait for its end, or use another server"
            )
        time.sleep(min(1.0, SILENCE_SECONDS / 10))
        status = replica.weight_status() or status
    return status
