"""What parallel work takes: bytes transferred, time that workers were idle, workers lost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mezzo.parallel.messages import UNIT_WORK


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
    _last_time: float = 0.0
    _last_totals: tuple[float, float, float] = (0, 0.0, 0.0)

    def start_request(self, is_training: bool) -> None:
        """Time counts only in training steps, and between two consecutive ones."""
        if not (is_training and self.is_training):
            self._last_time = time.perf_counter()
        self.is_training = is_training
        self.steps += is_training

    def add_bytes(self, count: int, kind: str | None) -> None:
        if kind in UNIT_WORK and self.is_training:
            self.training_bytes += count
        else:
            self.other_bytes += count

    def add_busy_time(self, seconds: float) -> None:
        if self.is_training:
            self.busy_seconds += seconds

    def finish_request(self, worker_count: int) -> None:
        now = time.perf_counter()
        if self.is_training:
            self.available_seconds += worker_count * (now - self._last_time)
        self._last_time = now

    def take_step(self) -> dict[str, Any]:
        """Metrics since the last call."""
        totals = (self.training_bytes, self.busy_seconds, self.available_seconds)
        byte_count, busy, available = (now - before for now, before in zip(totals, self._last_totals, strict=True))
        self._last_totals = totals
        return {"bytes": byte_count, "waiting": _idle_share(busy, available)}

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
