"""Panics of libraries in Rust: they print pages, and what they raise is no Exception."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

# Only one thread at a time may exchange the process's standard error.
_STDERR = threading.RLock()


@contextlib.contextmanager
def caught_panics() -> Iterator[None]:
    """A panic becomes a ValueError, and what it printed is dropped. All else that is printed meanwhile appears afterwards."""
    with _STDERR, _delayed_stderr() as drop:
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            drop()
            raise ValueError((str(error).strip().splitlines() or [type(error).__name__])[0]) from None


@contextlib.contextmanager
def _delayed_stderr() -> Iterator[Callable[[], None]]:
    """Hold back what the process writes to standard error; the function that is given drops what there is by then."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
            terminal = os.dup(2)
        except OSError:  # no standard error, or no place for a file
            yield lambda: None
            return
        stack.callback(_show, file.fileno(), terminal)
        _flush()
        os.dup2(file.fileno(), 2)
        yield lambda: _empty(file.fileno())


def _show(held: int, terminal: int) -> None:
    """Give standard error back, and write there what was held."""
    _flush()
    os.dup2(terminal, 2)
    os.close(terminal)
    os.lseek(held, 0, os.SEEK_SET)
    with contextlib.suppress(OSError):
        while text := os.read(held, 2**16):
            while text:
                text = text[os.write(2, text) :]


def _empty(held: int) -> None:
    _flush()
    os.ftruncate(held, 0)
    os.lseek(held, 0, os.SEEK_SET)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
        sys.stderr.flush()
