"""Workers as processes of this machine, over socket pairs: nothing listens anywhere.

A nursery, a process that has imported everything and does nothing else, forks them: the second worker, and every
replacement, starts in milliseconds and shares its memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import cast

from mezzo.parallel.transports.base import Gone, Link

STUCK = 20
"""Seconds after which a worker that stops in the middle of a message counts as gone: it must not stop the driver."""


class ProcessLink:
    def __init__(self, connection: Connection, pid: int) -> None:
        self.connection, self.pid = connection, pid

    def send(self, data: bytes) -> None:
        try:
            self.connection.send_bytes(data)
        except (OSError, ValueError):
            raise Gone from None

    def kill(self) -> None:
        """Only the worker holds the other end: as long as that is open, the number is still its own."""
        if not self.connection.closed:
            if not self._ended():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            self.connection.close()

    def release(self) -> None:
        self.connection.close()

    def _ended(self) -> bool:
        try:
            return socket_at_end(self.connection.fileno())
        except OSError:
            return True


def socket_at_end(descriptor: int) -> bool:
    """Whether the other end is closed; bytes that wait to be read stay where they are."""
    with socket.socket(fileno=os.dup(descriptor)) as end:
        try:
            return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False


class Processes:
    """The transport. All its runs in one process share the nursery."""

    def hire(self) -> ProcessLink:
        for attempt in range(2):
            nursery = _nursery()
            ours, theirs = socket.socketpair()
            try:
                socket.send_fds(nursery.ours, [b"w"], [theirs.fileno()])
                answer = nursery.ours.recv(16)
                pid = int(answer)
            except (OSError, ValueError):  # it was killed: the next attempt starts another
                ours.close()
                nursery.end()
                if attempt:
                    raise Gone from None
                continue
            finally:
                theirs.close()
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", STUCK, 0))
            return ProcessLink(Connection(ours.detach()), pid)
        raise Gone

    def wait(self, links: Sequence[Link], seconds: float) -> list[tuple[Link, bytes | None]]:
        known = {id(link.connection): link for link in cast("Sequence[ProcessLink]", links)}
        found: list[tuple[Link, bytes | None]] = []
        for ready in wait([link.connection for link in known.values()], seconds):
            link = known[id(ready)]
            try:
                found.append((link, link.connection.recv_bytes()))
            except (EOFError, OSError):
                found.append((link, None))
        return found

    def close(self) -> None:
        """Workers end with their links; the nursery waits for the next run."""


class _Nursery:
    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        # Looking for GPUs must not initialise CUDA: a forked process could not use it then.
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mezzo.parallel.transports.process_starter", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the driver's result
                env=environment,
                start_new_session=True,  # Ctrl-C asks the driver, which ends its workers
            )

    def end(self) -> None:
        self.ours.close()
        self.process.kill()
        self.process.wait()


_started: dict[int, _Nursery] = {}


def _nursery() -> _Nursery:
    """This process's nursery; a forked copy of this process makes its own."""
    found = _started.get(os.getpid())
    if found is None or found.process.poll() is not None:
        found = _started[os.getpid()] = _Nursery()
    return found
