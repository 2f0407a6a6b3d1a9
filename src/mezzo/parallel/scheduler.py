"""Hands work units to idle workers, and late or doubtful ones to another worker, until all are done."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from mezzo.engines.microbatch import EngineCall, WorkUnit
from mezzo.parallel.engine import MakeCalls
from mezzo.parallel.messages import Failure, Reply
from mezzo.parallel.results import MalformedReply, UnitResults
from mezzo.parallel.supervisor import Supervisor, WorkerHandle

# A unit is offered to others after this multiple of its expected time, at least these seconds. Only workers with
# nothing else to do take it: units that wait in the queue come first.
LATE_FACTOR, MIN_LATE_SECONDS = 2.0, 0.25
# Its worker is replaced after these, unless --worker-timeout is set.
TIMEOUT_FACTOR, MIN_TIMEOUT = 40.0, 60.0
# The timeout while nothing has been measured.
FIRST_TIMEOUT = 600.0


class Throughput:
    """Seconds per token: the median over recent replies, so that one slow worker does not distort it."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._seconds_per_token: deque[float] = deque(maxlen=64)

    def record(self, seconds: float, tokens: int) -> None:
        self._seconds_per_token.append(seconds / max(1, tokens))

    def expected_seconds(self, tokens: int) -> float | None:
        return statistics.median(self._seconds_per_token) * tokens if self._seconds_per_token else None

    def late_after(self, tokens: int) -> float:
        expected = self.expected_seconds(tokens)
        return self.timeout_for(tokens) if expected is None else max(MIN_LATE_SECONDS, LATE_FACTOR * expected)

    def timeout_for(self, tokens: int) -> float:
        if self.timeout is not None:
            return self.timeout
        expected = self.expected_seconds(tokens)
        return FIRST_TIMEOUT if expected is None else max(MIN_TIMEOUT, TIMEOUT_FACTOR * expected)


@dataclass(eq=False)
class Assignment:
    """The units that one worker was given, as engine calls."""

    units: frozenset[WorkUnit]
    calls: list[EngineCall]
    tokens: int
    late_after: float
    is_late: bool = False
    """Its units have been offered to other workers."""


@dataclass(eq=False)
class Scheduler:
    """Has every unit of one request computed by the workers there are."""

    supervisor: Supervisor
    throughput: Throughput
    results: UnitResults[WorkerHandle]
    make_calls: MakeCalls
    options: tuple[Any, ...]
    assignments: dict[WorkerHandle, Assignment] = field(default_factory=dict)
    failures: Counter[WorkUnit] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.unit_order = {unit: index for index, unit in enumerate(self.results.units)}
        # The longest first, so that the last ones are short.
        self.queue = deque(reversed(self.results.units))

    def run(self) -> None:
        while self.results.pending:
            self.supervisor.start_or_stop_workers()
            self._assign_units()
            for worker, tag, reply in self.supervisor.receive_replies(self._seconds_until_late()):
                assignment = self.assignments.get(worker)
                if assignment is not None and assignment is tag:
                    del self.assignments[worker]
                    self._handle_reply(worker, assignment, reply)
                    self._requeue_pending(assignment)
            self._recover_assignments()

    # ---- assigning

    def _assign_units(self) -> None:
        share_count = 2 * max(1, len(self.supervisor.ready_workers))
        for worker in self.supervisor.idle_workers:
            if not self.queue:
                return
            if units := self._take_units(worker, max(1, len(self.queue) // share_count)):
                calls = self.make_calls(units)
                tokens = sum(call.token_count for call in calls)
                assignment = Assignment(frozenset(units), calls, tokens, self.throughput.late_after(tokens))
                self.assignments[worker] = assignment
                timeout = self.throughput.timeout_for(tokens)
                self.supervisor.send_request(worker, self.results.kind, (calls, *self.options), timeout, assignment)

    def _take_units(self, worker: WorkerHandle, size: int) -> list[WorkUnit]:
        """Take units for a worker off the queue, in the order in which the batch was split."""
        taken: list[WorkUnit] = []
        skipped: list[WorkUnit] = []
        while self.queue and len(taken) < size:
            unit = self.queue.popleft()
            if unit in self.results.pending:
                (skipped if self._needs_other_worker(unit, worker) else taken).append(unit)
        self.queue.extendleft(skipped)
        return sorted(taken, key=self.unit_order.__getitem__)

    def _needs_other_worker(self, unit: WorkUnit, worker: WorkerHandle) -> bool:
        """Whether this worker has returned non-finite scores for the unit and there is one that has not."""
        doubted = self.results.doubted_workers(unit)
        return worker in doubted and any(other not in doubted for other in self.supervisor.workers)

    def _requeue_pending(self, assignment: Assignment) -> None:
        if units := self.results.pending & assignment.units:
            self.queue.extend(sorted(units.difference(self.queue), key=self.unit_order.__getitem__))

    # ---- waiting

    def _seconds_until_late(self) -> float:
        due = [w.sent_at + (w.timeout if a.is_late else a.late_after) for w, a in self.assignments.items()]
        return max(0.001, min([0.5, *(moment - time.monotonic() for moment in due)]))

    def _recover_assignments(self) -> None:
        """Requeue the units of workers that are late or lost."""
        now = time.monotonic()
        for worker, assignment in list(self.assignments.items()):
            if worker.tag is not assignment:  # the worker is lost
                del self.assignments[worker]
                self._requeue_pending(assignment)
            elif not assignment.is_late and now - worker.sent_at > assignment.late_after:
                assignment.is_late = True
                self.results.stats.late_units += len(assignment.units)
                self._requeue_pending(assignment)

    # ---- replies

    def _handle_reply(self, worker: WorkerHandle, assignment: Assignment, reply: Reply | Failure) -> None:
        if isinstance(reply, Failure):
            self._count_failure(assignment, reply)
            return
        self.results.stats.add_busy_time(reply.seconds)
        pending_before = len(self.results.pending)
        try:
            faulty = self.results.add(worker, assignment.calls, reply.value)
        except MalformedReply as error:
            self.supervisor.replace_worker(worker, str(error))
            return
        self.throughput.record(reply.seconds, assignment.tokens)
        if len(self.results.pending) < pending_before:
            self.supervisor.reset_losses()
        for other in faulty:
            self.supervisor.replace_worker(other, "returned non-finite scores where another worker's were finite")

    def _count_failure(self, assignment: Assignment, failure: Failure) -> None:
        """End the run when a unit fails for the second time: one failure may be the worker's own."""
        for unit in self.results.pending & assignment.units:
            self.failures[unit] += 1
            if self.failures[unit] > 1:
                raise failure.to_exception()
