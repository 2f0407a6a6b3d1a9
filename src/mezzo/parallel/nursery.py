"""`python -m mezzo.parallel.nursery FD`: imports what workers need once, then forks one for every socket it is sent."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection


def main(descriptor: int) -> None:
    for name in ("mezzo.engines.torch", "mezzo.parallel.worker"):
        importlib.import_module(name)
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
                _work(sent[0])
            os.close(sent[0])
            driver.sendall(b"%16d" % pid)


def _work(descriptor: int) -> None:
    from mezzo.parallel.worker import serve

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
