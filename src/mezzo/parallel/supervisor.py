"""The workers of a run: hired, brought up to date, watched, replaced. Knows nothing of what they compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mezzo import errors
from mezzo.errors import MezzoError, RunFailed
from mezzo.parallel.messages import Answer, Facts, Failed, Order, Post, Route, packed, unpacked
from mezzo.parallel.stats import Cost
from mezzo.parallel.transports.base import Gone, Link, Transport
from mezzo.types import Update

START_SECONDS = 1800.0
"""For loading a model and for catching up; nobody waits meanwhile unless there is no other worker."""
LONGEST_PAUSE = 30.0
HOPELESS = 4
"""Losses in a row, per worker, after which the run ends."""


@dataclass(eq=False)
class Member:
    """One worker. `position` is None until its engine is up; `order` is None while it has nothing to do."""

    number: int
    link: Link
    since: float
    limit: float
    position: int | None = None
    order: str | None = "open"
    job: Any = None
    facts: Facts | None = None

    @property
    def name(self) -> str:
        return f"worker {self.number}"

    @property
    def free(self) -> bool:
        return self.position is not None and self.order is None


class Crew:
    """Members and the journal that each of them follows."""

    def __init__(self, transport: Transport, post: Post, wanted: int, cost: Cost) -> None:
        self.transport, self.post, self.wanted, self.cost = transport, post, wanted, cost
        self.members: list[Member] = []
        self.log: list[Update] = []
        self.marks: dict[int, str] = {}
        self.snapshots: str | None = None
        self.facts: Facts | None = None
        self.report: Callable[[str], None] = lambda text: None
        self._losses = 0
        self._last_words: MezzoError | None = None
        self._hire_at = 0.0
        self._numbers = 0

    # ---- who is there

    def staff(self) -> None:
        """Hire what is missing; send home what is too many."""
        while len(self.members) > self.wanted:
            spare = next((m for m in reversed(self.members) if m.order is None), self.members[-1])
            self._drop(spare, peacefully=True)
        while len(self.members) < self.wanted and time.monotonic() >= self._hire_at:
            try:
                link = self.transport.hire()
            except Gone:
                self._count_loss(RunFailed("no worker process could be started"))
                return
            member = Member(self._numbers, link, time.monotonic(), START_SECONDS)
            self._numbers += 1
            self.members.append(member)
            post = Post(self.post.factory, self.post.spec, member.number)
            self._deliver(member, packed(post))

    @property
    def free(self) -> list[Member]:
        return [member for member in self.members if member.free]

    def up(self) -> list[Member]:
        return [member for member in self.members if member.position is not None]

    def lose(self, member: Member, why: str, counts: bool = True) -> None:
        """A worker is gone or not to be trusted: its process ends, another will start from the base model and the journal."""
        if member not in self.members:
            return
        self._drop(member)
        self.cost.lost += 1
        self.report(f"{member.name} {why}; a new one starts from the base model and the journal")
        if counts:
            self._count_loss(RunFailed(f"{member.name} {why}"))

    def proven(self) -> None:
        """Somebody did good work: losses before it were no pattern."""
        self._losses = 0

    def _count_loss(self, error: MezzoError) -> None:
        self._losses += 1
        self._last_words = error
        self._hire_at = time.monotonic() + (min(LONGEST_PAUSE, 0.01 * 2**self._losses) if self._losses > 1 else 0.0)
        if self._losses > HOPELESS * max(1, self.wanted):
            raise RunFailed(
                f"workers were lost {self._losses} times in a row and did no work in between; last: "
                f"{self._last_words}. The journal holds the run up to here: continue with --resume"
            )

    def _drop(self, member: Member, peacefully: bool = False) -> None:
        self.members.remove(member)
        idle = member.free
        member.order = member.job = member.position = None
        (member.link.release if idle and peacefully else member.link.kill)()

    # ---- orders and replies

    def order(self, member: Member, question: str, values: tuple[Any, ...], limit: float, job: Any = None) -> bool:
        """Send a free member its way to the present and a question; False when it turns out to be gone."""
        assert member.free
        order = Order(self._route(member), question, values)
        member.order, member.job, member.limit, member.since = question, job, limit, time.monotonic()
        member.position = len(self.log)
        return self._deliver(member, packed(order), question in ("score", "generate"))

    def _route(self, member: Member) -> Route:
        position = member.position or 0
        if position > len(self.log):  # the run has gone back
            position = 0
        if position:
            return Route(position, tuple(self.log[position:]))
        return Route(0, tuple(self.log), dict(self.marks) if self.snapshots else {}, self.snapshots)

    def _deliver(self, member: Member, data: bytes, scoring: bool = False) -> bool:
        self.cost.moved(len(data), scoring)
        try:
            member.link.send(data)
        except Gone:
            self.lose(member, "ended unexpectedly")
            return False
        return True

    def replies(self, seconds: float) -> Iterator[tuple[Member, str, Any, Answer | Failed]]:
        """(member, question, job, reply) of orders that were answered; starting and lost members are seen to here."""
        busy = {id(member.link): member for member in self.members if member.order is not None}
        if not busy:
            time.sleep(min(seconds, 0.05))
            return
        for link, data in self.transport.wait([member.link for member in busy.values()], seconds):
            member = busy[id(link)]
            if data is None:
                self.lose(member, "ended unexpectedly")
                continue
            self.cost.moved(len(data), member.order in ("score", "generate"))
            try:
                reply = unpacked(data)
                assert isinstance(reply, (Answer, Failed))
            except Exception:  # whatever these bytes are, they are no reply
                self.lose(member, "sent what is no answer")
                continue
            question, job = member.order or "", member.job
            member.order = member.job = None
            if question == "open":
                self._opened(member, reply)
            elif question == "move":
                if isinstance(reply, Failed):
                    self._failed_to_start(member, reply)
            else:
                if isinstance(reply, Failed) and reply.fatal:
                    self.lose(member, f"failed: {reply.text}")
                yield member, question, job, reply

    def overdue(self) -> None:
        """End members that have been silent for longer than their limit."""
        now = time.monotonic()
        for member in [m for m in self.members if m.order is not None and now - m.since > m.limit]:
            self.lose(member, f"did not answer within {member.limit:.3g} s")

    def _opened(self, member: Member, reply: Answer | Failed) -> None:
        if isinstance(reply, Failed):
            self._failed_to_start(member, reply)
            return
        facts: Facts = reply.value
        self.facts = self.facts or facts
        if (facts.base_digest, facts.trained) != (self.facts.base_digest, self.facts.trained):
            self.lose(
                member,
                f"has a base model with digest {facts.base_digest[:12]}…, the run's is {self.facts.base_digest[:12]}…: "
                "the base model has changed, and it was not used",
            )
            return
        member.facts, member.position = facts, 0
        if self.log:  # behind: it catches up on its own, while the others go on
            self.order(member, "move", (), START_SECONDS)

    def _failed_to_start(self, member: Member, reply: Failed) -> None:
        if self.facts is None:  # the first of all: the user's mistake, most likely
            raise error_of(reply)
        self.lose(member, f"could not start: {reply.text}")

    def wait_until_open(self) -> Facts:
        while self.facts is None:
            self.staff()
            for _ in self.replies(1.0):
                pass
            self.overdue()
        return self.facts

    # ---- the journal

    def follow(self, updates: Sequence[Update], marks: Mapping[int, str], snapshots: str | None) -> None:
        """From now on, this is what every member must have applied."""
        self.log[:], self.marks = updates, dict(marks)
        self.snapshots = snapshots or self.snapshots

    def close(self) -> None:
        for member in list(self.members):
            self._drop(member, peacefully=True)
        self.transport.close()


def error_of(reply: Failed) -> MezzoError:
    kind = getattr(errors, reply.kind, RunFailed)
    error: MezzoError = kind(reply.text)
    return error
