"""Memory in use where the models are: of the GPUs if one is used, else of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

MIB = 2**20


def in_use() -> float:
    """MiB now."""
    if (torch := _cuda()) is not None:
        return float(sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))) / MIB)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / MIB
    except (OSError, ValueError, IndexError):  # not Linux
        return peak()


def peak() -> float:
    """MiB at most so far."""
    if (torch := _cuda()) is not None:
        return float(sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) / MIB)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def _cuda() -> Any:
    """torch, if it is loaded and has touched a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None
