"""`python -m mezzo.parallel.transports.process_starter FD`: imports what workers need, then forks one for each socket."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection


def main(descriptor: int) -> None:
    from mezzo.engines.torch.loading import preload_imports
    from mezzo.parallel.worker import serve

    preload_imports()
    gc.freeze()  # what is shared stays shared: the collector does not touch it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children: leave no zombies
    with socket.socket(fileno=descriptor) as driver:
        while True:
            word, sent, _, _ = socket.recv_fds(driver, 1, 1)
            if not word:  # the driver has ended
                return
            pid = os.fork()
            if pid == 0:
                driver.close()
                _work(serve, sent[0])
            os.close(sent[0])
            driver.sendall(b"%16d" % pid)


def _work(serve: Callable[[Connection], None], descriptor: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        serve(Connection(descriptor))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
