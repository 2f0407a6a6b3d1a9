"""torchrun: rank 0 drives and works, the others work. Every rank applies every update; only rank 0 owns a run folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mezzo.engines.microbatch import EngineCall, WorkUnit, candidate_count, split_into_units
from mezzo.errors import ModelError, RunFailed
from mezzo.parallel.consensus import are_numbers, well_formed
from mezzo.parallel.engine import WorkersEngine
from mezzo.parallel.messages import Answer, Facts, Failed, Order, Post, Route, packed, unpacked
from mezzo.parallel.stats import Cost
from mezzo.parallel.supervisor import error_of
from mezzo.parallel.worker import Service
from mezzo.types import Batch, Probe, Scores, Update

OPINIONS = 3
"""Ranks that are asked for a unit whose scores are no numbers."""
SECONDS = 1800.0
"""For a rank's answer, unless --worker-timeout says otherwise."""
NOWHERE = -1
"""The position of a rank that must begin again at the base model."""


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def restarted() -> bool:
    """Whether torchrun started it again after a failure."""
    return launched() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def may_restart() -> bool:
    return launched() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


@contextlib.contextmanager
def among(backend: str) -> Iterator[bool]:
    """This process among the ranks of torchrun. True on rank 0, which drives; the others have done their work by then."""
    exchange = Exchange(backend)
    try:
        if exchange.ranks.rank:
            exchange.serve()
        yield exchange.ranks.rank == 0
    finally:
        exchange.close()


class Exchange:
    """This process's place among the ranks, opened before anything that could fail on one of them alone."""

    opened: Exchange | None = None

    def __init__(self, backend: str) -> None:
        from mezzo.engines.torch.process_group import Ranks

        self.ranks = Ranks(backend)
        self.service = Service(int(os.environ.get("LOCAL_RANK", "0")))
        self.whole = True
        Exchange.opened = self

    def serve(self) -> None:
        """The whole life of a rank other than 0."""
        while orders := unpacked(self.ranks.broadcast(None)):
            reply, _ = self.service.reply(orders[self.ranks.rank])
            self.ranks.gather(reply)

    def ask(self, orders: Sequence[bytes], seconds: float) -> list[bytes]:
        """Rank 0: everybody's reply to everybody's own order."""
        self.whole = False
        self.ranks.broadcast(packed(list(orders)), seconds)
        reply, _ = self.service.reply(orders[0])
        replies = self.ranks.gather(reply, seconds)
        self.whole = True
        return replies

    def close(self) -> None:
        """Send the others home; where one of them is lost, torchrun does."""
        Exchange.opened = None
        self.service.close()
        if self.whole:
            if self.ranks.rank == 0:
                self.ranks.broadcast(packed([]), SECONDS)
            self.ranks.close()


