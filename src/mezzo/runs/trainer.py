"""The training loop: ask the method's questions, record its update, apply it; evaluate, snapshot and stop when due."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

from mezzo.engines.base import Engine, GradientEngine
from mezzo.errors import JournalError, RunFailed
from mezzo.evaluation.evaluate import Evaluation, rank
from mezzo.journal.journal import Journal
from mezzo.method.method import DeviceMethod, Method, Questions, answer_questions
from mezzo.replay.snapshots import Snapshots
from mezzo.runs.recorded_evaluations import EvaluatedCheckpoint
from mezzo.types import DeviceStep, GradientStep, Question, StepRecord

# Consecutive steps without a finite loss after which a run gives up.
MAX_SKIPS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run evaluates on dev and when it ends."""

    steps: float = math.inf
    forwards: float = math.inf
    """Example-forwards of training: forward passes times the examples in each."""
    eval_every: int = 0
    eval_forwards: float = 0
    """Example-forwards between evaluations, where `eval_every` steps are not what counts."""
    patience: int = 0
    seconds: float = math.inf
    snapshot_seconds: float = 300.0


@dataclass(repr=False)
class MeZOTrainer:
    """Trains an engine's tensors by a method. Iterate over `run()`: each item is the record of a finished step."""

    engine: Engine
    method: Method
    journal: Journal
    limits: Limits
    evaluate: Callable[[], Evaluation] | None = None
    snapshots: Snapshots | None = None
    notify: Callable[[str, dict[str, Any]], None] = lambda kind, values: None
    stop_reason: Callable[[], str] = lambda: ""
    """Asked before every step: why to end; empty to go on."""
    start: int = 0
    history: list[EvaluatedCheckpoint] = field(default_factory=list)
    """The evaluations on dev."""
    stopped: str = ""
    spent: int = 0
    """Example-forwards of training so far."""
    step: int = field(init=False)
    best: EvaluatedCheckpoint | None = field(init=False, default=None)
    """The best evaluation so far, as `evaluation.rank` orders them."""
    _since_best: int = field(init=False, default=0)
    """Evaluations since then."""
    _interrupted: bool = field(init=False, default=False)
    _skips: int = field(init=False, default=0)
    _snapshot_time: float = field(init=False, default=0.0)
    _upcoming: _Upcoming = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.start
        self._upcoming = _Upcoming(self.method)
        for evaluation in self.history:
            self._compare_with_best(evaluation)

    def __repr__(self) -> str:
        best = f", best {self.best.evaluation} at step {self.best.step}" if self.best else ""
        return f"<{type(self).__name__}: step {self.step}, {self.spent:,} example-forwards{best}>"

    def _compare_with_best(self, found: EvaluatedCheckpoint) -> None:
        if self.best is None or _rank(found) > _rank(self.best):
            self.best, self._since_best = found, 0
        else:
            self._since_best += 1

    def run(self) -> Iterator[StepRecord]:
        """Yield a record a step until a limit is met; then `stopped` says which."""
        start = self._snapshot_time = time.monotonic()
        with _interrupt_handler(self._interrupt):
            self._evaluate_if_due()  # catch up on an evaluation that a kill prevented
            while not (stopped := self._reason_to_stop(start)):
                record = self.one_step(self.step)
                self.step += 1
                yield record
                self._evaluate_if_due()
                self._snapshot_if_due()
        self.stopped = stopped
        self._finish()

    def one_step(self, step: int) -> StepRecord:
        """The algorithm. Everything else in this file decides when to run it."""
        record = self._run_on_device(step) or self._run_on_host(step)
        # Write-ahead: from here on a replay includes the step; a crash before this line loses it together with the memory.
        self.journal.append(record)
        self.engine.apply([record.update])
        self.method.observe(record)
        self.spent += self.method.cost(record)
        self._stop_if_hopeless(record)
        return record

    def _run_on_host(self, step: int) -> StepRecord:
        def answer(question: Question | GradientStep) -> Any:
            if isinstance(question, GradientStep):
                assert isinstance(self.engine, GradientEngine)
                return self.engine.descend(question)
            if question.generation:
                return self.engine.generate(question.batch, question.probes, question.generation)
            if self.engine.pipeline is not None and self.method.looks_ahead and step + 1 < self.limits.steps:
                self.engine.pipeline.prefetch(lambda: cast(Question, self._upcoming.questions(step + 1)[1]))
            return self.engine.score(question.batch, question.probes)

        return answer_questions(*self._upcoming.questions(step), answer)

    def _run_on_device(self, step: int) -> StepRecord | None:
        """The fast path, where the engine has one and the method can be described to it."""
        pipeline, method = self.engine.pipeline, self._upcoming.device_method
        if pipeline is None or method is None or (device_step := self._upcoming.device_step(step)) is None:
            return None
        following = None if step + 1 >= self.limits.steps else lambda: self._upcoming.device_step(step + 1)
        losses = pipeline.run(device_step, following)
        return None if losses is None else method.conclude(step, losses)

    def _evaluate_if_due(self) -> None:
        """Evaluate before the first step, every `eval_every` steps and at the end."""
        if self.evaluate is None or (self.history and self.history[-1].step >= self.step):
            return
        if self._is_evaluation_due() or self.has_reached_limit():
            found = EvaluatedCheckpoint(self.step, self.spent, self.evaluate())
            values = {"step": self.step, "spent": self.spent, **found.evaluation.to_dict()}
            self.journal.note("evaluation", values)  # it may decide where the run ends
            self.history.append(found)
            self._compare_with_best(found)
            self.notify("evaluation", values)
            if self.best is found:
                self._snapshot()

    def _is_evaluation_due(self) -> bool:
        every, forwards = self.limits.eval_every, self.limits.eval_forwards
        if every:
            return self.step % every == 0
        return bool(forwards) and (not self.history or self.spent - self.history[-1].spent >= forwards)

    def has_reached_limit(self) -> bool:
        limits = self.limits
        return self.step >= limits.steps or self.spent >= limits.forwards or bool(self.method.finished)

    def _reason_to_stop(self, start: float) -> str:
        if self.has_reached_limit():
            return self.method.finished or "finished"
        if asked := "interrupted" if self._interrupted else self.stop_reason():
            return asked
        if time.monotonic() - start > self.limits.seconds:
            return "time limit"
        return "no improvement" if 0 < self.limits.patience <= self._since_best else ""

    def _stop_if_hopeless(self, record: StepRecord) -> None:
        self._skips = self._skips + 1 if record.skipped else 0
        if self._skips >= MAX_SKIPS:
            self.journal.sync()
            finite = all(math.isfinite(loss) for loss in record.losses)
            what = "the step was too large for the weights" if finite else "the loss was not a number"
            raise RunFailed(
                f"{what} for {MAX_SKIPS} steps in a row (last step {record.step}); they did not touch "
                "the weights. A smaller --eps, or a smaller --lr of --method spsa, usually helps; the journal holds the run"
            )

    def _snapshot_if_due(self) -> None:
        due = time.monotonic() - self._snapshot_time >= self.limits.snapshot_seconds
        if due and self.journal.may_mark:
            self._snapshot()

    def _snapshot(self) -> None:
        self._snapshot_time = time.monotonic()
        if self.snapshots is None or self.step == 0:
            return
        digest = self.engine.digest()
        self.journal.mark(self.step, digest)
        best = self.best
        try:
            self.snapshots.save(self.step, self.engine.state(), digest, keep=(best.step,) if best else ())
        except JournalError as error:  # snapshots are a cache: the run goes on without one
            self.notify("warning", {"step": self.step, "text": f"no snapshot was saved: {error}"})

    def _finish(self) -> None:
        """End the journal with the digest of the final weights."""
        self._snapshot()
        if self.snapshots is None or self.step == 0:
            self.journal.mark(self.step, self.engine.digest())
        self.notify("stopped", {"step": self.step, "reason": self.stopped})

    def _interrupt(self) -> None:
        self._interrupted = True


