"""torchrun: rank 0 is the driver and a worker, all other ranks are workers only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import ClassVar

from mezzo.parallel.messages import deserialize, serialize
from mezzo.parallel.worker import WorkerServer

# Seconds for a rank's reply, unless --worker-timeout is set.
DEFAULT_TIMEOUT = 1800.0


def launched_this_process() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def restarted_this_process() -> bool:
    """Whether torchrun started it again after a failure."""
    return launched_this_process() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def may_restart_this_process() -> bool:
    return launched_this_process() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


@contextlib.contextmanager
def join_ranks(backend: str) -> Iterator[bool]:
    """Join the ranks of torchrun. Yields True on rank 0, the driver; other ranks serve it first and then get False."""
    group = RankGroup(backend)
    try:
        if group.rank:
            group.serve_requests()
        yield group.rank == 0
    finally:
        group.close()


class RankGroup:
    """The ranks of a torchrun job, seen from one of them.

    It is created before anything that could fail on one rank alone.
    """

    current: ClassVar[RankGroup | None] = None

    def __init__(self, backend: str) -> None:
        from mezzo.engines.torch.process_group import ProcessGroup

        self._processes = ProcessGroup(backend)
        self.rank, self.size = self._processes.rank, self._processes.size
        self.server = WorkerServer(int(os.environ.get("LOCAL_RANK", "0")))
        self._is_exchanging = False
        RankGroup.current = self

    def serve_requests(self) -> None:
        """Serve rank 0 until it closes the group."""
        while requests := deserialize(self._processes.broadcast(None)):
            self._processes.gather(self.server.handle(requests[self.rank]))

    def exchange(self, requests: Sequence[bytes], seconds: float) -> list[bytes]:
        """On rank 0: send every rank its request and return all replies."""
        self._is_exchanging = True
        self._processes.broadcast(serialize(list(requests)), seconds)
        replies = self._processes.gather(self.server.handle(requests[0]), seconds)
        self._is_exchanging = False
        return replies

    def close(self) -> None:
        """End the other ranks. After an exchange that failed they cannot be reached: torchrun ends them."""
        RankGroup.current = None
        self.server.close()
        if not self._is_exchanging:
            if self.rank == 0:
                self._processes.broadcast(serialize([]), DEFAULT_TIMEOUT)
            self._processes.close()