class RankEngine(WorkersEngine):
    """The engine contract on rank 0. The ranks are fixed: when one fails, torchrun starts all of them again."""

    def __init__(self, exchange: Exchange, post: Post, timeout: float | None, check_every: int) -> None:
        self.exchange, self.seconds, self.size = exchange, timeout or SECONDS, exchange.ranks.size
        self.marks: Mapping[int, str] = {}
        self.snapshots: str | None = None
        self.report: Callable[[str], None] = lambda text: None
        self.positions = [0] * self.size
        facts: list[Facts] = [self._value(reply) for reply in exchange.ask([packed(post)] * self.size, SECONDS)]
        if any((f.base_digest, f.trained) != (facts[0].base_digest, facts[0].trained) for f in facts):
            raise ModelError("the ranks have different base models; give every machine the same one")
        super().__init__(facts[0], Cost(), [], check_every)

    def join(self, snapshots: str, report: Callable[[str], None], wanted: Callable[[], int | None]) -> None:
        self.snapshots, self.report = snapshots, report

    def go_to(self, updates: Sequence[Update], marks: Mapping[int, str], snapshots: str | None) -> None:
        self.log[:], self.marks = updates, dict(marks)
        self.snapshots = snapshots or self.snapshots
        self._ask("move", [()] * self.size, SECONDS)

    def answers(self, question: str, batch: Batch, probes: Sequence[Probe], *extra: Any) -> dict[WorkUnit, Any]:
        self.cost.begin(training=any(probe.terms for probe in probes))
        found: dict[WorkUnit, Any] = {}
        works, doubts = split_into_units(batch, len(probes), self.micro_batch), dict[WorkUnit, tuple[int, Scores]]()
        for _ in range(OPINIONS):
            pieces = [self.pieces(batch, probes, share) for share in self._shares(works, doubts)]
            replies = self._ask(
                question, [(each, self.micro_batch, *extra) for each in pieces], self.seconds, scoring=True
            )
            doubts = self._taken(question, pieces, replies, doubts, found)
            works = list(doubts)
            if not works:
                break
        self.cost.end(self.size)
        return found

    def _shares(self, works: Sequence[WorkUnit], doubts: Mapping[WorkUnit, tuple[int, Scores]]) -> list[list[WorkUnit]]:
        """Units dealt out in turn; a doubtful one goes to the rank behind the one that gave it."""
        shares: list[list[WorkUnit]] = [[] for _ in range(self.size)]
        for place, work in enumerate(works):
            rank = doubts[work][0] + 1 if work in doubts else place
            shares[rank % self.size].append(work)
        return shares

    def _taken(
        self,
        question: str,
        pieces: Sequence[Sequence[EngineCall]],
        replies: Sequence[Sequence[Any]],
        doubts: Mapping[WorkUnit, tuple[int, Scores]],
        found: dict[WorkUnit, Any],
    ) -> dict[WorkUnit, tuple[int, Scores]]:
        """Put answers in their places; return those that are no numbers, unless another rank has found the same."""
        left: dict[WorkUnit, tuple[int, Scores]] = {}
        wrong: set[int] = set()
        for rank, (asked, values) in enumerate(zip(pieces, replies, strict=True)):
            for piece, value in zip(asked, values, strict=True):
                if question == "score" and not well_formed(value, piece):
                    raise RunFailed(f"rank {rank} sent scores of a wrong shape; the journal holds the run up to here")
                for work, batch, rows in piece.parts():
                    if question != "score":
                        found[work] = [texts[rows] for texts in value]
                        continue
                    found[work] = scores = value[:, rows, : candidate_count(batch)]
                    if are_numbers(scores, batch):
                        wrong |= {doubts[work][0]} - {rank} if work in doubts else set()
                    elif work not in doubts or not np.array_equal(doubts[work][1], scores, equal_nan=True):
                        left[work] = (rank, scores)
                        self.cost.recomputed += 1
        for rank in sorted(wrong):
            self.cost.rebuilt += 1
            self.rebuild(rank, "it returned no numbers where another found some")
        return left

    def all(self, question: str, *values: Any) -> dict[Any, Any]:
        return dict(enumerate(self._ask(question, [values] * self.size, self.seconds)))

    def one(self, question: str, *values: Any) -> Any:
        """This rank's own answer."""
        reply, _ = self.exchange.service.reply(self._order(0, question, values))
        return self._value(reply)

    def rebuild(self, worker: int, why: str) -> None:
        self.report(f"rank {worker} is rebuilt from the base model and the journal: {why}")
        self.positions[worker] = NOWHERE

    def describe(self) -> dict[str, Any]:
        return {**self.facts.describe, "workers": self.size}

    def total_cost(self) -> dict[str, Any]:
        return self.cost.summary(self.size)

    def close(self) -> None:
        """The ranks go home with their exchange, which outlives the engine."""

    def _order(self, rank: int, question: str, values: tuple[Any, ...]) -> bytes:
        start = self.positions[rank] if 0 <= self.positions[rank] <= len(self.log) else 0
        shorter = self.snapshots if start == 0 else None
        route = Route(start, tuple(self.log[start:]), self.marks if shorter else {}, shorter)
        self.positions[rank] = len(self.log)
        return packed(Order(route, question, values))

    def _ask(
        self, question: str, values: Sequence[tuple[Any, ...]], seconds: float, scoring: bool = False
    ) -> list[Any]:
        orders = [self._order(rank, question, each) for rank, each in enumerate(values)]
        self.cost.moved(sum(map(len, orders)), scoring)
        replies = self.exchange.ask(orders, seconds)
        self.cost.moved(sum(map(len, replies)), scoring)
        if scoring:
            for reply in map(unpacked, replies):
                self.cost.worked(getattr(reply, "seconds", 0.0))
        return [self._value(reply) for reply in replies]

    @staticmethod
    def _value(data: bytes) -> Any:
        reply = unpacked(data)
        if isinstance(reply, Failed):
            raise error_of(reply)
        assert isinstance(reply, Answer)
        return reply.value
