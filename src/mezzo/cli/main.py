"""The command line: `main` parses, runs a command, and turns every known error into one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from mezzo.cli.error_line import describe_os_error, error_line
from mezzo.cli.parser import build_parser
from mezzo.errors import MezzoError, MezzoWarning, is_out_of_memory
from mezzo.journal.atomic_files import json_safe

# Load per core from which on a machine counts as busy.
BUSY_LOAD = 0.75


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: success; 1: the run failed; 2: bad input, explained in one line."""
    # Beside another busy process, threads that spin while they wait make a step ten times slower; on an idle machine,
    # threads that sleep make it twice as slow. Must be set before torch is loaded.
    if os.getloadavg()[0] > BUSY_LOAD * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for file in (sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):  # what the output cannot show is escaped; it is no reason to fail
            file.reconfigure(errors="backslashreplace")
    options = build_parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from mezzo.cli import commands

        with _show_warnings():
            outcome: Any = getattr(commands, options.function)(options)
        result, code = outcome if isinstance(outcome, tuple) else (outcome, 0)
        if options.json and result is not None:
            print(json.dumps(json_safe(result), allow_nan=False), flush=True)
        if sys.stdout is not None:  # a shell can start a program without one
            sys.stdout.flush()
        return int(code)
    except MezzoError as error:
        _print_error(str(error))
        return error.exit_code
    except RecursionError:
        _print_error("a file is nested too deeply to be one of mezzo's")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # Outside of training, where it is not known what could have been smaller.
        _print_error(f"this machine is out of memory ({error}); close other programs or take a smaller model")
        return 1
    except KeyboardInterrupt:
        _print_error("interrupted")
        return 130
    except BrokenPipeError:  # the reader of the output has gone, as with `| head`
        _discard_output()
        return 0
    except OSError as error:
        if error.errno is None:
            raise
        if error.filename is not None:  # what the user named, or what is in it
            _print_error(describe_os_error(error))
            return 2
        if error.errno != errno.ENOSPC:
            _print_error(f"the operating system cannot read or write: {error.strerror}")
            return 1
        _discard_output()
        _print_error("standard output cannot be written: no space left on its device")
        return 1


@contextlib.contextmanager
def _show_warnings() -> Iterator[None]:
    """Show each of mezzo's own warnings as one line, once."""
    with warnings.catch_warnings():
        show_other: Any = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> None:
            if issubclass(category, MezzoWarning):
                _print_line(f"warning: {message}")
            else:
                show_other(message, category, *where, **line)

        warnings.simplefilter("default", MezzoWarning)
        warnings.showwarning = show  # put back by catch_warnings
        yield


def _print_error(message: str) -> None:
    _print_line(f"mezzo: {message}")


def _print_line(text: str) -> None:
    print(error_line(text), file=sys.stderr, flush=True)


def _discard_output() -> None:
    """Let nothing more be written to standard output, not even what Python still buffers when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
