"""Bytes between the ranks that torchrun has started, by torch.distributed: gloo from the host, or nccl through the GPUs."""

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

PATIENCE = timedelta(days=7)
"""How long a rank waits for an order: between two of them the driver may evaluate, save or think for as long as it likes."""


MEETING = timedelta(minutes=10)
"""For the ranks to come together."""


class Ranks:
    """The group of a torchrun job. Rank 0 drives."""

    def __init__(self, backend: str) -> None:
        if backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError("--backend nccl moves numbers between GPUs, and there is none here; use --backend gloo")
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: nothing listens outside it
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        world: Any = dist  # its types hide these two names
        store, self.rank, self.size = next(iter(world.rendezvous("env://", timeout=MEETING)))
        meeting = world.PrefixStore(_met(store, self.rank, self.size), store)
        dist.init_process_group(backend, store=meeting, rank=self.rank, world_size=self.size, timeout=PATIENCE)

    def broadcast(self, data: bytes | None, seconds: float | None = None) -> bytes:
        """What rank 0 says, on every rank."""
        length = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        self._finished(dist.broadcast(length, src=0, async_op=True), seconds)
        payload = self._tensor(data) if data is not None else self._room(int(length))
        self._finished(dist.broadcast(payload, src=0, async_op=True), seconds)
        return payload.cpu().numpy().tobytes()

    def gather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """What every rank says, on every rank; one that is silent for `seconds` ends the run."""
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        own = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        self._finished(dist.all_gather(lengths, own, async_op=True), seconds)
        longest = max(int(length) for length in lengths)
        parts = [self._room(longest) for _ in range(self.size)]
        self._finished(dist.all_gather(parts, self._tensor(data.ljust(longest, b"\0")), async_op=True), seconds)
        return [part[: int(n)].cpu().numpy().tobytes() for part, n in zip(parts, lengths, strict=True)]

    def _finished(self, work: Any, seconds: float | None) -> None:
        try:
            work.wait(timedelta(seconds=seconds) if seconds else PATIENCE)
        except RuntimeError as error:
            reason = f"a rank did not answer within {seconds:.3g} s" if seconds else "a rank has gone"
            raise RunFailed(
                f"{reason} ({str(error).splitlines()[0][:120]}). The journal holds the run up to here: torchrun's "
                "--max-restarts goes on from there, and so does --resume"
            ) from None

    def _tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)

    def _room(self, size: int) -> Tensor:
        return torch.zeros(max(1, size), dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        dist.destroy_process_group()


def _met(store: Any, rank: int, size: int) -> str:
    """A name for this meeting of the ranks that no earlier one had.

    torchrun keeps its store when it starts ranks again, with the addresses of the dead in it. So every rank asks under a name of
    its own, and rank 0 answers until all have come.
    """
    name, ends = uuid.uuid4().hex, time.monotonic() + MEETING.total_seconds()
    if rank:
        store.set(f"mezzo/asks/{rank}", name)
        store.wait([f"mezzo/answer/{name}"], MEETING)
        meeting = store.get(f"mezzo/answer/{name}").decode()
        store.set(f"mezzo/{meeting}/{rank}", "here")
        return meeting
    while not all(store.check([f"mezzo/{name}/{other}"]) for other in range(1, size)):
        if time.monotonic() > ends:
            raise RunFailed(f"not all {size} ranks came together within {MEETING.seconds} s")
        for other in range(1, size):
            if store.check([f"mezzo/asks/{other}"]):
                store.set(f"mezzo/answer/{store.get(f'mezzo/asks/{other}').decode()}", name)
        time.sleep(0.01)
    return name
