"""The parts of a running `sglang.Engine` that outlive it, or report on it, in mezzo's own process."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from typing import Any


def silence_sigquit_report() -> None:
    """Drop SGLang's report that `custom_sigquit_handler` is in use, which it logs as an error."""
    logging.getLogger("sglang.srt.entrypoints.engine").addFilter(_is_not_sigquit_report)


def _is_not_sigquit_report(record: logging.LogRecord) -> bool:
    return "SIGQUIT handler" not in record.getMessage()


def detach(engine: Any) -> None:
    """Leave the processes of an engine to the caller: nothing watches them, ends them at exit, or talks to them."""
    atexit.unregister(engine.shutdown)
    watchdog = getattr(getattr(engine, "tokenizer_manager", None), "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()
    if getattr(engine, "send_to_rpc", None) is not None:
        engine.send_to_rpc.close(linger=0)
        engine.send_to_rpc = None
    drop_messages()


def drop_messages() -> None:
    """Let zmq end although nobody takes its messages any more: it would wait forever when its objects are deleted."""
    zmq = sys.modules.get("zmq")  # imported by SGLang, if it came that far
    if zmq is None:
        return
    for each in gc.get_objects():
        if issubclass(type(each), zmq.Socket) and not each.closed:
            each.linger = 0
