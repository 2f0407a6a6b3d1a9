"""The command line: `main` parses, runs a verb, and turns every known error into one line and an exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from mezzo.cli.parser import build
from mezzo.errors import MezzoError, is_out_of_memory
from mezzo.journal.atomic_files import json_safe

BUSY = 0.75
"""Load per core from which on a machine counts as busy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. 0: success; 1: the run failed; 2: bad input, explained in one line."""
    # Beside another busy process, threads that spin while they wait make a step ten times slower; on an idle machine,
    # threads that sleep make it twice as slow. Must be set before torch is loaded.
    if os.getloadavg()[0] > BUSY * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = build().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from mezzo.cli import commands

        outcome: Any = getattr(commands, options.verb)(options)
        result, code = outcome if isinstance(outcome, tuple) else (outcome, 0)
        if options.json and result is not None:
            print(json.dumps(json_safe(result), allow_nan=False), flush=True)
        if sys.stdout is not None:  # a shell can start a program without one
            sys.stdout.flush()
        return int(code)
    except MezzoError as error:
        print(f"mezzo: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # Outside a forward of training, where it is not known what would have been smaller.
        said = " ".join(str(error).split())
        print(
            f"mezzo: this machine is out of memory ({said}); close other programs or take a smaller model",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("mezzo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        _silence()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno != errno.ENOSPC:
            raise
        _silence()
        print("mezzo: standard output cannot be written: no space left on its device", file=sys.stderr)
        return 1


def _silence() -> None:
    """Let nothing be written to standard output any more, not even what Python still holds when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
