"""The engine of a driver whose workers are the ranks of torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mezzo.engines.microbatch import WorkUnit
from mezzo.errors import ModelError, RunFailed
from mezzo.parallel.engine import MakeCalls, WorkersEngine
from mezzo.parallel.messages import Reply, RequestKind, WorkerFacts, WorkerSpec, parse_reply, serialize
from mezzo.parallel.results import MalformedReply, UnitResults
from mezzo.parallel.transports.torchrun import DEFAULT_TIMEOUT, RankGroup


class TorchrunEngine(WorkersEngine):
    """Every rank gets an equal share of the units. The ranks are fixed: when one fails, torchrun restarts all of them."""

    def __init__(self, group: RankGroup, spec: WorkerSpec, timeout: float | None, check_every: int) -> None:
        super().__init__(check_every)
        self.group, self.timeout = group, timeout or DEFAULT_TIMEOUT
        self.positions = [0] * group.size
        replies = map(parse_reply, group.exchange([serialize(spec)] * group.size, DEFAULT_TIMEOUT))
        facts: list[WorkerFacts] = [reply.value for reply in replies]
        if not all(each.has_same_base(facts[0]) for each in facts):
            raise ModelError("the ranks have different base models; give every machine the same one")
        self.use_facts(facts[0])

    @property
    def worker_count(self) -> int:
        return self.group.size

    def compute_units(self, results: UnitResults[int], make_calls: MakeCalls, options: tuple[Any, ...]) -> None:
        while results.pending:
            calls = [make_calls(units) for units in self._distribute(results)]
            arguments = [(rank_calls, *options) for rank_calls in calls]
            replies = self._request_each(results.kind, arguments, self.timeout)
            faulty: set[int] = set()
            for rank, reply in enumerate(replies):
                self.stats.add_busy_time(reply.seconds)
                try:
                    faulty.update(results.add(rank, calls[rank], reply.value))
                except MalformedReply as error:
                    raise RunFailed(f"rank {rank} {error}; the journal holds the run up to here") from None
            for rank in sorted(faulty):
                self.stats.rebuilt += 1
                self.rebuild_worker(rank, "it returned non-finite scores where another rank's were finite")

    def request_all(self, kind: RequestKind, *arguments: Any) -> dict[Any, Any]:
        replies = self._request_each(kind, [arguments] * self.group.size, self.timeout)
        return {rank: reply.value for rank, reply in enumerate(replies)}

    def request_any(self, kind: RequestKind, *arguments: Any) -> Any:
        """The value of rank 0, this process."""
        return parse_reply(self.group.server.handle(self._serialize_request(0, kind, arguments))).value

    def rebuild_worker(self, worker: int, reason: str) -> None:
        self.report(f"rank {worker} is rebuilt from the base model and the journal: {reason}")
        self.positions[worker] = 0

    def catch_up(self) -> None:
        self._request_each("catch_up", [()] * self.group.size, DEFAULT_TIMEOUT)

    def close(self) -> None:
        """Do nothing: the ranks end with their group, which outlives the engine."""

    def _distribute(self, results: UnitResults[int]) -> list[list[WorkUnit]]:
        """Pending units by rank, round robin; one with non-finite scores goes to the rank after the one that returned them."""
        shares: list[list[WorkUnit]] = [[] for _ in range(self.group.size)]
        for index, unit in enumerate(unit for unit in results.units if unit in results.pending):
            doubted = results.doubted_workers(unit)
            rank = doubted[-1] + 1 if doubted else index
            shares[rank % self.group.size].append(unit)
        return shares

    def _request_each(self, kind: RequestKind, arguments: Sequence[tuple[Any, ...]], timeout: float) -> list[Reply]:
        """Send each rank a request with its own arguments and return the replies by rank."""
        requests = [self._serialize_request(rank, kind, each) for rank, each in enumerate(arguments)]
        self.stats.add_bytes(sum(map(len, requests)), kind)
        replies = self.group.exchange(requests, timeout)
        self.stats.add_bytes(sum(map(len, replies)), kind)
        return [parse_reply(reply) for reply in replies]

    def _serialize_request(self, rank: int, kind: RequestKind, arguments: tuple[Any, ...]) -> bytes:
        position, self.positions[rank] = self.positions[rank], len(self.log)
        return self.log.request(position, kind, arguments)
