"""Descendants of a process, and the addresses on which processes listen, as Linux reports them in /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.processes import patience


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    pids, generation = [], [pid]
    while generation:
        generation = [child for child, parent in parents.items() if parent in generation]
        pids += generation
    return pids


def worker_pids(driver: int) -> list[int]:
    """Workers are the children of the process starter, which is a child of the driver."""
    children = {int(child) for child in Path(f"/proc/{driver}/task/{driver}/children").read_text().split()}
    return [pid for pid in descendants(driver) if pid not in children]


def torchrun_rank(pid: int) -> int | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), None)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_within(pids: list[int], seconds: float = 30) -> bool:
    """Wait for processes to end; False if one is still alive after that time, which is longer on a slow machine."""
    deadline = time.monotonic() + patience(seconds)
    while time.monotonic() < deadline:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""127.0.0.1, the same as an IPv6 address, and ::1, as the kernel writes them."""


def listening_addresses(pids: list[int]) -> list[str]:
    """Local addresses of the TCP sockets on which these processes listen."""
    inodes = set()
    for pid in pids:
        try:
            targets = [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {target[8:-1] for target in targets if target.startswith("socket:[")}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.append(fields[1].split(":")[0])
    return addresses
