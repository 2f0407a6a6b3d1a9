"""Names that a client gives to its adapters and weights: they tell the next client whether their process is gone."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "mezzo-"
# No adapter is in use for that many seconds: it serves one batch, and one request takes a quarter of that at most.
LONGEST_USE = 3600
NAME = re.compile(r"mezzo-([0-9a-f]{8})-([0-9]+)-([0-9a-f]+)(?:\.([0-9a-f]+)\..*)?")


def name_client() -> str:
    """A name of this process: its machine, its number there and the time."""
    return f"{PREFIX}{_machine()}-{os.getpid()}-{time.time_ns() // 1000:x}"


def name_adapter(client: str, number: int) -> str:
    return f"{client}.{int(time.time()):x}.{number}"


def is_gone(name: str) -> bool:
    """True if the client of a name ran on this machine and runs no more; False if it runs, or nothing is known of it."""
    found = NAME.fullmatch(name)
    if not found or found[1] != _machine():
        return False
    try:
        os.kill(int(found[2]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def is_leftover(adapter: str) -> bool:
    """True for an adapter whose client is gone, or that is too old to be in use."""
    found = NAME.fullmatch(adapter)
    return bool(found and found[4]) and (is_gone(adapter) or time.time() - int(found[4], 16) > LONGEST_USE)  # type: ignore[index]


def _machine() -> str:
    """A name of the machine since it started, and of the container: process numbers mean something only there."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:8]
