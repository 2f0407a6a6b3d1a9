"""The engine of a driver whose workers come and go: local processes or Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mezzo.engines.microbatch import WorkUnit, split_into_units
from mezzo.parallel.engine import WorkersEngine
from mezzo.parallel.messages import Failed, Post
from mezzo.parallel.scheduler import Pace, Shift
from mezzo.parallel.stats import Cost
from mezzo.parallel.supervisor import START_SECONDS, Crew, Member, error_of
from mezzo.parallel.transports.base import Transport
from mezzo.types import Batch, Probe, Scores, Update


class PoolEngine(WorkersEngine):
    """Units go to whoever is free; a worker that dies, hangs or is late loses its units to others."""

    def __init__(
        self, transport: Transport, post: Post, workers: int, timeout: float | None = None, check_every: int = 100
    ) -> None:
        cost = Cost()
        self.pace = Pace(timeout)
        self.crew = Crew(transport, post, workers, cost)
        self._wanted: Callable[[], int | None] = lambda: None
        try:
            super().__init__(self.crew.wait_until_open(), cost, self.crew.log, check_every)
        except BaseException:
            self.close()
            raise

    def join(self, snapshots: str, report: Callable[[str], None], wanted: Callable[[], int | None]) -> None:
        self.crew.snapshots, self.crew.report, self._wanted = snapshots, report, wanted

    def go_to(self, updates: Sequence[Update], marks: Mapping[int, str], snapshots: str | None) -> None:
        self.crew.follow(updates, marks, snapshots)
        for member in self.crew.free:
            self.crew.order(member, "move", (), START_SECONDS)

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        self._adjust()
        return super().score(batch, probes)

    def answers(self, question: str, batch: Batch, probes: Sequence[Probe], *extra: Any) -> dict[WorkUnit, Any]:
        self.cost.begin(training=any(probe.terms for probe in probes))
        works = split_into_units(batch, len(probes), self.micro_batch)
        cut = lambda chosen: self.pieces(batch, probes, chosen)  # noqa: E731
        found = Shift(self.crew, self.pace, self.cost, question, works, cut, (self.micro_batch, *extra)).run()
        self.cost.end(len(self.crew.up()))
        return found

    def one(self, question: str, *values: Any) -> Any:
        while True:
            member = self._free()[0]
            if member in (found := self._asked([member], question, values)):
                return found[member]

    def all(self, question: str, *values: Any) -> dict[Any, Any]:
        """Of those that have nothing else to do, and of one at least."""
        while not (found := self._asked(self._free(), question, values)):
            pass
        return found

    def rebuild(self, worker: Member, why: str) -> None:
        self.crew.lose(worker, f"is rebuilt: {why}", counts=False)

    def describe(self) -> dict[str, Any]:
        return {**self.facts.describe, "workers": self.crew.wanted}

    def total_cost(self) -> dict[str, Any]:
        return self.cost.summary(self.crew.wanted)

    def close(self) -> None:
        self.crew.close()

    def _free(self) -> list[Member]:
        while not (free := self.crew.free):
            self.crew.staff()
            self._listen()
        return free

    def _asked(self, members: Sequence[Member], question: str, values: tuple[Any, ...]) -> dict[Member, Any]:
        found: dict[Member, Any] = {}
        ask = object()
        for member in members:
            self.crew.order(member, question, values, self.pace.timeout or START_SECONDS, ask)
        while any(member.job is ask for member in self.crew.members):
            for member, job, reply in self._listen():
                if job is ask and isinstance(reply, Failed) and not reply.fatal:
                    raise error_of(reply)
                if job is ask and member in self.crew.members:
                    found[member] = reply.value
        return found

    def _listen(self) -> list[tuple[Member, Any, Any]]:
        heard = [(member, job, reply) for member, _, job, reply in self.crew.replies(0.5)]
        self.crew.overdue()
        return heard

    def _adjust(self) -> None:
        """As many workers as the run folder asks for."""
        wanted = self._wanted()
        if wanted is not None and wanted != self.crew.wanted:
            self.crew.report(f"{wanted} workers are wanted from now on; there were {self.crew.wanted}")
            self.crew.wanted = wanted
        self.crew.staff()
