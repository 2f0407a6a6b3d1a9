"""`python -m mezzo.parallel.transports.process_starter FD SECONDS`: imports what workers need, then forks one for each socket.

Workers end when their driver has closed its end of the socket. Those that have not after some seconds, because they hang or
were stopped, are killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection

from mezzo.engines.torch.loading import preload_imports
from mezzo.parallel.worker import serve_requests


def main(descriptor: int, grace_seconds: float) -> None:
    preload_imports()
    gc.freeze()  # the collector does not touch shared pages, so they stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the children: leave no zombies
    workers: list[int] = []  # as descriptors: a pid may be given to another process once its own has ended
    with socket.socket(fileno=descriptor) as driver:
        while True:
            message, descriptors, _, _ = socket.recv_fds(driver, 1, 1)
            if not message:  # the driver has ended
                break
            pid = os.fork()
            if pid == 0:
                driver.close()
                for worker in workers:
                    os.close(worker)
                _run_worker(descriptors[0])
            workers = [worker for worker in workers if not _has_ended(worker)] + [os.pidfd_open(pid)]
            os.close(descriptors[0])
            driver.sendall(b"%16d" % pid)
    _end_workers(workers, grace_seconds)


def _has_ended(worker: int) -> bool:
    if not select.select([worker], [], [], 0)[0]:
        return False
    os.close(worker)
    return True


def _end_workers(workers: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while workers and (left := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(workers, [], [], left)
        workers = [worker for worker in workers if worker not in ended]
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker, signal.SIGKILL)


def _run_worker(descriptor: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        serve_requests(Connection(descriptor))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
