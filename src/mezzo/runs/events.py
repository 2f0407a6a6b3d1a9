"""Events of a run, passed to the run folder first, then to the observer, the trackers and the health checks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mezzo.errors import StopTraining
from mezzo.runs.folder import Folder
from mezzo.runs.health import Health
from mezzo.runs.trackers import Trackers

Observer = Callable[[str, dict[str, Any]], None]


@dataclass
class Events:
    """Call it with an event and its values; the seconds since the start are added. Each finding of `health` becomes an event
    `warning`."""

    folder: Folder
    observe: Observer
    health: Health
    trackers: Trackers = field(default_factory=Trackers)
    warnings: list[str] = field(default_factory=list)
    stop_reason: str = ""
    """Why the run should end after the current step; empty while it should not."""
    start_time: float = field(default_factory=time.monotonic)

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        values = {"seconds": round(time.monotonic() - self.start_time, 3), **values}
        self.folder.note(event, values)
        try:
            self.observe(event, values)
        except StopTraining as stop:
            self.stop_reason = str(stop) or "stopped by its observer"
        if event == "warning":
            self.warnings.append(str(values["text"]))
        for text in self.trackers.log(event, values):
            self.warn(int(values.get("step", 0)), text)
        for finding in self.health.watch(event, values):
            self.warn(finding.step, finding.text, finding.kind)

    def warn(self, step: int, text: str, kind: str = "note") -> None:
        self("warning", {"step": step, "kind": kind, "text": text})

    def remember(self, earlier: Iterable[dict[str, Any]]) -> float:
        """Replay the events of a resumed run to the health checks, so that no finding is reported twice. Returns the seconds
        it had taken."""
        seconds = 0.0
        for entry in earlier:
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):  # a line that was edited by hand
                list(self.health.watch(str(entry.get("event")), entry))
                seconds = float(entry["seconds"]) if entry.get("event") == "result" else seconds
        return seconds
