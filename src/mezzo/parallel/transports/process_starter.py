"""`python -m mezzo.parallel.transports.process_starter FD`: imports what workers need, then forks one for each socket."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection

from mezzo.engines.torch.loading import preload_imports
from mezzo.parallel.worker import serve_requests


def main(descriptor: int) -> None:
    preload_imports()
    gc.freeze()  # the collector does not touch shared pages, so they stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the children: leave no zombies
    with socket.socket(fileno=descriptor) as driver:
        while True:
            message, descriptors, _, _ = socket.recv_fds(driver, 1, 1)
            if not message:  # the driver has ended
                return
            pid = os.fork()
            if pid == 0:
                driver.close()
                _run_worker(descriptors[0])
            os.close(descriptors[0])
            driver.sendall(b"%16d" % pid)


def _run_worker(descriptor: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        serve_requests(Connection(descriptor))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
