"""Starts, watches and replaces the workers of a run. Knows nothing of what they compute."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from mezzo.errors import RunFailed
from mezzo.parallel.messages import Failure, Reply, RequestKind, WorkerFacts, WorkerSpec, deserialize, serialize
from mezzo.parallel.stats import WorkStats
from mezzo.parallel.transports.base import Transport, WorkerConnection, WorkerLost
from mezzo.parallel.update_log import UpdateLog

# Seconds for loading a model and for catching up; the run waits for it only if there is no other worker.
START_TIMEOUT = 1800.0
MAX_START_DELAY = 30.0
# Consecutive losses, per worker, after which the run ends.
MAX_LOSSES_PER_WORKER = 4


@dataclass(eq=False)
class WorkerHandle:
    """One worker as the driver sees it.

    `position` is its step of the journal, None until its engine is loaded. `request` is what it is doing, None while it is idle;
    `tag` is whatever the sender of the request wants to recognise the reply by.
    """

    number: int
    connection: WorkerConnection
    sent_at: float
    timeout: float
    position: int | None = None
    request: RequestKind | Literal["start"] | None = "start"
    tag: Any = None
    facts: WorkerFacts | None = None

    @property
    def is_idle(self) -> bool:
        return self.position is not None and self.request is None


@dataclass(eq=False)
class Supervisor:
    """Keeps `target_count` workers running and in step with the update log."""

    transport: Transport
    spec: WorkerSpec
    target_count: int
    stats: WorkStats
    log: UpdateLog
    report: Callable[[str], None]
    workers: list[WorkerHandle] = field(default_factory=list)
    facts: WorkerFacts | None = None
    _consecutive_losses: int = 0
    _next_start: float = 0.0
    _next_number: int = 0

    # ---- starting and replacing workers

    def start_or_stop_workers(self) -> None:
        """Start the workers that are missing, or stop those that are too many."""
        while len(self.workers) > self.target_count:
            surplus = next((w for w in reversed(self.workers) if w.request is None), self.workers[-1])
            self._remove(surplus, gracefully=True)
        while len(self.workers) < self.target_count and time.monotonic() >= self._next_start:
            try:
                connection = self.transport.start_worker()
            except WorkerLost:
                self._count_loss("no worker process could be started")
                return
            worker = WorkerHandle(self._next_number, connection, time.monotonic(), START_TIMEOUT)
            self._next_number += 1
            self.workers.append(worker)
            self._send(worker, serialize(dataclasses.replace(self.spec, number=worker.number)))

    @property
    def idle_workers(self) -> list[WorkerHandle]:
        return [worker for worker in self.workers if worker.is_idle]

    @property
    def ready_workers(self) -> list[WorkerHandle]:
        """Workers whose engine is loaded, idle or busy."""
        return [worker for worker in self.workers if worker.position is not None]

    def wait_for_first_worker(self) -> WorkerFacts:
        while self.facts is None:
            self.start_or_stop_workers()
            list(self.receive_replies(1.0))
        return self.facts

    def replace_worker(self, worker: WorkerHandle, reason: str, counts_as_loss: bool = True) -> None:
        """End a worker that is lost or not to be trusted; `start_or_stop_workers` starts another."""
        if worker not in self.workers:
            return
        self._remove(worker)
        self.stats.lost += 1
        problem = f"worker {worker.number} {reason}"
        self.report(f"{problem}; a new one starts from the base model and the journal")
        if counts_as_loss:
            self._count_loss(problem)

    def _replace_overdue_workers(self) -> None:
        """Replace workers that have not replied within their timeout."""
        now = time.monotonic()
        for worker in [w for w in self.workers if w.request is not None and now - w.sent_at > w.timeout]:
            self.replace_worker(worker, f"did not answer within {worker.timeout:.3g} s")

    def reset_losses(self) -> None:
        """Forget earlier losses: a worker has done useful work since."""
        self._consecutive_losses = 0

    def close(self) -> None:
        for worker in list(self.workers):
            self._remove(worker, gracefully=True)
        self.transport.close()

    def _count_loss(self, reason: str) -> None:
        self._consecutive_losses += 1
        losses = self._consecutive_losses
        self._next_start = time.monotonic() + (min(MAX_START_DELAY, 0.01 * 2**losses) if losses > 1 else 0.0)
        if losses > MAX_LOSSES_PER_WORKER * max(1, self.target_count):
            raise RunFailed(
                f"workers were lost {losses} times in a row and did no work in between; last: "
                f"{reason}. The journal holds the run up to here: continue with --resume"
            )

    def _remove(self, worker: WorkerHandle, gracefully: bool = False) -> None:
        self.workers.remove(worker)
        was_idle = worker.is_idle
        worker.request = worker.tag = worker.position = None
        (worker.connection.stop if was_idle and gracefully else worker.connection.kill)()

    # ---- requests and replies

    def send_request(
        self, worker: WorkerHandle, kind: RequestKind, arguments: tuple[Any, ...], timeout: float, tag: Any = None
    ) -> None:
        """Send an idle worker the updates it lacks and a request; it is replaced if it turns out to be lost."""
        if not worker.is_idle:
            raise RuntimeError(f"worker {worker.number} is busy")
        data = self.log.request(worker.position or 0, kind, arguments)
        worker.request, worker.tag, worker.timeout, worker.sent_at = kind, tag, timeout, time.monotonic()
        worker.position = len(self.log)
        self._send(worker, data)

    def receive_replies(self, seconds: float) -> Iterator[tuple[WorkerHandle, Any, Reply | Failure]]:
        """Yield (worker, tag, reply) as they arrive; starting, lost and overdue workers are dealt with here."""
        busy = {id(worker.connection): worker for worker in self.workers if worker.request is not None}
        if not busy:
            time.sleep(min(seconds, 0.05))
            return
        for connection, data in self.transport.wait_for_replies([w.connection for w in busy.values()], seconds):
            worker = busy[id(connection)]
            if data is None:
                self.replace_worker(worker, "ended unexpectedly")
                continue
            self.stats.add_bytes(len(data), worker.request)
            try:
                reply = deserialize(data)
                if not isinstance(reply, (Reply, Failure)):
                    raise TypeError
            except Exception:  # whatever these bytes are, they are not a reply
                self.replace_worker(worker, "sent an invalid reply")
                continue
            request, tag = worker.request, worker.tag
            worker.request = worker.tag = None
            if request in ("start", "catch_up"):
                self._handle_start(worker, request, reply)
            else:
                if isinstance(reply, Failure) and reply.fatal:
                    self.replace_worker(worker, f"failed: {reply.message}")
                yield worker, tag, reply
        self._replace_overdue_workers()

    def _send(self, worker: WorkerHandle, data: bytes) -> None:
        self.stats.add_bytes(len(data), worker.request)
        try:
            worker.connection.send(data)
        except WorkerLost:
            self.replace_worker(worker, "ended unexpectedly")

    def _handle_start(self, worker: WorkerHandle, request: str | None, reply: Reply | Failure) -> None:
        """A worker has loaded its engine or caught up, or has failed to."""
        if isinstance(reply, Failure):
            if self.facts is None:  # no worker has ever started: most likely the user's mistake
                raise reply.to_exception()
            self.replace_worker(worker, f"could not start: {reply.message}")
        elif request == "start":
            self._use_started(worker, reply.value)

    def _use_started(self, worker: WorkerHandle, facts: WorkerFacts) -> None:
        self.facts = self.facts or facts
        if not facts.has_same_base(self.facts):
            self.replace_worker(
                worker,
                f"has a base model with digest {facts.base_digest[:12]}…, the run's is {self.facts.base_digest[:12]}…: "
                "the base model has changed, and it was not used",
            )
            return
        worker.facts, worker.position = facts, 0
        if self.log.updates:  # it catches up while the others go on
            self.send_request(worker, "catch_up", (), START_TIMEOUT)
