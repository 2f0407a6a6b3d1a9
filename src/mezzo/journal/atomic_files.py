"""Files that are complete or absent, and operating-system errors as one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mezzo.errors import JournalError, RunFailed

# In a temporary folder, what its writer has locked while it lives, and what it writes. A temporary file is its own lock.
LOCK, CONTENT = "lock", "content"


def write_atomically(path: Path, data: bytes | Iterable[bytes | int]) -> None:
    """Write a file so that readers see the new content or the old, never a part. A number stands for a hole of so many bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)
            with _created(temporary) as file:
                for part in (data,) if isinstance(data, bytes) else data:
                    if isinstance(part, int):
                        os.ftruncate(file, os.lseek(file, part, os.SEEK_CUR))
                    else:
                        write_all(file, part)
                os.fsync(file)
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    _remove_dead(path.parent, path.name)


@contextlib.contextmanager
def write_folder_atomically(path: Path) -> Iterator[Path]:
    """A folder to be filled. It becomes `path`, which is absent or empty, when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A fresh name: nobody can have put a link there.
    temporary = Path(tempfile.mkdtemp(".tmp", f".{path.name}.", path.parent))
    try:
        with _created(temporary / LOCK):
            folder = temporary / CONTENT
            folder.mkdir()
            folder.chmod(0o755)
            yield folder
            for each in (*folder.rglob("*"), folder):
                sync(each)
            folder.replace(path)
    finally:
        with contextlib.suppress(OSError):
            _remove_folder(temporary)
    _remove_dead(path.parent, path.name)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    """A new file, never an existing link, and locked until it is closed, on disks that have locks."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    finally:
        os.close(file)


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that were killed left in a run folder."""
    for path in (folder, folder / "snapshots"):
        _remove_dead(path)


def _remove_dead(folder: Path, of: str = "") -> None:
    """Remove the temporary files and folders, of one name or of all, whose writers no longer live. They are only in the way."""
    pattern = re.compile(rf"\.{re.escape(of)}\.\w+\.tmp" if of else r"\..*\.tmp", re.DOTALL)
    with contextlib.suppress(OSError):
        for name in filter(pattern.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):
                _remove_unlocked(folder / name)


def _remove_unlocked(path: Path) -> None:
    """Remove a temporary file or folder, unless its writer lives; a folder without a lock only if it is empty."""
    is_folder = path.is_dir() and not path.is_symlink()
    try:
        file = os.open(path / LOCK if is_folder else path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        path.rmdir()
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_folder(path) if is_folder else path.unlink()
    finally:
        os.close(file)


def _remove_folder(path: Path) -> None:
    """Remove a temporary folder, its lock last: without it nobody could tell that its writer is gone."""
    if (path / CONTENT).exists():
        shutil.rmtree(path / CONTENT)
    shutil.rmtree(path)


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