def _rank(found: EvaluatedCheckpoint) -> tuple[float, float, int]:
    return rank(found.evaluation.value, found.evaluation.loss, found.step)


class _Upcoming:
    """The first question, and the device step, of this step and the next: an engine asks for the next one early, and must
    then be given the same objects again."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.device_method = method if isinstance(method, DeviceMethod) else None
        self._questions: dict[int, tuple[Questions, Question | GradientStep]] = {}
        self._device_steps: dict[int, DeviceStep | None] = {}

    def questions(self, step: int) -> tuple[Questions, Question | GradientStep]:
        """The step's coroutine and the first question it asked."""
        if step not in self._questions:
            self._questions = {number: kept for number, kept in self._questions.items() if number == step - 1}
            questions = self.method.step(step)
            self._questions[step] = questions, next(questions)
        return self._questions[step]

    def device_step(self, step: int) -> DeviceStep | None:
        if step not in self._device_steps:
            self._device_steps = {number: kept for number, kept in self._device_steps.items() if number == step - 1}
            self._device_steps[step] = self.device_method.device_step(step) if self.device_method else None
        return self._device_steps[step]


@contextmanager
def _interrupt_handler(interrupt: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the loop to end after the current step; a second one ends at once. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = (signal.SIG_DFL, signal.default_int_handler)
    numbers = [signal.SIGINT] + [signal.SIGTERM] * (signal.getsignal(signal.SIGTERM) in usual)
    previous = {number: signal.getsignal(number) for number in numbers}

    def put_back() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        put_back()
        interrupt()

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        put_back()
