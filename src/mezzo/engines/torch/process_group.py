"""Bytes between the ranks of a torchrun job, by torch.distributed: gloo over the host's network, or nccl between GPUs."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.errors import ConfigError, RunFailed

# How long a rank waits for the next request: in between the driver may evaluate or save for as long as it takes.
REQUEST_TIMEOUT = timedelta(days=7)
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)


class ProcessGroup:
    """All ranks of a torchrun job."""

    def __init__(self, backend: str) -> None:
        if backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError("--backend nccl moves numbers between GPUs, and there is none here; use --backend gloo")
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: listen on the loopback address only
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        untyped: Any = dist  # its types lack `rendezvous` and `PrefixStore`
        store, self.rank, self.size = next(iter(untyped.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT)))
        store = untyped.PrefixStore(_agree_on_prefix(store, self.rank, self.size), store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=REQUEST_TIMEOUT)

    def broadcast(self, data: bytes | None, seconds: float | None = None) -> bytes:
        """Send rank 0's data to every rank; the others pass None."""
        length = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        self._wait(dist.broadcast(length, src=0, async_op=True), seconds)
        payload = self._to_tensor(bytes(int(length)) if data is None else data)
        self._wait(dist.broadcast(payload, src=0, async_op=True), seconds)
        return payload.cpu().numpy().tobytes()

    def gather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """Every rank's data, on every rank; a rank that does not send within `seconds` ends the run."""
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        self._wait(dist.all_gather(lengths, length, async_op=True), seconds)
        longest = max(int(each) for each in lengths)
        payloads = [self._to_tensor(bytes(longest)) for _ in range(self.size)]
        padded = self._to_tensor(data.ljust(longest, b"\0"))
        self._wait(dist.all_gather(payloads, padded, async_op=True), seconds)
        return [payload[: int(n)].cpu().numpy().tobytes() for payload, n in zip(payloads, lengths, strict=True)]

    def _wait(self, operation: Any, seconds: float | None) -> None:
        try:
            operation.wait(timedelta(seconds=seconds) if seconds else REQUEST_TIMEOUT)
        except RuntimeError as error:
            reason = f"a rank did not answer within {seconds:.3g} s" if seconds else "a rank has gone"
            raise RunFailed(
                f"{reason} ({str(error).splitlines()[0][:120]}). The journal holds the run up to here: torchrun's "
                "--max-restarts goes on from there, and so does --resume"
            ) from None

    def _to_tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)

    def close(self) -> None:
        dist.destroy_process_group()


def _agree_on_prefix(store: Any, rank: int, size: int) -> str:
    """A prefix for the store's keys that no earlier start of these ranks has used.

    torchrun keeps its store when it restarts ranks, and with it the addresses of the dead ones. So every other rank asks for the
    prefix under a fresh name, and rank 0 answers until all of them have it.
    """
    name, deadline = uuid.uuid4().hex, time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    if rank:
        store.set(f"mezzo/asks/{rank}", name)
        store.wait([f"mezzo/answer/{name}"], RENDEZVOUS_TIMEOUT)
        prefix = store.get(f"mezzo/answer/{name}").decode()
        store.set(f"mezzo/{prefix}/{rank}", "joined")
        return str(prefix)
    while not all(store.check([f"mezzo/{name}/{other}"]) for other in range(1, size)):
        if time.monotonic() > deadline:
            raise RunFailed(f"not all {size} ranks came together within {RENDEZVOUS_TIMEOUT.seconds} s")
        for other in range(1, size):
            if store.check([f"mezzo/asks/{other}"]):
                store.set(f"mezzo/answer/{store.get(f'mezzo/asks/{other}').decode()}", name)
        time.sleep(0.01)
    return name
