"""Bytes between the ranks that torchrun has started, by torch.distributed: gloo from the host, or nccl through the GPUs."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.errors import ConfigError, RunFailed

PATIENCE = timedelta(days=7)
"""How long a rank waits for an order: between two of them the driver may evaluate, save or think for as long as it likes."""


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
        dist.init_process_group(backend, timeout=PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 says, on every rank."""
        length = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        dist.broadcast(length, src=0)
        payload = self._tensor(data) if data is not None else self._room(int(length))
        dist.broadcast(payload, src=0)
        return payload.cpu().numpy().tobytes()

    def gather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """What every rank says, on every rank; one that is silent for `seconds` ends the run."""
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        own = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        self._gathered(lengths, own, seconds)
        longest = max(int(length) for length in lengths)
        parts = [self._room(longest) for _ in range(self.size)]
        self._gathered(parts, self._tensor(data.ljust(longest, b"\0")), seconds)
        return [part[: int(n)].cpu().numpy().tobytes() for part, n in zip(parts, lengths, strict=True)]

    def _gathered(self, parts: list[Tensor], own: Tensor, seconds: float | None) -> None:
        work = dist.all_gather(parts, own, async_op=True)
        assert work is not None
        try:
            finished = work.wait(timedelta(seconds=seconds)) if seconds else work.wait()
        except RuntimeError as error:
            reason = f"a rank did not answer within {seconds:.3g} s" if seconds else "a rank has gone"
            raise RunFailed(
                f"{reason} ({str(error).splitlines()[0][:120]}). The journal holds the run up to here: torchrun's "
                "--max-restarts goes on from there, and so does --resume"
            ) from None
        assert finished

    def _tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)

    def _room(self, size: int) -> Tensor:
        return torch.zeros(max(1, size), dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        dist.destroy_process_group()
