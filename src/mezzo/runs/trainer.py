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

from mezzo.engines.base import Autonomous, Engine, Foresighted
from mezzo.errors import JournalError, RunFailed
from mezzo.evaluation.evaluate import Evaluation, rank
from mezzo.journal.journal import Journal
from mezzo.method.batches import Batches
from mezzo.method.estimators import Estimator, Spsa
from mezzo.method.objectives import Losses, Objective, cross_entropy
from mezzo.method.optimizers import Sgd
from mezzo.replay.snapshots import Snapshots
from mezzo.types import Question, Rule, StepRecord, Update

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
    _autonomous: Autonomous | None = field(init=False, default=None)
    _known: dict[int, Question] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.step = self.start
        self._foresighted = self.engine if isinstance(self.engine, Foresighted) else None
        self._autonomous = self.engine if isinstance(self.engine, Autonomous) else None

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
        question = self._question(step)
        losses = self._judged(question, step)
        slopes = self.estimator.tell(question.probes, losses)
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
        # Before anybody sees weights that moved: replay heals a crash from here on, and before it, memory is lost with the step.
        self.journal.append(record)
        self.engine.apply([update])
        self._give_up_if_hopeless(record)
        return record

    def _judged(self, question: Question, step: int) -> Losses:
        """Losses by the engine, where it and the method allow its device to go on meanwhile; else scores, and the objective."""
        after = None if step + 1 >= self.limits.steps else lambda: self._question(step + 1)
        if self._autonomous and (losses := self._autonomous.advance(question, after)) is not None:
            return losses
        if self._foresighted and after:
            self._foresighted.expect(after)
        return self.objective(self.engine.score(question.batch, question.probes), question.batch)

    def _question(self, step: int) -> Question:
        """What a step asks; the next step's is known already when the engine looked ahead."""
        if step not in self._known:
            self._known = {number: question for number, question in self._known.items() if number == step - 1}
            self._known[step] = Question(self.batches(step), self.estimator.ask(step), self._rule(step))
        return self._known[step]

    def _rule(self, step: int) -> Rule | None:
        """The step as numbers: where a method is the published one, with no function of a user's in it."""
        estimator = self.estimator
        if self.objective is not cross_entropy or not isinstance(estimator, Spsa) or estimator.samples > 1:
            return None
        return self.optimizer.rule(step, 2 * estimator.eps)

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
