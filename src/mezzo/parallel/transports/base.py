"""What a transport does: it starts workers, sends them bytes and waits for the bytes they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class WorkerLost(Exception):
    """The worker at the other end does not exist any more."""


class WorkerConnection(Protocol):
    """The driver's end of the connection to one worker."""

    def send(self, data: bytes) -> None:
        """Send one request; raises WorkerLost."""

    def kill(self) -> None:
        """End the worker, whatever it is doing."""

    def stop(self) -> None:
        """Let an idle worker shut down by itself: its engine may have processes of its own to end."""


class Transport(Protocol):
    """Where workers run."""

    def start_worker(self) -> WorkerConnection:
        """Start a worker without an engine; raises WorkerLost if none can be started now."""

    def wait_for_replies(
        self, connections: Sequence[WorkerConnection], seconds: float
    ) -> list[tuple[WorkerConnection, bytes | None]]:
        """Replies that arrive within that time; None for a worker that is lost."""

    def close(self) -> None: ...
