"""What engines made of workers share: units out, scores together, and the check that all are still the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mezzo.engines.microbatch import EngineCall, WorkUnit, candidate_count, group_calls, split_into_units
from mezzo.errors import RunFailed
from mezzo.parallel.consensus import alike, dissenters
from mezzo.parallel.messages import Facts
from mezzo.parallel.stats import Cost
from mezzo.types import Batch, MicroBatch, Probe, Scores, Update

ROUNDS = 4
"""Times that disagreeing workers are rebuilt before the run gives up."""
LOOKED_AT = 16
"""Examples that the check before step 1 is shown."""


class WorkersEngine(ABC):
    """The engine contract for a driver that holds no weights. `log` is the journal's updates: where all workers must be."""

    pipeline = None

    def __init__(self, facts: Facts, cost: Cost, log: list[Update], check_every: int) -> None:
        self.micro_batch: MicroBatch = facts.micro_batch
        self.trained, self.base_digest = facts.trained, facts.base_digest
        self.facts, self.cost, self.log, self.check_every = facts, cost, log, check_every
        self._checked = 0

    # ---- how workers are reached

    @abstractmethod
    def answers(self, question: str, batch: Batch, probes: Sequence[Probe], *extra: Any) -> dict[WorkUnit, Any]:
        """What was found for every unit of a batch, each answer one that can be true."""

    @abstractmethod
    def all(self, question: str, *values: Any) -> dict[Any, Any]:
        """The answers of all workers that can answer now, by worker."""

    @abstractmethod
    def one(self, question: str, *values: Any) -> Any:
        """The answer of any worker."""

    @abstractmethod
    def rebuild(self, worker: Any, why: str) -> None:
        """Let a worker begin again from the base model and the journal."""

    def pieces(self, batch: Batch, probes: Sequence[Probe], works: Sequence[WorkUnit]) -> list[EngineCall]:
        return group_calls(batch, probes, works, self.facts.joins_units)

    # ---- the contract

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        self._check_if_due(batch, probes)
        out = np.full((len(probes), len(batch), candidate_count(batch)), -np.inf, dtype=np.float32)
        for work, scores in self.answers("score", batch, probes).items():
            out[work.first : work.last, list(work.places), : scores.shape[2]] = scores
        return out

    def generate(self, batch: Batch, probes: Sequence[Probe], max_new_tokens: int) -> list[list[tuple[int, ...]]]:
        out: list[list[tuple[int, ...]]] = [[()] * len(batch) for _ in probes]
        for work, found in self.answers("generate", batch, probes, max_new_tokens).items():
            for probe, texts in zip(range(work.first, work.last), found, strict=True):
                for place, text in zip(work.places, texts, strict=True):
                    out[probe][place] = text
        return out

    def apply(self, updates: Sequence[Update]) -> None:
        """Every worker applies them before it answers again: they travel with its next order."""
        self.log.extend(updates)

    def check(self, batch: Batch, eps: float) -> None:
        self.one("check", Batch(batch.prompts[:LOOKED_AT], batch.readout), eps)

    def digest(self) -> str:
        """The digest that the workers agree on; one that differs is rebuilt first."""
        agreed: str = self._agreed("weights", lambda a, b: a == b, "digest")
        return agreed

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        tensors: dict[str, npt.NDArray[np.generic]] = self.one("state")
        return tensors

    def load_state(self, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
        raise RunFailed("weights are not sent to workers: they are brought to a position of the journal")

    def step_cost(self) -> dict[str, Any]:
        return self.cost.step_line()

    # ---- divergence

    def _check_if_due(self, batch: Batch, probes: Sequence[Probe]) -> None:
        """Every so many steps: have all the same weights, and do they compute the same?"""
        if not self.check_every or len(self.log) - self._checked < self.check_every:
            return
        self._checked = len(self.log)
        self.digest()
        first = self.pieces(batch, probes, split_into_units(batch, len(probes), self.micro_batch)[:1])
        self._agreed("scores", alike, "score", first, self.micro_batch)

    def _agreed(self, what: str, same: Any, question: str, *values: Any) -> Any:
        for _ in range(ROUNDS):
            found = self.all(question, *values)
            if question == "score":
                found = {who: value[0] if isinstance(value, list) and value else None for who, value in found.items()}
            wrong = dissenters(found, same)
            for worker in wrong:
                self.cost.rebuilt += 1
                self.rebuild(worker, f"its {what} differed from the others'")
            if len(wrong) < len(found):
                return next(value for who, value in found.items() if who not in wrong)
        raise RunFailed(f"the workers' {what} keep differing; the journal holds the run: continue with --resume")
