"""The loop: ask, score, judge, tell, step, journal, apply. Everything else here decides when to look and when to stop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from mezzo.batches import Batches
from mezzo.engines.base import Engine, Foresighted
from mezzo.errors import JournalError, RunFailed
from mezzo.estimators import Estimator
from mezzo.evaluation import Evaluation, rank
from mezzo.journal import Journal
from mezzo.objectives import Objective
from mezzo.optim import Sgd
from mezzo.snapshots import Snapshots
from mezzo.types import Batch, Probe, StepRecord, Update

SKIPS = 20
"""Consecutive steps without a finite loss after which a run gives up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run looks at dev and when it ends."""

    steps: int
    eval_every: int = 0
    patience: int = 0
    seconds: float = math.inf
    snapshot_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint: a journal position."""

    step: int
    evaluation: Evaluation


@dataclass
class MeZOTrainer:
    """Trains an engine's tensors from losses alone. Iterate over `run()`; each item is the record of a finished step."""

    engine: Engine
    estimator: Estimator
    optimizer: Sgd
    objective: Objective
    batches: Batches
    journal: Journal
    limits: Limits
    evaluate: Callable[[], Evaluation] | None = None
    snapshots: Snapshots | None = None
    notify: Callable[[str, dict[str, Any]], None] = lambda kind, values: None
    start: int = 0
    history: list[tuple[int, Evaluation]] = field(default_factory=list)
    stopped: str = ""
    step: int = field(init=False)
    _interrupted: bool = field(init=False, default=False)
    _skips: int = field(init=False, default=0)
    _snapshot_at: float = field(init=False, default=0.0)
    _foresighted: Foresighted | None = field(init=False, default=None)
    _known: tuple[int, Batch, tuple[Probe, ...]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.step = self.start
        self._foresighted = self.engine if isinstance(self.engine, Foresighted) else None

    @property
    def best(self) -> Best | None:
        """The best dev evaluation so far, as `evaluation.rank` has it."""
        found = (Best(step, evaluation) for step, evaluation in self.history)
        return max(found, key=lambda b: rank(b.evaluation.value, b.evaluation.loss, b.step), default=None)

    def run(self) -> Iterator[StepRecord]:
        """Yield a record a step until a limit is met; then `stopped` says which."""
        began = self._snapshot_at = time.monotonic()
        with self._interrupts():
            self._look()  # a run that was killed between a step and its evaluation makes up for it
            while not (stopped := self._reason_to_stop(began)):
                record = self.one_step(self.step)
                self.step += 1
                yield record
                self._look()
                self._snapshot_if_due()
        self.stopped = stopped
        self._finish()

    def one_step(self, step: int) -> StepRecord:
        """The algorithm: everything else in this file decides when to do it."""
        batch, probes = self._question(step)
        if self._foresighted and step + 1 < self.limits.steps:
            self._foresighted.expect(lambda: self._question(step + 1))
        scores = self.engine.score(batch, probes)
        losses = self.objective(scores, batch)
        slopes = self.estimator.tell(probes, losses)
        usable = all(math.isfinite(value) for value in (*losses, *(slope.value for slope in slopes)))
        update = self.optimizer.step(slopes, step) if usable else Update()
        if not all(math.isfinite(value) for value in (update.keep, *(coef for _, coef in update.terms))):
            usable, update = False, Update()  # a step too large for float32 is no step
        record = StepRecord(
            step,
            tuple(float(loss) for loss in losses),
            tuple(slope.value for slope in slopes),
            update,
            self.optimizer.lr(step),
            skipped="" if usable else "non-finite loss",
        )
        self.journal.append(record)  # write-ahead: replay heals a crash before apply
        self.engine.apply([update])
        self._give_up_if_hopeless(record)
        return record

    def _question(self, step: int) -> tuple[Batch, tuple[Probe, ...]]:
        """What a step scores, and where; the next step's is known already when the engine looked ahead."""
        if self._known is None or self._known[0] != step:
            self._known = step, self.batches(step), self.estimator.ask(step)
        return self._known[1:]

    def _look(self) -> None:
        """Evaluate when due: before the first step, every `eval_every` steps and at the end."""
        every = self.limits.eval_every
        if self.evaluate is None or not every or (self.history and self.history[-1][0] >= self.step):
            return
        if self.step % every == 0 or self.step >= self.limits.steps:
            evaluation = self.evaluate()
            self.history.append((self.step, evaluation))
            self.notify("evaluation", {"step": self.step, **evaluation.to_dict()})
            if self.best is not None and self.best.step == self.step:
                self._snapshot()

    def _reason_to_stop(self, began: float) -> str:
        if self.step >= self.limits.steps:
            return "finished"
        if self._interrupted:
            return "interrupted"
        if time.monotonic() - began > self.limits.seconds:
            return "time limit"
        if self.limits.patience and self.best and self._looks_since_best() >= self.limits.patience:
            return "no improvement"
        return ""

    def _looks_since_best(self) -> int:
        best = self.best
        return sum(step > best.step for step, _ in self.history) if best else 0

    def _give_up_if_hopeless(self, record: StepRecord) -> None:
        self._skips = self._skips + 1 if record.skipped else 0
        if self._skips >= SKIPS:
            self.journal.sync()
            raise RunFailed(
                f"the loss was not a number for {SKIPS} steps in a row (last step {record.step}); they did not "
                "touch the weights. A smaller --lr or --eps usually helps; the journal holds the run up to here"
            )

    def _snapshot_if_due(self) -> None:
        if time.monotonic() - self._snapshot_at >= self.limits.snapshot_seconds:
            self._snapshot()

    def _snapshot(self) -> None:
        self._snapshot_at = time.monotonic()
        if self.snapshots is None or self.step == 0:
            return
        digest = self.engine.digest()
        self.journal.mark(self.step, digest)
        best = self.best
        try:
            self.snapshots.save(self.step, self.engine.state(), digest, keep=(best.step,) if best else ())
        except JournalError as error:  # a cache: the run can do without it
            self.notify("warning", {"step": self.step, "text": f"no snapshot was saved: {error}"})

    def _finish(self) -> None:
        """The journal ends with the digest of what it leads to."""
        self._snapshot()
        if self.snapshots is None or self.step == 0:
            self.journal.mark(self.step, self.engine.digest())
        self.notify("stopped", {"step": self.step, "reason": self.stopped})

    def _interrupts(self) -> _Interrupts:
        return _Interrupts(self._interrupt)

    def _interrupt(self) -> None:
        self._interrupted = True


class _Interrupts:
    """Ctrl-C asks the loop to end after the current step; a second one ends at once. Only in the main thread."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self.interrupt = interrupt
        self.kept: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.kept = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *_: object) -> None:
        if self.kept is not None:
            signal.signal(signal.SIGINT, self.kept)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, self.kept)
        self.interrupt()
