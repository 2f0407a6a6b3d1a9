"""The journal's updates as the driver knows them: what every worker must have applied before it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mezzo.parallel.messages import ReplayRange, Request, RequestKind, serialize
from mezzo.types import Update


class UpdateLog:
    """All updates so far, and the marks and snapshots that let a new worker skip most of them."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.marks: dict[int, str] = {}
        self.snapshot_folder: str | None = None

    def __len__(self) -> int:
        return len(self.updates)

    def replace(self, updates: Sequence[Update], marks: Mapping[int, str], snapshot_folder: str | None) -> None:
        """Follow another history from now on: a resumed run's, or that of an earlier checkpoint."""
        self.updates[:], self.marks = updates, dict(marks)
        self.snapshot_folder = snapshot_folder or self.snapshot_folder

    def request(self, position: int, kind: RequestKind, arguments: tuple[Any, ...]) -> bytes:
        """A serialized request to a worker at `position`, with the updates that it lacks."""
        return serialize(Request(self._range_from(position), kind, arguments))

    def _range_from(self, position: int) -> ReplayRange:
        """What brings a worker at `position` up to date; from step 0 if it is ahead of the log."""
        if 0 < position <= len(self.updates):
            return ReplayRange(position, tuple(self.updates[position:]))
        marks = dict(self.marks) if self.snapshot_folder else {}
        return ReplayRange(0, tuple(self.updates), marks, self.snapshot_folder)
