"""An error or a warning as one line that a terminal can take, whatever a file or a command put into it."""

from __future__ import annotations

import os

from mezzo.untrusted import printable, without_credentials

# Of an error or a warning that is shown, and how many of them are its end.
MAX_CHARACTERS, LAST = 2000, 500


def error_line(text: str) -> str:
    """No line ends, no credentials, nothing that a terminal obeys, no megabytes; what happened often stands at the end."""
    line = printable(without_credentials(" ".join(text.split())))
    return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - LAST]} … {line[-LAST:]}"


def describe_os_error(error: OSError) -> str:
    """The file that is named in an error, and what is wrong with it."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    return f"{name}: {error.strerror}"
