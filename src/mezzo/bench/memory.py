"""The memory that tensors take: counted by the CUDA allocator on a GPU, by torch's profiler on a CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class TensorMemory:
    """Bytes of tensors allocated inside the context: `allocated` when it ends, and `peak` at any moment.

    On a CPU the resident size of the process would be misleading: it keeps freed pages, and the next contender reuses them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated = self.peak = 0

    def __enter__(self) -> TensorMemory:
        if self.device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints to standard error
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.allocated = torch.cuda.memory_allocated(self.device) - self._before
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._profile.stop()
        for size in _allocation_sizes(self._profile):
            self.allocated += size
            self.peak = max(self.peak, self.allocated)


def _allocation_sizes(profiled: profile) -> list[int]:
    """Bytes of each allocation (negative: deallocation) in order of time."""
    results = profiled.profiler.kineto_results if profiled.profiler else None
    events: list[Any] = results.events() if results else []
    memory_events = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(memory_events, key=lambda event: event.start_ns())]
