"""One shift: units of work handed out, late ones handed out again, doubtful answers asked for twice, until all are in."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mezzo.engines.microbatch import EngineCall, WorkUnit, candidate_count
from mezzo.parallel.consensus import are_numbers, well_formed
from mezzo.parallel.messages import Answer, Failed
from mezzo.parallel.stats import Cost
from mezzo.parallel.supervisor import Crew, Member, error_of
from mezzo.types import Batch

LATE, LATE_SECONDS = 2.0, 0.25
"""A unit is offered to others after this many times its expected time, and not before these seconds. Only those take it who
have nothing else to do: what waits in the queue comes first."""
LOST, LOST_SECONDS = 40.0, 60.0
"""And its worker is ended after these, unless --worker-timeout says otherwise."""
FIRST_SECONDS = 600.0
"""The limit while nothing has been measured."""
OPINIONS = 3
"""Answers that are no numbers, after which one is believed although no two agree."""


class Pace:
    """How long a token takes: the median over recent answers, so that one slow worker does not set the measure."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._seen: deque[float] = deque(maxlen=64)

    def saw(self, seconds: float, cost: int) -> None:
        self._seen.append(seconds / max(1, cost))

    def expected(self, cost: int) -> float | None:
        return statistics.median(self._seen) * cost if self._seen else None

    def late(self, cost: int) -> float:
        expected = self.expected(cost)
        return self.limit(cost) if expected is None else max(LATE_SECONDS, LATE * expected)

    def limit(self, cost: int) -> float:
        if self.timeout is not None:
            return self.timeout
        expected = self.expected(cost)
        return FIRST_SECONDS if expected is None else max(LOST_SECONDS, LOST * expected)


@dataclass(eq=False)
class Job:
    """What one member was given: some units, as the pieces its engine computes."""

    works: frozenset[WorkUnit]
    pieces: list[EngineCall]
    cost: int
    late: float
    offered: bool = False


@dataclass
class Doubt:
    """Answers to one unit that are no numbers, by who gave them."""

    answers: list[tuple[Member, np.ndarray[Any, Any]]] = field(default_factory=list)


class Shift:
    """Gets every unit of one question done by whoever is there."""

    def __init__(
        self,
        crew: Crew,
        pace: Pace,
        cost: Cost,
        question: str,
        works: Sequence[WorkUnit],
        cut: Callable[[Sequence[WorkUnit]], list[EngineCall]],
        extra: tuple[Any, ...],
    ) -> None:
        self.crew, self.pace, self.cost = crew, pace, cost
        self.question, self.cut, self.extra = question, cut, extra
        self.order = {work: place for place, work in enumerate(works)}
        self.open = set(works)
        # The longest first: what is left for the end is short.
        self.waiting = deque(reversed(works))
        self.queued = set(works)
        self.given: dict[Member, Job] = {}
        self.found: dict[WorkUnit, Any] = {}
        self.doubts: dict[WorkUnit, Doubt] = {}
        self.failures: dict[WorkUnit, int] = {}

    def run(self) -> dict[WorkUnit, Any]:
        """What was found, unit by unit."""
        while self.open:
            self.crew.staff()
            self._hand_out()
            for member, _, job, reply in self.crew.replies(self._patience()):
                if self.given.get(member) is job and isinstance(job, Job):
                    del self.given[member]
                    self._received(member, job, reply)
                    self._take_back(job)
            self._recover()
        return self.found

    # ---- out

    def _hand_out(self) -> None:
        shares = 2 * max(1, len(self.crew.up()))
        for member in self.crew.free:
            if not self.waiting:
                return
            if works := self._next(member, max(1, len(self.waiting) // shares)):
                pieces = self.cut(works)
                cost = sum(piece.cost for piece in pieces)
                job = self.given[member] = Job(frozenset(works), pieces, cost, self.pace.late(cost))
                self.crew.order(member, self.question, (pieces, *self.extra), self.pace.limit(cost), job)

    def _next(self, member: Member, size: int) -> list[WorkUnit]:
        """Units for a member, as whole as they were cut: in their order."""
        chosen: list[WorkUnit] = []
        aside: list[WorkUnit] = []
        while self.waiting and len(chosen) < size:
            work = self.waiting.popleft()
            if work in self.open:
                (aside if self._answered_by(member, work) else chosen).append(work)
        self.waiting.extendleft(aside)
        self.queued.difference_update(chosen)
        return sorted(chosen, key=self.order.__getitem__)

    def _answered_by(self, member: Member, work: WorkUnit) -> bool:
        """A doubtful unit goes to somebody else, as long as there is somebody else."""
        given = [who for who, _ in self.doubts[work].answers] if work in self.doubts else []
        return member in given and any(other not in given for other in self.crew.members)

    def _patience(self) -> float:
        """Until the next unit is late."""
        due = [m.since + (m.limit if job.offered else job.late) for m, job in self.given.items()]
        return max(0.001, min([0.5, *(moment - time.monotonic() for moment in due)]))

    def _recover(self) -> None:
        """Offer what is late again, end who is silent, and take back what they had."""
        now = time.monotonic()
        self.crew.overdue()
        for member, job in list(self.given.items()):
            if member.job is not job:  # the member is gone
                del self.given[member]
                self._take_back(job)
            elif not job.offered and now - member.since > job.late:
                job.offered = True
                self.cost.late += len(job.works)
                self._take_back(job)

    def _take_back(self, job: Job) -> None:
        back = sorted((self.open & job.works) - self.queued, key=self.order.__getitem__)
        self.waiting.extend(back)
        self.queued.update(back)

    # ---- in

    def _received(self, member: Member, job: Job, reply: Answer | Failed) -> None:
        if isinstance(reply, Failed):
            self._failed(job, reply)
            return
        self.cost.worked(reply.seconds)
        values = reply.value
        if not isinstance(values, list) or len(values) != len(job.pieces):
            self.crew.lose(member, "sent what is no answer")
        elif self.question == "score" and not all(map(well_formed, values, job.pieces)):
            self.crew.lose(member, "sent scores of a wrong shape")
        else:
            self.pace.saw(reply.seconds, job.cost)
            for piece, value in zip(job.pieces, values, strict=True):
                for work, batch, rows in piece.parts():
                    if work in self.open:
                        self._judge(member, work, batch, value, rows)

    def _judge(self, member: Member, work: WorkUnit, batch: Batch, value: Any, rows: slice) -> None:
        if self.question != "score":
            self._accept(work, [texts[rows] for texts in value])
            return
        scores = value[:, rows, : candidate_count(batch)]
        if are_numbers(scores, batch):
            self._accept(work, scores)
            for other, _ in self.doubts.get(work, Doubt()).answers:
                if other is not member:
                    self.crew.lose(other, "returned no numbers where another worker found some")
            return
        doubt = self.doubts.setdefault(work, Doubt())
        genuine = any(np.array_equal(scores, earlier, equal_nan=True) for _, earlier in doubt.answers)
        doubt.answers.append((member, scores))
        if genuine or len(doubt.answers) >= OPINIONS:
            self._accept(work, scores)
        else:
            self.cost.recomputed += 1  # it goes back into the queue

    def _accept(self, work: WorkUnit, value: Any) -> None:
        self.crew.proven()
        self.open.discard(work)
        self.found[work] = value

    def _failed(self, job: Job, reply: Failed) -> None:
        """One worker's failure may be its own; the same from a second try is the run's."""
        for work in self.open & job.works:
            self.failures[work] = self.failures.get(work, 0) + 1
            if self.failures[work] > 1:
                raise error_of(reply)
