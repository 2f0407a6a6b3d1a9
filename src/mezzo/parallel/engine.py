"""What engines made of workers share: units go out, scores come back, and workers are checked for divergence."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mezzo.engines.base import Continuations
from mezzo.engines.microbatch import EngineCall, WorkUnit, empty_scores, group_calls, split_into_units
from mezzo.errors import RunFailed
from mezzo.parallel.consensus import find_outliers, scores_agree
from mezzo.parallel.messages import RequestKind, WorkerFacts
from mezzo.parallel.results import UnitResults
from mezzo.parallel.stats import WorkStats
from mezzo.parallel.update_log import UpdateLog
from mezzo.types import Batch, Generation, Probe, Scores, Update

# Times that disagreeing workers are rebuilt before the run gives up.
MAX_REBUILD_ROUNDS = 4
# Examples that the check before step 1 uses.
CHECK_EXAMPLES = 16

MakeCalls = Callable[[Sequence[WorkUnit]], list[EngineCall]]


class WorkersEngine(ABC):
    """The engine contract for a driver that holds no weights."""

    pipeline = None

    def __init__(self, check_every: int) -> None:
        self.stats, self.log, self.check_every = WorkStats(), UpdateLog(), check_every
        self.report: Callable[[str], None] = lambda text: None
        self.requested_count: Callable[[], int | None] = lambda: None
        self._last_checked = self._checks = 0

    def use_facts(self, facts: WorkerFacts) -> None:
        """Take over what the first worker reported about itself."""
        self.facts, self.micro_batch = facts, facts.micro_batch
        self.trained, self.base_digest = facts.trained, facts.base_digest

    def attach_run(
        self, snapshot_folder: str, report: Callable[[str], None], requested_count: Callable[[], int | None]
    ) -> None:
        self.log.snapshot_folder, self.report, self.requested_count = snapshot_folder, report, requested_count

    # ---- how workers are reached

    @property
    @abstractmethod
    def worker_count(self) -> int:
        """Workers that the run should have."""

    @property
    def ready_count(self) -> int:
        """Workers whose engine is loaded."""
        return self.worker_count

    @abstractmethod
    def compute_units(self, results: UnitResults[Any], make_calls: MakeCalls, options: tuple[Any, ...]) -> None:
        """Have workers compute units until none is pending."""

    @abstractmethod
    def request_all(self, kind: RequestKind, *arguments: Any) -> dict[Any, Any]:
        """The values of all workers that can answer now, by worker."""

    @abstractmethod
    def request_any(self, kind: RequestKind, *arguments: Any) -> Any:
        """The value of any one worker."""

    @abstractmethod
    def rebuild_worker(self, worker: Any, reason: str) -> None:
        """Restart a worker from the base model and the journal."""

    @abstractmethod
    def catch_up(self) -> None:
        """Have workers replay what the log holds."""

    # ---- the engine contract

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        self._check_if_due(batch, probes)
        out = empty_scores(batch, len(probes))
        for unit, scores in self._compute("score", batch, probes).items():
            out[unit.probe_start : unit.probe_stop, list(unit.example_indices), : scores.shape[2]] = scores
        return out

    def generate(self, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
        out: Continuations = [[[] for _ in batch.prompts] for _ in probes]
        for unit, value in self._compute("generate", batch, probes, generation).items():
            for probe, texts in zip(range(unit.probe_start, unit.probe_stop), value, strict=True):
                for index, text in zip(unit.example_indices, texts, strict=True):
                    out[probe][index] = text
        return out

    def apply(self, updates: Sequence[Update]) -> None:
        """Record the updates; each worker receives them with its next request and applies them first."""
        self.log.updates.extend(updates)

    def check(self, batch: Batch, eps: float) -> None:
        self.request_any("check", Batch(batch.prompts[:CHECK_EXAMPLES], batch.readout), eps)

    def digest(self) -> str:
        """The digest that the workers agree on; a worker that differs is rebuilt first."""
        return str(self._agreed_value("weights", operator.eq, "digest"))

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        return self.request_any("state")

    def load_state(self, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
        raise RunFailed("weights are not sent to workers: they are brought to a position of the journal")

    def describe(self) -> dict[str, Any]:
        return {**self.facts.description, "workers": self.worker_count}

    def replay_journal(self, updates: Sequence[Update], marks: Mapping[int, str], snapshot_folder: str | None) -> None:
        self.log.replace(updates, marks, snapshot_folder)
        self.catch_up()

    def step_stats(self) -> dict[str, Any]:
        return self.stats.take_step()

    def run_stats(self) -> dict[str, Any]:
        return self.stats.summary(self.worker_count)

    def _compute(self, kind: RequestKind, batch: Batch, probes: Sequence[Probe], *options: Any) -> dict[WorkUnit, Any]:
        """The checked value of every unit of a batch."""
        self.stats.start_request(is_training=any(probe.terms for probe in probes))
        units = split_into_units(batch, len(probes), self.micro_batch)
        results = UnitResults[Any](kind, units, self.stats)
        merge = self.facts.merges_units
        self.compute_units(
            results, lambda units: group_calls(batch, probes, units, merge), (self.micro_batch, *options)
        )
        self.stats.finish_request(self.ready_count)
        return results.values

    # ---- divergence

    def _check_if_due(self, batch: Batch, probes: Sequence[Probe]) -> None:
        """Every `check_every` steps, compare all workers' weights and their scores of one unit."""
        if not self.check_every or len(self.log) - self._last_checked < self.check_every:
            return
        self._last_checked = len(self.log)
        self.digest()
        units = split_into_units(batch, len(probes), self.micro_batch)
        place = self._checks % len(units)  # another one each time: a worker may be wrong on long rows alone
        self._checks += 1
        calls = group_calls(batch, probes, units[place : place + 1], merge=False)
        self._agreed_value("scores", scores_agree, "score", calls, self.micro_batch)

    def _agreed_value(self, what: str, agree: Callable[[Any, Any], bool], kind: RequestKind, *arguments: Any) -> Any:
        """The value that most workers return; those that differ are rebuilt, all of them if there is no majority."""
        for _ in range(MAX_REBUILD_ROUNDS):
            values = self.request_all(kind, *arguments)
            outliers = find_outliers(values, agree)
            for worker in outliers:
                self.stats.rebuilt += 1
                self.rebuild_worker(worker, f"its {what} differed from the others'")
            if len(outliers) < len(values):
                return next(value for worker, value in values.items() if worker not in outliers)
        raise RunFailed(f"the workers' {what} keep differing; the journal holds the run: continue with --resume")
