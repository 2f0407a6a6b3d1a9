"""The engine of a driver whose workers come and go: local processes or Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mezzo.parallel.engine import MakeCalls, WorkersEngine
from mezzo.parallel.messages import Reply, RequestKind, WorkerSpec
from mezzo.parallel.results import UnitResults
from mezzo.parallel.scheduler import Scheduler, Throughput
from mezzo.parallel.supervisor import START_TIMEOUT, Supervisor, WorkerHandle
from mezzo.parallel.transports.base import Transport
from mezzo.types import Batch, Probe, Scores

POLL_SECONDS = 0.5


class PoolEngine(WorkersEngine):
    """Units go to idle workers; those of a worker that dies, hangs or is late go to others."""

    def __init__(
        self, transport: Transport, spec: WorkerSpec, worker_count: int, timeout: float | None, check_every: int
    ) -> None:
        super().__init__(check_every)
        self.throughput = Throughput(timeout)
        self.supervisor = Supervisor(
            transport, spec, worker_count, self.stats, self.log, lambda text: self.report(text)
        )
        try:
            self.use_facts(self.supervisor.wait_for_first_worker())
        except BaseException:
            self.close()
            raise

    @property
    def worker_count(self) -> int:
        return self.supervisor.target_count

    @property
    def ready_count(self) -> int:
        return len(self.supervisor.ready_workers)

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """The scores; workers are started or stopped first if the run folder asks for another number of them."""
        requested, current = self.requested_count(), self.supervisor.target_count
        if requested is not None and requested != current:
            self.report(f"{requested} workers are wanted from now on; there were {current}")
            self.supervisor.target_count = requested
        self.supervisor.start_or_stop_workers()
        return super().score(batch, probes)

    def compute_units(
        self, results: UnitResults[WorkerHandle], make_calls: MakeCalls, options: tuple[Any, ...]
    ) -> None:
        Scheduler(self.supervisor, self.throughput, results, make_calls, options).run()

    def request_any(self, kind: RequestKind, *arguments: Any) -> Any:
        return next(iter(self._request_idle(kind, arguments, limit=1).values()))

    def request_all(self, kind: RequestKind, *arguments: Any) -> dict[Any, Any]:
        """The values of the workers that are idle now, at least one."""
        return self._request_idle(kind, arguments)

    def rebuild_worker(self, worker: WorkerHandle, reason: str) -> None:
        self.supervisor.replace_worker(worker, f"is rebuilt: {reason}", counts_as_loss=False)

    def catch_up(self) -> None:
        for worker in self.supervisor.idle_workers:
            self.supervisor.send_request(worker, "catch_up", (), START_TIMEOUT)

    def close(self) -> None:
        self.supervisor.close()

    def _request_idle(
        self, kind: RequestKind, arguments: tuple[Any, ...], limit: int | None = None
    ) -> dict[WorkerHandle, Any]:
        """The values of idle workers, at least one and at most `limit`."""
        while not (idle := self.supervisor.idle_workers[:limit]):
            self.supervisor.start_or_stop_workers()
            list(self.supervisor.receive_replies(POLL_SECONDS))
        values: dict[WorkerHandle, Any] = {}
        tag = object()
        for worker in idle:
            self.supervisor.send_request(worker, kind, arguments, self.throughput.timeout or START_TIMEOUT, tag)
        while any(worker.tag is tag for worker in self.supervisor.workers):
            for worker, reply_tag, reply in list(self.supervisor.receive_replies(POLL_SECONDS)):
                if reply_tag is not tag:
                    continue
                if isinstance(reply, Reply):
                    values[worker] = reply.value
                elif not reply.fatal:
                    raise reply.to_exception()
        return values or self._request_idle(kind, arguments, limit)  # none: all of them were lost
