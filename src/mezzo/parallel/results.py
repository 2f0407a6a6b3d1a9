"""Results of work units, checked as they arrive: shape, finite scores, and a second opinion on scores that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from mezzo.engines.microbatch import EngineCall, WorkUnit, candidate_count
from mezzo.parallel.messages import RequestKind
from mezzo.parallel.stats import WorkStats
from mezzo.types import Batch, Scores

WorkerId = TypeVar("WorkerId")
# Non-finite results of one unit after which the last is accepted even if no two are equal.
MAX_OPINIONS = 3


class MalformedReply(Exception):
    """A reply that cannot be the result of the calls that were sent."""


class UnitResults(Generic[WorkerId]):
    """The results of one request's units, whichever transport brings them.

    A unit with non-finite scores stays pending until another worker has computed it too. Equal scores are genuine; finite ones
    show that the first worker is faulty.
    """

    def __init__(self, kind: RequestKind, units: Sequence[WorkUnit], stats: WorkStats) -> None:
        self.kind, self.units, self.stats = kind, tuple(units), stats
        self.pending = set(units)
        self.values: dict[WorkUnit, Any] = {}
        self._non_finite: dict[WorkUnit, list[tuple[WorkerId, Scores]]] = {}

    def add(self, worker: WorkerId, calls: Sequence[EngineCall], values: Any) -> list[WorkerId]:
        """Take the values that a worker computed for its calls; return the workers that they show to be faulty."""
        if not isinstance(values, list) or len(values) != len(calls):
            raise MalformedReply("sent an invalid reply")
        if self.kind == "score" and not all(map(_has_expected_shape, values, calls)):
            raise MalformedReply("sent scores of the wrong shape")
        faulty: list[WorkerId] = []
        for call, value in zip(calls, values, strict=True):
            for unit, batch, rows in call.split():
                if unit not in self.pending:
                    continue
                if self.kind == "score":
                    faulty += self._add_scores(worker, unit, batch, value[:, rows, : candidate_count(batch)])
                else:
                    self._accept(unit, [texts[rows] for texts in value])
        return list(dict.fromkeys(faulty))

    def doubted_workers(self, unit: WorkUnit) -> list[WorkerId]:
        """Workers that returned non-finite scores for a pending unit, the latest last."""
        return [worker for worker, _ in self._non_finite.get(unit, ())]

    def _add_scores(self, worker: WorkerId, unit: WorkUnit, batch: Batch, scores: Scores) -> list[WorkerId]:
        if _is_finite(scores, batch):
            self._accept(unit, scores)
            return [other for other in self.doubted_workers(unit) if other != worker]
        opinions = self._non_finite.setdefault(unit, [])
        is_genuine = any(np.array_equal(scores, earlier, equal_nan=True) for _, earlier in opinions)
        opinions.append((worker, scores))
        if is_genuine or len(opinions) >= MAX_OPINIONS:
            self._accept(unit, scores)
        else:
            self.stats.recomputed_units += 1
        return []

    def _accept(self, unit: WorkUnit, value: Any) -> None:
        self.pending.discard(unit)
        self.values[unit] = value


def _has_expected_shape(scores: Any, call: EngineCall) -> bool:
    return (
        isinstance(scores, np.ndarray)
        and scores.dtype == np.float32
        and scores.shape == (len(call.probes), len(call.batch), candidate_count(call.batch))
    )


def _is_finite(scores: Scores, batch: Batch) -> bool:
    """Whether every candidate has a finite score; an example with fewer candidates than others is padded with -inf."""
    if np.isfinite(scores).all():
        return True
    if batch.readout.kind != "candidates":
        return False
    counts = np.array([len(prompt.candidates) for prompt in batch.prompts])
    is_candidate = np.arange(scores.shape[2])[None, :] < counts[:, None]
    return bool(np.isfinite(scores[:, is_candidate]).all())
