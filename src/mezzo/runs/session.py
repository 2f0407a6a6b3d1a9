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
from mezzo.evaluation.evaluate import DetailedEvaluation, Evaluation
from mezzo.journal.journal import Journal, read
from mezzo.replay.replay import bring_to, check_base, load_snapshot
from mezzo.runs.events import Events
from mezzo.runs.folder import Folder
from mezzo.runs.health import verdict
from mezzo.runs.mistakes import list_mistakes
from mezzo.runs.result import Run
from mezzo.runs.setup import Setup
from mezzo.runs.trainer import MeZOTrainer
from mezzo.types import StepRecord

# After this many steps, an expected movement of the weights below this share of their size is warned about.
SLOW_CHECK_STEP, SLOW_SHARE = 50, 1e-3


@dataclass(repr=False)
class Session:
    """A run in progress, made by `runs.build`. Iterate `records()`, then call `result()`."""

    setup: Setup
    engine: Engine
    folder: Folder
    journal: Journal
    trainer: MeZOTrainer
    events: Events
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """Metrics that the run had written before it was resumed."""
    start_time: float = field(default_factory=time.monotonic)
    zero_shot: Evaluation | None = None
    _slopes: list[float] = field(default_factory=list)

    def __repr__(self) -> str:
        space, steps = self.setup.config.space, self.trainer.limits.steps
        return f"<session {self.folder.path}: {self.setup.task.name}, {space}, step {self.trainer.step} of {steps}>"

    # ---- before the first step

    def begin(self) -> None:
        """Announce the run and, where it is new, evaluate the untrained model on the test set."""
        self._announce()
        self._warn_about_surprises()
        if self.zero_shot is None and self.trainer.start == 0 and self.setup.splits.test:
            self.zero_shot = self._test().evaluation
            self.events("zero-shot", {"step": 0, **self.zero_shot.to_dict()})

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
                "steps": self.trainer.limits.steps,
                "train": len(self.setup.train_prompts),
                "dev": len(splits.dev),
                "test": len(splits.test),
                "space": config.space,
                "lr": config.lr,
                "eps": config.eps,
                **self.engine.describe(),
            },
        )

    def _warn_about_surprises(self) -> None:
        size, start, steps = self.setup.config.batch_size or 0, self.trainer.start, self.trainer.limits.steps
        train = len(self.setup.train_prompts)
        if size > train and not start:
            text = f"--batch-size {size} is more than the {train} training examples: every step sees all of them"
            self.events.warn(0, text)
        if start >= steps:
            text = (
                f"this run has finished: its {start} steps are done. Train on with --resume {self.folder.path} "
                f"--steps N, N more than {start}"
            )
            self.events.warn(start, text)

    def _test(self) -> DetailedEvaluation:
        return self.setup.evaluate_in_detail(self.engine, self.setup.splits.test)

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
                self.events("step", _step_metrics(record, time.monotonic() - self.start_time) | stats)
                self._warn_if_too_slow(record)
                yield record
        except BaseException as error:
            if isinstance(error, MezzoError):
                with contextlib.suppress(MezzoError):  # the disk may be what failed
                    self.events("failed", {"step": self.trainer.step, "text": str(error)})
            self.close()
            raise

    def _warn_if_too_slow(self, record: StepRecord) -> None:
        """Warn about a learning rate so small that the whole run would hardly move the weights."""
        self._slopes += list(record.slopes)
        if record.step - self.trainer.start != SLOW_CHECK_STEP or record.lr == 0 or not any(self._slopes):
            return
        slope = math.sqrt(sum(value * value for value in self._slopes) / len(self._slopes))
        peak = self.setup.config.lr or record.lr
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
        trainer = self.trainer
        steps, digest = trainer.step, self.engine.digest()
        best = trainer.best.step if trainer.best else steps
        tested: Evaluation | None = None
        if self.setup.splits.test:
            self._go_to(best)
            detail = self._test()
            tested = detail.evaluation
            self.folder.write_mistakes(best, list_mistakes(self.setup.splits.test, detail, self.setup.task))
        records = read(self.folder.path).records
        zero = sum(all(slope == 0 for slope in record.slopes) for record in records)
        skipped = sum(bool(record.skipped) for record in records)
        if skipped:
            self.events.warn(
                steps,
                f"{skipped} of {steps} steps had no finite loss and were skipped: a smaller --lr or --eps may help",
            )
        earlier = [
            e["seconds"]
            for e in self.earlier
            if e.get("event") == "result" and isinstance(e.get("seconds"), (int, float))
        ]
        run = Run(
            out=str(self.folder.path),
            steps=steps,
            metric=self.setup.task.metric,
            value=tested.value if tested else None,
            accuracy=tested.accuracy if tested else None,
            interval=tested.interval if tested else None,
            zero_shot=self.zero_shot.value if self.zero_shot else None,
            zero_shot_calibrated=self.zero_shot.calibrated if self.zero_shot else None,
            best_step=best,
            tested_on="test" if self.setup.splits.has_test else "dev",
            n_test=len(self.setup.splits.test),
            zero_slope_share=zero / len(records) if records else 0.0,
            skipped_steps=skipped,
            digest=digest,
            seconds=round((earlier[-1] if earlier else 0.0) + time.monotonic() - self.start_time, 2),
            forward_passes=sum(len(record.losses) for record in records),
            stopped=trainer.stopped,
            warnings=tuple(self.events.warnings),
            workers=self.engine.run_stats() if isinstance(self.engine, Workers) else None,
            verdict=self._verdict(tested, best),
            memory_mib=round(memory.peak()),
        )
        self.folder.note("engine", {"step": steps, **self.engine.describe()})  # its counters, now that all is done
        self.events("result", {"step": steps, **run.to_dict()})
        self.close()
        return run

    def _verdict(self, tested: Evaluation | None, best: int) -> str:
        before = self.zero_shot
        found = verdict(
            self.events.health.kinds,
            tested.value if tested else None,
            tested.interval if tested else None,
            before.value if before else None,
            before.calibrated if before else None,
            best,
        )
        return f"{found.word}: {found.reason}"

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
        bring_to(fresh, content, step)
        self.engine.load_state(fresh.state())
        fresh.close()

    def close(self) -> None:
        self.events.trackers.close()
        self.journal.close()
        self.folder.close()
        self.engine.close()

    def __del__(self) -> None:
        """A session that nobody closed keeps no files open, and no lock."""
        self.journal.close()
        self.folder.close()


def _step_metrics(record: StepRecord, seconds: float) -> dict[str, Any]:
    line = {
        "step": record.step,
        "loss": sum(record.losses) / len(record.losses),
        "slopes": list(record.slopes),
        "lr": record.lr,
        "seconds": round(seconds, 3),
        "memory_mib": round(memory.in_use()),
    }
    return line | ({"skipped": record.skipped} if record.skipped else {})
