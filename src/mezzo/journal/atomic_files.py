"""Files that are complete or absent, and operating-system errors as one line."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mezzo.errors import JournalError, RunFailed


def write_atomically(path: Path, data: bytes | Iterable[bytes | int]) -> None:
    """Write a file so that readers see the new content or the old, never a part. A number stands for a hole of so many bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)  # never through an existing link
            try:
                for part in (data,) if isinstance(data, bytes) else data:
                    if isinstance(part, int):
                        os.ftruncate(file, os.lseek(file, part, os.SEEK_CUR))
                    else:
                        write_all(file, part)
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove what a writer that was killed left in a folder. Only the process that holds the run's lock may call it."""
    for path in (folder, folder / "snapshots"):
        with contextlib.suppress(OSError):
            for name in os.listdir(path):
                if name.startswith(".") and name.endswith(".tmp"):
                    (path / name).unlink()


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse symbolic links in a run folder: a run writes only inside its own folder."""
    for name in names:
        if (folder / name).is_symlink():
            raise JournalError(f"{folder / name} is a symbolic link; a run is written only inside its own folder")


def write_all(file: int, data: bytes) -> None:
    """os.write until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


@contextlib.contextmanager
def explain_os_errors(path: Path, kind: type[Exception] = JournalError) -> Iterator[None]:
    """Raise operating-system errors as one line; with RunFailed it says how to resume."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        again = (
            f"; free space or fix it, then continue with --resume {shlex.quote(str(path.parent))}"
            if kind is RunFailed
            else ""
        )
        raise kind(f"{path}: {reason}{again}") from None


def json_safe(value: Any) -> Any:
    """A copy for JSON: numbers that are not finite as text, because other programs read these lines."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, dict):
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(inner) for inner in value]
    return value
