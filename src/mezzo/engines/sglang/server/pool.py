"""The servers of a run: those that answer, and those that were lost and may come back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from mezzo.engines.sglang.server.replica import RESUME, SHORT_LOOK, Replica, ServerLost
from mezzo.errors import MezzoError, RunFailed

# Seconds between two looks at a lost server: the first, and the longest.
FIRST_LOOK, LONGEST_LOOK = 2.0, 60.0
T = TypeVar("T")


@dataclass
class Absence:
    """A lost server: why, and when to look at it again."""

    reason: str
    next_look: float
    interval: float = FIRST_LOOK


class Pool:
    """Servers that share the work. `admit` checks one and brings it to the run's weights; it raises a MezzoError otherwise."""

    def __init__(self, replicas: list[Replica], admit: Callable[[Replica], None], patience: float) -> None:
        self.live, self.first, self.admit, self.patience = list(replicas), replicas[0], admit, patience
        self.absent: dict[Replica, Absence] = {}
        self.report: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
        self._threads = ThreadPoolExecutor(len(replicas))

    def servers(self) -> list[Replica]:
        """The servers that answer. Lost ones are taken back where they have returned; without any, wait for the first."""
        self._look_for_absent()
        end = time.monotonic() + self.patience
        if not self.live:
            self.report(f"no server answers: waiting up to {self.patience:.0f} seconds for one to come back")
        while not self.live:
            if time.monotonic() > end:
                reasons = "; ".join(absence.reason for absence in self.absent.values())
                raise RunFailed(reasons if RESUME in reasons else f"{reasons}. {RESUME}")
            time.sleep(0.2)
            self._look_for_absent()
        return list(self.live)

    def run(self, tasks: list[tuple[Replica, Callable[[], T]]]) -> list[T | None]:
        """The results of tasks that run at the same time; None where the server was lost."""
        futures = [self._threads.submit(task) for _, task in tasks]
        results: list[T | None] = []
        failures: list[MezzoError] = []
        for (replica, _), future in zip(tasks, futures, strict=True):
            try:
                results.append(future.result())
            except ServerLost as error:
                self._set_aside(replica, error)
                results.append(None)
            except MezzoError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return results

    def on_all(self, task: Callable[[Replica], None]) -> None:
        """Do something on every server that answers."""
        self.run([(replica, lambda replica=replica: task(replica)) for replica in list(self.live)])  # type: ignore[misc]

    def close(self) -> None:
        self._threads.shutdown()

    def _set_aside(self, replica: Replica, error: ServerLost) -> None:
        if replica in self.live:
            self.live.remove(replica)
        self.absent[replica] = Absence(str(error), time.monotonic() + FIRST_LOOK)
        self.report(f"lost {replica.url}: {len(self.live)} of {len(self.live) + len(self.absent)} servers are left")

    def _look_for_absent(self) -> None:
        for replica, absence in list(self.absent.items()):
            if time.monotonic() < absence.next_look:
                continue
            try:
                if not replica.is_there(SHORT_LOOK):
                    raise ServerLost(absence.reason)
                self.admit(replica)
            except MezzoError as error:
                absence.reason = str(error)
                absence.interval = min(2 * absence.interval, LONGEST_LOOK)
                absence.next_look = time.monotonic() + absence.interval
                continue
            del self.absent[replica]
            self.live.append(replica)
            self.report(f"{replica.url} is back")
