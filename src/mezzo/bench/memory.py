"""The memory that tensors take: counted by the CUDA allocator on a GPU, by torch's profiler on a CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class Memory:
    """Bytes of tensors made inside the context: `kept` at its end, and the most at any moment, `peak`.

    On a CPU the resident size of the process would say little: freed pages stay with it, and the next contender uses them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept = self.peak = 0

    def __enter__(self) -> Memory:
        if self.device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on standard error
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.kept = torch.cuda.memory_allocated(self.device) - self._before
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._profile.stop()
        for size in _sizes(self._profile):
            self.kept += size
            self.peak = max(self.peak, self.kept)


def _sizes(found: profile) -> list[int]:
    """Bytes taken (or, negative, given back) in order of time."""
    results = found.profiler.kineto_results if found.profiler else None
    every: list[Any] = results.events() if results else []
    events = [event for event in every if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
