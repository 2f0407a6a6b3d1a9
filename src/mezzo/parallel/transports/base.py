"""How a driver reaches a worker: bytes out, bytes back. A transport is a hirer of links and a way to wait for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Gone(Exception):
    """The worker at the other end does not exist any more."""


class Link(Protocol):
    """One worker, seen from the driver."""

    def send(self, data: bytes) -> None:
        """Hand over one order; raises Gone."""
        ...

    def kill(self) -> None:
        """End the worker, whatever it is doing."""
        ...

    def release(self) -> None:
        """Let a worker that has nothing to do end by itself: its engine may have processes of its own to end."""
        ...


class Transport(Protocol):
    """Where workers live."""

    def hire(self) -> Link:
        """A new worker without an engine; raises Gone where none can be had now."""
        ...

    def wait(self, links: Sequence[Link], seconds: float) -> list[tuple[Link, bytes | None]]:
        """Replies that came within that time; None for a worker that is gone."""
        ...

    def close(self) -> None: ...
