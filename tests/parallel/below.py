"""Processes below another one, and the addresses on which processes listen, as Linux tells them."""

from __future__ import annotations

import os
import time
from pathlib import Path


def family(pid: int) -> list[int]:
    """All processes below one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, layer = [], [pid]
    while layer:
        layer = [child for child, parent in parents.items() if parent in layer]
        found += layer
    return found


def workers_of(pid: int) -> list[int]:
    """Workers are the children of the nursery, which is a child of the driver."""
    children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return [below for below in family(pid) if below not in children]


def rank_of(pid: int) -> int | None:
    """Which rank of torchrun a process is."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), None)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 30) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""127.0.0.1, the same as an IPv6 address, and ::1, as the kernel writes them."""


def listening(pids: list[int]) -> list[str]:
    """Local addresses of the TCP sockets on which these processes listen."""
    inodes = set()
    for pid in pids:
        try:
            names = [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {name[8:-1] for name in names if name.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found
