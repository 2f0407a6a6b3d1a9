"""What working in parallel costs: bytes that travelled, time that workers did not compute, workers that were lost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass
class Cost:
    """Counters of a run, and of the step since `step_line` was last asked."""

    bytes: int = 0
    """Orders and answers of training steps."""
    other_bytes: int = 0
    """Of everything else: starting workers, evaluation, snapshots."""
    steps: int = 0
    busy: float = 0.0
    span: float = 0.0
    lost: int = 0
    rebuilt: int = 0
    recomputed: int = 0
    late: int = 0
    training: bool = False
    """Whether what travels now belongs to a training step."""
    _step_bytes: int = 0
    _step_busy: float = 0.0
    _step_span: float = 0.0
    _mark: float = 0.0

    def begin(self, training: bool) -> None:
        """A scoring begins. Time counts in training steps only, and between two that follow each other."""
        if not (training and self.training):
            self._mark = time.perf_counter()
        self.training = training
        self.steps += training

    def moved(self, count: int, scoring: bool) -> None:
        if scoring and self.training:
            self.bytes += count
            self._step_bytes += count
        else:
            self.other_bytes += count

    def worked(self, seconds: float) -> None:
        if self.training:
            self.busy += seconds
            self._step_busy += seconds

    def end(self, workers: int) -> None:
        """A scoring is over; each of the workers has had that time."""
        now = time.perf_counter()
        if self.training:
            passed = workers * (now - self._mark)
            self.span += passed
            self._step_span += passed
        self._mark = now

    def step_line(self) -> dict[str, Any]:
        """For the metrics: what the last step took."""
        line = {"bytes": self._step_bytes, "waiting": _share(self._step_busy, self._step_span)}
        self._step_bytes, self._step_busy, self._step_span = 0, 0.0, 0.0
        return line

    def summary(self, workers: int) -> dict[str, Any]:
        return {
            "count": workers,
            "bytes_per_step": round(self.bytes / max(1, self.steps)),
            "other_bytes": self.other_bytes,
            "waiting": _share(self.busy, self.span),
            "lost": self.lost,
            "rebuilt": self.rebuilt,
            "recomputed_units": self.recomputed,
            "late_units": self.late,
        }


def _share(busy: float, span: float) -> float:
    return round(min(1.0, max(0.0, 1 - busy / span)), 4) if span > 0 else 0.0
