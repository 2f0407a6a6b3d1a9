"""The engine of a driver whose workers come and go: local processes or Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mezzo.parallel.engine import MakeCalls, WorkersEngine
from mezzo.parallel.messages import Failure, Reply, RequestKind, WorkerSpec
from mezzo.parallel.results import UnitResults
from mezzo.parallel.scheduler import Scheduler, Throughput
from mezzo.parallel.stats import WorkStats
from mezzo.parallel.supervisor import START_TIMEOUT, Supervisor, WorkerHandle
from mezzo.parallel.transports.base import Transport
from mezzo.types import Batch, Probe, Scores


class PoolEngine(WorkersEngine):
    """Units go to idle workers; those of a worker that dies, hangs or is late go to others."""

    def __init__(
        self,
        transport: Transport,
        spec: WorkerSpec,
        worker_count: int,
        timeout: float | None = None,
        check_every: int = 100,
    ) -> None:
        stats = WorkStats()
        self.throughput = Throughput(timeout)
        self.supervisor = Supervisor(transport, spec, worker_count, stats)
        self._requested_count: Callable[[], int | None] = lambda: None
        try:
            super().__init__(self.supervisor.wait_for_first_worker(), stats, self.supervisor.log, check_every)
        except BaseException:
            self.close()
            raise

    def attach_run(
        self, snapshot_folder: str, report: Callable[[str], None], requested_count: Callable[[], int | None]
    ) -> None:
        self.log.snapshot_folder, self.supervisor.report = snapshot_folder, report
        self._requested_count = requested_count

    @property
    def worker_count(self) -> int:
        return self.supervisor.target_count

    @property
    def ready_count(self) -> int:
        return len(self.supervisor.ready_workers)

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        self._apply_requested_count()
        return super().score(batch, probes)

    def compute_units(
        self, results: UnitResults[WorkerHandle], make_calls: MakeCalls, options: tuple[Any, ...]
    ) -> None:
        Scheduler(self.supervisor, self.throughput, results, make_calls, options).run()

    def request_any(self, kind: RequestKind, *arguments: Any) -> Any:
        while True:
            worker = self._wait_for_idle_workers()[0]
            if worker in (values := self._request_from([worker], kind, arguments)):
                return values[worker]

    def request_all(self, kind: RequestKind, *arguments: Any) -> dict[Any, Any]:
        """The values of the workers that are idle now, at least one."""
        while not (values := self._request_from(self._wait_for_idle_workers(), kind, arguments)):
            pass
        return values

    def rebuild_worker(self, worker: WorkerHandle, reason: str) -> None:
        self.supervisor.replace_worker(worker, f"is rebuilt: {reason}", counts_as_loss=False)

    def catch_up(self) -> None:
        for worker in self.supervisor.idle_workers:
            self.supervisor.send_request(worker, "catch_up", (), START_TIMEOUT)

    def close(self) -> None:
        self.supervisor.close()

    def _wait_for_idle_workers(self) -> list[WorkerHandle]:
        while not (idle := self.supervisor.idle_workers):
            self.supervisor.start_or_stop_workers()
            self._poll()
        return idle

    def _request_from(
        self, workers: Sequence[WorkerHandle], kind: RequestKind, arguments: tuple[Any, ...]
    ) -> dict[WorkerHandle, Any]:
        values: dict[WorkerHandle, Any] = {}
        tag = object()
        for worker in workers:
            self.supervisor.send_request(worker, kind, arguments, self.throughput.timeout or START_TIMEOUT, tag)
        while any(worker.tag is tag for worker in self.supervisor.workers):
            for worker, reply_tag, reply in self._poll():
                if reply_tag is not tag:
                    continue
                if isinstance(reply, Reply):
                    values[worker] = reply.value
                elif not reply.fatal:
                    raise reply.to_exception()
        return values

    def _poll(self) -> list[tuple[WorkerHandle, Any, Reply | Failure]]:
        replies = list(self.supervisor.receive_replies(0.5))
        self.supervisor.replace_overdue_workers()
        return replies

    def _apply_requested_count(self) -> None:
        """Start or stop workers when the run folder asks for another number of them."""
        requested, current = self._requested_count(), self.supervisor.target_count
        if requested is not None and requested != current:
            self.supervisor.report(f"{requested} workers are wanted from now on; there were {current}")
            self.supervisor.target_count = requested
        self.supervisor.start_or_stop_workers()
