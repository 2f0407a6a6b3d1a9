"""How far a run is, from its events: share done, loss, dev figure, pace and time left."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mezzo.evaluation.figures import format_figure

# Steps whose mean is the loss of spsa.
RECENT_STEPS = 50
# Pace and time left follow from so many marks, which are at least so many seconds apart.
MARKS, MARK_SECONDS = 12, 1.0


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a run was at some time."""

    time: float
    step: int
    share: float


@dataclass
class RunProgress:
    """Call it with the events of a run."""

    clock: Callable[[], float] = time.monotonic
    method: str = "spsa"
    steps: int | None = None
    budget: float | None = None
    seconds: float | None = None
    """Limits: steps, example-forwards, seconds."""
    step: int = 0
    spent: int = 0
    last_step: Mapping[str, Any] = field(default_factory=dict)
    dev: Mapping[str, Any] = field(default_factory=dict)
    """The last evaluation."""
    seen_steps: int = 0
    zero_slopes: int = 0
    _began: float | None = None
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))

    def __call__(self, event: str, values: Mapping[str, Any]) -> None:
        if event == "start":
            limits = (values[name] for name in ("steps", "budget", "budget_seconds"))
            steps, self.budget, self.seconds = (None if limit is None else float(limit) for limit in limits)
            self.method, self.steps = str(values["method"]), None if steps is None else int(steps)
            self.step, self.spent = int(values["step"]), int(values["spent"])
        if event == "evaluation":
            self.dev = values
        if event == "step":
            self._see_step(values)
        elif not self.seen_steps:  # all that happens before the first step
            self._began = self.clock()
            self._marks = deque([self._mark()], maxlen=MARKS)

    def _see_step(self, values: Mapping[str, Any]) -> None:
        self.last_step, self.step, self.spent = values, int(values["step"]) + 1, int(values["spent"])
        self.seen_steps += 1
        self.zero_slopes += not any(values["slopes"])
        if math.isfinite(loss := float(values["loss"])):
            self._losses.append(loss)
        mark = self._mark()
        if self.seen_steps == 2:
            self._marks.popleft()  # the first step loads and warms up: it counts only while there is no other
        if self.seen_steps <= 2 or mark.time - self._marks[-1].time >= MARK_SECONDS:
            self._marks.append(mark)

    def _mark(self) -> Mark:
        shares = [done / limit for done, limit in ((self.step, self.steps), (self.spent, self.budget)) if limit]
        return Mark(self.clock(), self.step, max(shares, default=0.0))

    @property
    def share(self) -> float:
        """How much of the run is done, by whichever limit is nearest."""
        by_time = (self.clock() - self._began) / self.seconds if self.seconds and self._began is not None else 0.0
        return min(1.0, max(self._mark().share, by_time))

    @property
    def seconds_left(self) -> float | None:
        """By the recent steps, and less with every second of the step that is running; None while it is not known."""
        left = []
        if self.seconds and self._began is not None:
            left.append(self._began + self.seconds - self.clock())
        first, last = (self._marks[0], self._marks[-1]) if self._marks else (None, None)
        if first and last and last.share > first.share:
            per_share = (last.time - first.time) / (last.share - first.share)
            left.append(last.time + (1 - last.share) * per_share - self.clock())
        return max(0.0, min(left)) if left and self.share < 1 else None

    @property
    def steps_per_second(self) -> float:
        """By the recent steps; 0 while it is not known."""
        if len(self._marks) < 2 or (took := self._marks[-1].time - self._marks[0].time) <= 0:
            return 0.0
        return (self._marks[-1].step - self._marks[0].step) / took

    # ---- as text

    @property
    def place(self) -> str:
        if self.budget and not self.steps:
            return f"{self.spent / 1000:.0f}k/{self.budget / 1000:.0f}k"
        return f"{self.step}/{self.steps}" if self.steps else f"step {self.step}"

    @property
    def loss(self) -> str:
        """Of solve the last step's loss on the judging examples, before its move and about what it is after it; of spsa a mean of
        recent steps."""
        before, after = (self.last_step.get(name) for name in ("before", "after"))
        if before is not None and after is not None:
            moved = "ridge" in self.last_step  # without a move it is infinite, and left out
            return f"loss {before:.4f} → ≈{after:.4f}" if moved else f"loss {before:.4f}, not moved"
        if "reward" in self.last_step:
            return self._reward
        return f"loss {sum(self._losses) / len(self._losses):.4f}" if self._losses else ""

    @property
    def _reward(self) -> str:
        """Of es: the last step's mean reward, the size of its slopes with their standard error, and the failed calls."""
        reward, slope, error, failed = (
            self.last_step.get(name) for name in ("reward", "slope", "slope_error", "failed")
        )
        parts = [f"reward {reward:.4g}", f"slopes {slope:.2g}" + (f" ± {error:.2g}" if error is not None else "")]
        return "  ".join(parts + ([f"failed {failed:.0f}"] if failed else []))

    @property
    def dev_figure(self) -> str:
        return f"dev {format_figure(self.dev['value'], str(self.dev['metric']))}" if self.dev else ""

    @property
    def time_left(self) -> str:
        return f"{format_seconds(self.seconds_left)} left" if self.seconds_left is not None else ""

    @property
    def pace(self) -> str:
        rate = self.steps_per_second
        return f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.2g} s/step" if rate else ""

    @property
    def token_pace(self) -> str:
        """Of generated texts."""
        tokens = self.steps_per_second * self.last_step.get("tokens", 0)
        return f"{tokens:,.0f} tokens/s" if tokens else ""

    @property
    def zero_slope_share(self) -> str:
        known = self.method in ("spsa", "es") and self.seen_steps
        return f"zero slopes {self.zero_slopes / self.seen_steps:.0%}" if known else ""

    @property
    def memory(self) -> str:
        return f"{mib:,} MiB" if (mib := self.last_step.get("memory_mib")) else ""

    def figures(self) -> str:
        """What follows the place of a run, the most important first."""
        parts = (self.loss, self.time_left, self.pace, self.token_pace, self.zero_slope_share, self.memory)
        return "  ".join(part for part in parts if part)


def replay_progress(events: Iterable[Mapping[str, Any]], since_last: float = 0.0) -> RunProgress:
    """The progress that a run's recorded events tell, some seconds after the last of them: what its terminal shows."""
    now = 0.0

    def clock() -> float:
        return now

    progress = RunProgress(clock)
    for values in events:
        event = values.get("event")
        try:
            if event == "start":
                now, progress = 0.0, RunProgress(clock)
            now = now if event == "result" else max(now, float(values.get("seconds", now)))
            figures = {
                name: float(values[name])
                for name in ("before", "after", "ridge", "reward", "slope", "slope_error", "failed", "tokens")
                if name in values
            }
            progress(str(event), {**values, **figures})
        except (KeyError, TypeError, ValueError, OverflowError):  # a line that was edited by hand, or a stranger's
            continue
    now += since_last
    return progress


def format_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
