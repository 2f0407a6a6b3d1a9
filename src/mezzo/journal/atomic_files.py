"""Files that are whole or absent, and operating-system errors as one line."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mezzo.errors import JournalError, RunFailed


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or the old one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb") as file:  # never through a link that somebody left there
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """A run is written inside its own folder, wherever a stranger's links in it may point."""
    for name in names:
        if (folder / name).is_symlink():
            raise JournalError(f"{folder / name} is a symbolic link; a run is written only inside its own folder")


def write_all(file: int, data: bytes) -> None:
    """os.write until everything is handed over."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


@contextlib.contextmanager
def explained(path: Path, kind: type[Exception] = JournalError) -> Iterator[None]:
    """Operating-system errors as one line; a run that fails to write can be resumed."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        again = f"; free space or fix it, then continue with --resume {path.parent}" if kind is RunFailed else ""
        raise kind(f"{path}: {reason}{again}") from None


def finite(value: Any) -> Any:
    """JSON without NaN: other programs read these lines too."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
