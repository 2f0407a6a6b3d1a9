"""What happens in a run, told to everybody who listens: the run folder first, then health, trackers and the observer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mezzo.runs.folder import Folder
from mezzo.runs.health import Health
from mezzo.runs.trackers import Trackers

Observer = Callable[[str, dict[str, Any]], None]


@dataclass
class Events:
    """Call it with an event and its values. What `health` finds becomes an event `warning` of its own."""

    folder: Folder
    observe: Observer
    health: Health
    trackers: Trackers = field(default_factory=Trackers)
    warnings: list[str] = field(default_factory=list)

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        self.folder.note(event, values)
        self.observe(event, values)
        if event == "warning":
            self.warnings.append(str(values["text"]))
        for text in self.trackers.tell(event, values):
            self.warn(int(values.get("step", 0)), text)
        for finding in self.health.see(event, values):
            self.warn(finding.step, finding.text, finding.kind)

    def warn(self, step: int, text: str, kind: str = "note") -> None:
        self("warning", {"step": step, "kind": kind, "text": text})

    def remember(self, earlier: Sequence[dict[str, Any]]) -> None:
        """What a resumed run had told before: it is not said twice."""
        for entry in earlier:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a line that somebody edited
                list(self.health.see(str(entry.get("event")), entry))
