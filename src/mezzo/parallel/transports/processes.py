"""Workers as processes of this machine, over socket pairs: nothing listens on a network address.

A process starter, which has imported everything and does nothing else, forks them: every worker but the first starts in
milliseconds and shares the starter's memory.
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

from mezzo.parallel.transports.base import WorkerConnection, WorkerLost

# Seconds after which a worker that stops in the middle of a message counts as lost: it must not block the driver.
MESSAGE_TIMEOUT = 20
# Seconds for the process starter to import everything and fork; one that is stuck is replaced.
STARTER_TIMEOUT = 300
# Seconds that workers have to end by themselves when their driver has ended.
GRACE_SECONDS = 30


STARTER = "mezzo.parallel.transports.process_starter"


class ProcessConnection:
    def __init__(self, connection: Connection, pid: int) -> None:
        self.connection, self.pid = connection, pid

    def send(self, data: bytes) -> None:
        try:
            self.connection.send_bytes(data)
        except (OSError, ValueError):
            raise WorkerLost from None

    def kill(self) -> None:
        """Kill the process. Only the worker holds the other end: as long as that is open, the pid has not been reused."""
        if not self.connection.closed:
            if not self._is_closed_by_worker():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            self.connection.close()

    def stop(self) -> None:
        self.connection.close()

    def _is_closed_by_worker(self) -> bool:
        try:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
                return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class ProcessTransport:
    """Local processes. All runs of this process share one process starter."""

    def start_worker(self) -> ProcessConnection:
        for _ in range(2):  # a process starter that was killed is started again
            starter = _process_starter()
            driver_end, worker_end = socket.socketpair()
            with worker_end:
                try:
                    pid = starter.fork_worker(worker_end)
                except (OSError, ValueError):
                    driver_end.close()
                    starter.kill()
                    continue
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                driver_end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", MESSAGE_TIMEOUT, 0))
            return ProcessConnection(Connection(driver_end.detach()), pid)
        raise WorkerLost

    def wait_for_replies(
        self, connections: Sequence[WorkerConnection], seconds: float
    ) -> list[tuple[WorkerConnection, bytes | None]]:
        by_pipe = {id(worker.connection): worker for worker in cast("Sequence[ProcessConnection]", connections)}
        replies: list[tuple[WorkerConnection, bytes | None]] = []
        for pipe in wait([worker.connection for worker in by_pipe.values()], seconds):
            worker = by_pipe[id(pipe)]
            try:
                replies.append((worker, worker.connection.recv_bytes()))
            except (EOFError, OSError):
                replies.append((worker, None))
        return replies

    def close(self) -> None:
        """Workers end with their connections; the process starter stays for the next run."""


class _ProcessStarter:
    def __init__(self) -> None:
        self.socket, starter_end = socket.socketpair()
        self.socket.settimeout(STARTER_TIMEOUT)
        # Looking for GPUs must not initialise CUDA: a forked process could not use it then.
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with starter_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", STARTER, str(starter_end.fileno()), str(GRACE_SECONDS)],
                pass_fds=[starter_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the driver's result
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the driver alone, which ends its workers
            )

    def fork_worker(self, worker_end: socket.socket) -> int:
        """Fork a worker that serves this socket; return its pid."""
        socket.send_fds(self.socket, [b"w"], [worker_end.fileno()])
        return int(self.socket.recv(16))

    def kill(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


_starters: dict[int, _ProcessStarter] = {}


def _process_starter() -> _ProcessStarter:
    """This process's starter; a forked copy of this process gets its own."""
    starter = _starters.get(os.getpid())
    if starter is None or starter.process.poll() is not None:
        starter = _starters[os.getpid()] = _ProcessStarter()
    return starter
