"""Weights = base + journal: bring an engine to any position of a journal, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mezzo.engines.base import Engine, Workers
from mezzo.errors import JournalError, join_names
from mezzo.journal.atomic_files import explain_os_errors
from mezzo.journal.content import Content, Records
from mezzo.replay.prefix_start import restore_prefix_start
from mezzo.replay.snapshots import Snapshots, Tensors
from mezzo.types import Update

CHUNK = 1000  # updates passed to the engine at once


def check_base(engine: Engine, content: Content) -> None:
    """Refuse to replay a journal on a model it was not written for; put a fresh engine at the run's initial values."""
    header = content.header
    if engine.base_digest != header.base:
        raise JournalError(
            f"{content.path} was written for a base model with digest {header.base[:12]}…, this one has "
            f"{engine.base_digest[:12]}…: the base model has changed"
        )
    if [(t.name, t.shape) for t in engine.trained] != [(t.name, t.shape) for t in header.tensors]:
        raise JournalError(f"{content.path} trains other tensors than this configuration selects")
    restore_prefix_start(engine, content)


def bring_to(engine: Engine, content: Content, at: int, snapshots: Snapshots | None = None) -> None:
    """Bring a fresh engine from the base to the weights after `at` steps, from the newest valid snapshot if there is one."""
    if not 0 <= at <= content.steps:
        raise JournalError(f"the journal holds steps 0 to {content.steps}; there is no step {at}")
    if not content.header.rebuilds:
        _load_kept(engine, content, at, snapshots)
    elif isinstance(engine, Workers):
        updates = [record.update for record in content.records.read(0, at)]
        engine.replay_journal(updates, content.marks, str(snapshots.folder) if snapshots else None)
    else:
        start = _from_snapshot(engine, at, content.marks, snapshots) if snapshots else 0
        _apply(engine, content.records, start, at)


def _load_kept(engine: Engine, content: Content, at: int, snapshots: Snapshots | None) -> None:
    """The weights of a gradient run, which its journal does not determine."""
    if at == 0 or (snapshots and load_snapshot(engine, at, content.marks, snapshots)):
        return
    kept = sorted(snapshots.steps()) if snapshots else []
    which = f"only those of steps {join_names([0, *kept])} are kept" if snapshots else "they are in its run folder"
    raise JournalError(f"the weights of step {at} of a gradient run cannot be rebuilt: {which}")


def replay(
    engine: Engine, updates: Sequence[Update], marks: Mapping[int, str], snapshots: Snapshots | None = None
) -> None:
    """Apply a journal's updates from the base; with snapshots, only those after the newest valid one."""
    start = _from_snapshot(engine, len(updates), marks, snapshots) if snapshots else 0
    for first in range(start, len(updates), CHUNK):
        engine.apply(updates[first : first + CHUNK])


def _apply(engine: Engine, records: Records, start: int, stop: int) -> None:
    """Apply steps of a journal, a part of them in memory at a time."""
    updates = (record.update for record in records.read(start, stop))
    while part := list(islice(updates, CHUNK)):
        engine.apply(part)


def _from_snapshot(engine: Engine, at: int, marks: Mapping[int, str], snapshots: Snapshots) -> int:
    """Load the newest snapshot that the journal confirms; the step it stands for, 0 where there is none."""
    initial: Tensors | None = None
    with explain_os_errors(snapshots.folder):
        steps = snapshots.steps()
    for step in steps:
        if step <= at and step in marks:
            initial = initial or engine.state()
            if load_snapshot(engine, step, marks, snapshots):
                return step
    if initial:
        engine.load_state(initial)
    return 0


def load_snapshot(engine: Engine, step: int, marks: Mapping[int, str], snapshots: Snapshots) -> bool:
    """Load the snapshot of a step. False where it is missing, broken, or not what the journal recorded at that step: its own
    digest is not enough, and the engine's weights are then undefined."""
    if step not in marks or (found := snapshots.load(step, engine.trained)) is None:
        return False
    try:
        engine.load_state(found)
    except JournalError:
        return False
    return engine.digest() == marks[step]


@dataclass(frozen=True, slots=True, repr=False)
class Verified:
    """What `mezzo verify` found: the digest of the rebuilt weights against the recorded one."""

    steps: int
    digest: str
    recorded: str
    torn: int
    kept: tuple[int, ...] = ()
    """The steps whose weights were compared, where a gradient run keeps them because its journal cannot rebuild them."""
    unchecked: int = 0
    """Steps after the last recorded digest."""
    copy: Path | None = None
    """Where a repair has put what it cut."""

    @property
    def ok(self) -> bool:
        return self.digest == self.recorded

    def __str__(self) -> str:
        torn = f" ({self.torn} torn bytes at the end are ignored)" if self.torn else ""
        if self.ok and self.kept:
            return (
                f"ok: the kept weights of steps {join_names(self.kept)} are as recorded; a gradient run's journal has no moves "
                f"to rebuild them from{torn}"
            )
        torn += f" (the damaged end of the journal is now in {self.copy})" if self.copy else ""
        if self.ok and self.unchecked:
            first, last = self.steps + 1, self.steps + self.unchecked
            which = f"step {last} comes" if first == last else f"steps {first} to {last} come"
            torn = f"; {which} after the last recorded digest and could not be checked{torn}"
        if self.ok:
            return f"ok: {self.steps} steps rebuild to {self.digest[:16]}, as recorded{torn}"
        return f"MISMATCH at step {self.steps}: rebuilt {self.digest[:16]}, recorded {self.recorded[:16]}{torn}"

    def __repr__(self) -> str:
        return f"<{self}>"


def verify(engine: Engine, content: Content, kept: Snapshots | None = None) -> Verified:
    """Rebuild from the base model alone, without snapshots, and compare at every recorded mark. Of a gradient run, only the
    weights that it `kept` can be compared."""
    check_base(engine, content)
    if not content.header.rebuilds:
        return _verify_kept(engine, content, kept)
    marks = sorted(step for step in content.marks if step <= content.steps)
    if not marks:
        raise JournalError(
            f"{content.path} records no digest yet: the run was cut off before its first mark; resume it first"
        )
    position, digest = 0, ""
    for mark in marks:
        _apply(engine, content.records, position, mark)
        position, digest = mark, engine.digest()
        if digest != content.marks[mark]:
            break
    unchecked = content.steps - marks[-1]
    return Verified(position, digest, content.marks[position], content.torn, unchecked=unchecked)


def _verify_kept(engine: Engine, content: Content, snapshots: Snapshots | None) -> Verified:
    steps = tuple(step for step in sorted(snapshots.steps()) if step in content.marks) if snapshots else ()
    if not steps or snapshots is None:
        raise JournalError(
            f"{content.path}: a gradient run is verified by the weights in its run folder, and none are there"
        )
    for step in steps:
        if not load_snapshot(engine, step, content.marks, snapshots):
            return Verified(step, "damaged", content.marks[step], content.torn)
    return Verified(steps[-1], content.marks[steps[-1]], content.marks[steps[-1]], content.torn, kept=steps)
