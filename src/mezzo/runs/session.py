"""One run from start to end: the trainer between a run folder that remembers and an observer that shows."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mezzo.engines import memory, open_engine
from mezzo.engines.base import Engine, Workers
from mezzo.errors import MezzoError
from mezzo.evaluation.evaluate import DetailedEvaluation
from mezzo.journal.content import read
from mezzo.journal.journal import Journal
from mezzo.replay.replay import bring_to, check_base, load_snapshot
from mezzo.runs.events import Events
from mezzo.runs.folder import Folder
from mezzo.runs.mistakes import list_mistakes
from mezzo.runs.outcome import Assessment, collect_answers, describe_changes, measure_gains
from mezzo.runs.result import Run, read_curve
from mezzo.runs.setup import Setup
from mezzo.runs.trainer import MeZOTrainer
from mezzo.runs.verdict import SMALLER, judge
from mezzo.types import StepRecord

# After this many steps, an expected movement of the weights below this share of their size is warned about.
SLOW_CHECK_STEP, SLOW_SHARE = 50, 1e-3
MIB = 2**20


@dataclass(repr=False)
class Session:
    """A run in progress, made by `runs.build`. Iterate `records()`, then call `result()`."""

    setup: Setup
    engine: Engine
    folder: Folder
    journal: Journal
    trainer: MeZOTrainer
    events: Events
    earlier_seconds: float = 0.0
    """What the run had taken when it last ended, before it was resumed."""
    untrained: Assessment | None = None
    """The model on the test examples as it came."""
    _slopes: list[float] = field(default_factory=list)
    _failures: set[str] = field(default_factory=set)
    """The kinds of failed rewards that have been said."""

    def __repr__(self) -> str:
        config, step = self.setup.config, self.trainer.step
        return f"<session {self.folder.path}: {self.setup.task.name}, {config.method} on {config.space}, step {step}>"

    # ---- before the first step

    def begin(self) -> None:
        """Announce the run and, where it is new, evaluate the untrained model on the test set."""
        self._announce()
        self._warn_about_surprises()
        if self.untrained is None and self.trainer.start == 0 and self.setup.splits.test:
            _, self.untrained = self._test()
            assert self.untrained.answers is not None
            found = {**self.untrained.evaluation.to_dict(), **self.untrained.answers.to_event()}
            self.journal.note("zero-shot", {"step": 0, **found})
            self.events("zero-shot", {"step": 0, **found})
            self._warn_about_failed_rewards()

    def note_command(self, words: list[str]) -> None:
        """Store the command line, for the report."""
        self.folder.note("command", {"step": self.trainer.start, "text": shlex.join(words)})

    def _announce(self) -> None:
        config, splits = self.setup.config, self.setup.splits
        self.events(
            "start",
            {
                "out": str(self.folder.path),
                "step": self.trainer.start,
                "steps": config.steps,
                "method": config.method,
                "spent": self.trainer.spent,
                "budget": _finite(self.trainer.limits.forwards),
                "budget_seconds": _finite(self.trainer.limits.seconds),
                "train": len(self.setup.train_prompts),
                "dev": len(splits.dev),
                "test": len(splits.test) if splits.has_test else 0,
                "space": config.space,
                "lr": config.lr,
                "eps": config.eps,
                **self.engine.describe(),
            },
        )

    def _warn_about_surprises(self) -> None:
        size, start = self.setup.config.batch_size or 0, self.trainer.start
        train = len(self.setup.train_prompts)
        if size > train and not start:
            text = f"--batch-size {size} is more than the {train} training examples: every step sees all of them"
            self.events.warn(0, text)
        if self.setup.config.method == "adam":
            extra = 12 * self.engine.describe()["trained_parameters"] / MIB
            text = (
                f"--method adam is the gradient baseline: it keeps gradients and two moments ({extra:,.0f} MiB) and the "
                "activations of a backward pass beside what inference needs, and such a run cannot be resumed or rebuilt"
            )
            self.events.warn(0, text)
        if self.trainer.has_reached_limit():
            text = (
                f"this run has finished: its {start} steps are done. "
                f"Train on with --resume {shlex.quote(str(self.folder.path))} " + self._longer_limit()
            )
            self.events.warn(start, text)

    def _longer_limit(self) -> str:
        """The option that lets a finished run go on."""
        trainer = self.trainer
        if trainer.step >= trainer.limits.steps:
            return f"--steps N, N more than {trainer.step}"
        return f"--budget N, N more than {trainer.spent:,} example-forwards"

    def _test(self) -> tuple[DetailedEvaluation, Assessment]:
        test = self.setup.splits.test
        detail = self.setup.evaluate_in_detail(self.engine, test)
        return detail, Assessment(detail.evaluation, collect_answers(detail, test, self.setup.task))

    # ---- running

    def train(self) -> Run:
        """Run to the end and return the result."""
        for _ in self.records():
            pass
        return self.result()

    def records(self) -> Iterator[StepRecord]:
        """Train; each record is in the metrics when it is yielded."""
        try:
            for record in self.trainer.run():
                stats = self.engine.step_stats() if isinstance(self.engine, Workers) else {}
                self.events("step", _step_metrics(record) | {"spent": self.trainer.spent} | stats)
                self._warn_if_too_slow(record)
                self._warn_about_failed_rewards()
                yield record
        except BaseException as error:
            if isinstance(error, MezzoError):
                with contextlib.suppress(MezzoError):  # the disk may be what failed
                    self.events("failed", {"step": self.trainer.step, "text": str(error)})
            self.close()
            raise

    def _warn_if_too_slow(self, record: StepRecord) -> None:
        """Warn about a learning rate so small that the whole run would hardly move the weights."""
        if self.setup.config.method != "spsa":
            return
        self._slopes += list(record.slopes)
        if record.step - self.trainer.start != SLOW_CHECK_STEP or record.lr == 0 or not any(self._slopes):
            return
        slope = math.sqrt(sum(value * value for value in self._slopes) / len(self._slopes))
        peak = float(self.setup.config.lr or record.lr)
        moved = peak * slope * math.sqrt(self.trainer.limits.steps)
        values = [value[value != 0] for value in self.engine.state().values()]
        count = sum(value.size for value in values)
        scale = math.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in values) / max(1, count))
        if moved < SLOW_SHARE * scale:
            self.events.warn(
                record.step,
                f"--lr {peak:g} is very small for space {self.setup.config.space!r}: the whole run will move a weight by "
                f"about {moved:.1g}, and weights are about {scale:.1g}. A larger --lr will learn faster",
                "too slow",
            )

    def result(self) -> Run:
        """Test the best checkpoint and summarize the run."""
        try:
            return self._result()
        finally:
            self.close()

    def _result(self) -> Run:
        trainer = self.trainer
        steps, digest = trainer.step, self.engine.digest()
        best = trainer.best.step if trainer.best else steps
        test, task, method = self.setup.splits.test, self.setup.task, str(self.setup.config.method)
        trained = self._test_checkpoint(best) if test else None
        before, after = (each.evaluation if each else None for each in (self.untrained, trained))
        content = read(self.folder.path)
        curve = read_curve(content.events)
        gains = measure_gains(self.untrained, trained, test, task, [point["loss"] for point in curve])
        zero = moves = skipped = failed = 0
        for record in content.records:
            zero += all(slope == 0 for slope in record.slopes)
            moves += not record.update.empty
            skipped += bool(record.skipped)
            count = record.notes.get("failed", 0.0)
            failed += int(count) if 0 <= count < 2**53 else 0  # of a file that may come from anybody
        self._warn_about_skipped_steps(skipped)
        run = Run(
            out=str(self.folder.path),
            steps=steps,
            metric=after.metric if after else task.metric,
            value=after.value if after else None,
            calibrated=after.calibrated if after else None,
            accuracy=after.accuracy if after else None,
            interval=after.interval if after else None,
            zero_shot=before.value if before else None,
            zero_shot_calibrated=before.calibrated if before else None,
            majority=gains.majority,
            perplexity=gains.forgetting.tested if gains.forgetting else None,
            zero_shot_perplexity=gains.forgetting.before if gains.forgetting else None,
            best_step=best,
            tested_on="test" if self.setup.splits.has_test else "dev",
            n_test=len(test),
            task=task.name,
            columns=task.columns,
            zero_slope_share=zero / max(1, content.steps),
            skipped_steps=skipped,
            failed_rewards=failed,
            failed_test_rewards=after.failed if after else 0,
            digest=digest,
            seconds=round(self.earlier_seconds + time.monotonic() - self.events.start_time, 2),
            example_forwards=trainer.spent,
            moves=moves if method == "solve" else None,
            stopped=trainer.stopped,
            warnings=tuple(self.events.warnings),
            workers=self.engine.run_stats() if isinstance(self.engine, Workers) else None,
            verdict=str(
                judge(self.events.health.kinds, method, best, gains, skipped, self._explain_no_rewards(failed))
            ),
            memory_mib=round(memory.peak()),
            curve=curve,
            **describe_changes(self.untrained, trained, test, task),
        )
        self.folder.note("engine", {"step": steps, **self.engine.describe()})  # its counters, now that all is done
        self.events("result", {"step": steps, **run.to_dict()})
        return run

    def _test_checkpoint(self, step: int) -> Assessment:
        """Test the weights after a step, and keep what they got wrong."""
        self._go_to(step)
        detail, assessment = self._test()
        self.folder.write_mistakes(step, list_mistakes(self.setup.splits.test, detail, self.setup.task))
        return assessment

    def _explain_no_rewards(self, failed: int) -> str:
        """Why all texts of training failed, by the first failure; empty where some did not."""
        if self.setup.reward is None or not 0 < self.trainer.spent <= failed:
            return ""
        return next(iter(self.setup.reward.messages.values()), "the warnings of the run say why")

    def _warn_about_failed_rewards(self) -> None:
        """Say once of each kind that calls of the reward fail; the steps count them."""
        if (reward := self.setup.reward) is not None:
            for kind in sorted(reward.messages.keys() - self._failures):
                self._failures.add(kind)
                self.events.warn(
                    self.trainer.step,
                    f"a call of the reward failed ({kind}): {reward.messages[kind]}. Its text has the reward "
                    f"{reward.failed:g} (--failed-reward), and the run goes on",
                )

    def _warn_about_skipped_steps(self, skipped: int) -> None:
        if skipped:
            self.events.warn(
                self.trainer.step,
                f"{skipped} of {self.trainer.step} steps were skipped: their loss was not finite, or they were too large for "
                f"the weights. A smaller {SMALLER[str(self.setup.config.method)]} may help",
            )

    def _go_to(self, step: int) -> None:
        """Bring the engine to a checkpoint: from its snapshot, else by replaying the journal."""
        if step == self.trainer.step:
            return
        content = read(self.folder.path)
        if isinstance(self.engine, Workers):
            bring_to(self.engine, content, step, self.folder.snapshots)
            return
        if load_snapshot(self.engine, step, content.marks, self.folder.snapshots):
            return
        # The torch engine rebuilds the same weights, whatever engine ran the model.
        fresh = open_engine("torch", dataclasses.replace(self.setup.engine_spec, tp=1, urls=()))
        check_base(fresh, content)
        bring_to(fresh, content, step, self.folder.snapshots)
        self.engine.load_state(fresh.state())
        fresh.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the run folder and the engine. `result()` does, and so does an error."""
        try:
            self.engine.close()  # first: it may have something to report
        finally:
            if self.setup.reward:
                self.setup.reward.close()
            self.events.trackers.close()
            self.journal.close()
            self.folder.close()

    def __del__(self) -> None:
        """A session that nobody closed keeps no files open, and no lock."""
        self.journal.close()
        self.folder.close()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _step_metrics(record: StepRecord) -> dict[str, Any]:
    line = {
        "step": record.step,
        "loss": sum(record.losses) / len(record.losses),
        "slopes": list(record.slopes),
        "lr": record.lr,
        **{name: value for name, value in record.notes.items() if math.isfinite(value)},
        "memory_mib": round(memory.in_use()),
    }
    return line | ({"skipped": record.skipped} if record.skipped else {})
