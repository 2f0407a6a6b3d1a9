"""What parallel work takes: bytes transferred, time that workers were idle, workers lost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass
class WorkStats:
    """Counters of a run, and of the step since `take_step` was last called."""

    training_bytes: int = 0
    """Requests and replies of training steps."""
    other_bytes: int = 0
    """Everything else: starting workers, evaluation, snapshots."""
    steps: int = 0
    busy_seconds: float = 0.0
    available_seconds: float = 0.0
    """Wall time multiplied by the number of workers."""
    lost: int = 0
    rebuilt: int = 0
    recomputed_units: int = 0
    late_units: int = 0
    is_training: bool = False
    """Whether what is transferred now belongs to a training step."""
    _step_bytes: int = 0
    _step_busy: float = 0.0
    _step_available: float = 0.0
    _last_time: float = 0.0

    def start_request(self, is_training: bool) -> None:
        """Time counts only in training steps, and between two consecutive ones."""
        if not (is_training and self.is_training):
            self._last_time = time.perf_counter()
        self.is_training = is_training
        self.steps += is_training

    def add_bytes(self, count: int, is_unit_work: bool) -> None:
        if is_unit_work and self.is_training:
            self.training_bytes += count
            self._step_bytes += count
        else:
            self.other_bytes += count

    def add_busy_time(self, seconds: float) -> None:
        if self.is_training:
            self.busy_seconds += seconds
            self._step_busy += seconds

    def finish_request(self, worker_count: int) -> None:
        now = time.perf_counter()
        if self.is_training:
            available = worker_count * (now - self._last_time)
            self.available_seconds += available
            self._step_available += available
        self._last_time = now

    def take_step(self) -> dict[str, Any]:
        """Metrics of the last step, which are reset."""
        metrics = {"bytes": self._step_bytes, "waiting": _idle_share(self._step_busy, self._step_available)}
        self._step_bytes, self._step_busy, self._step_available = 0, 0.0, 0.0
        return metrics

    def summary(self, worker_count: int) -> dict[str, Any]:
        return {
            "count": worker_count,
            "bytes_per_step": round(self.training_bytes / max(1, self.steps)),
            "other_bytes": self.other_bytes,
            "waiting": _idle_share(self.busy_seconds, self.available_seconds),
            "lost": self.lost,
            "rebuilt": self.rebuilt,
            "recomputed_units": self.recomputed_units,
            "late_units": self.late_units,
        }


def _idle_share(busy: float, available: float) -> float:
    return round(min(1.0, max(0.0, 1 - busy / available)), 4) if available > 0 else 0.0
