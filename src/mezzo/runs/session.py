"""One run from start to end: the trainer between a run folder that remembers and an observer that shows."""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mezzo.engines import memory
from mezzo.engines.base import Engine, Workers
from mezzo.errors import MezzoError
from mezzo.evaluation.evaluate import Evaluation, Examined
from mezzo.journal.journal import Journal, read
from mezzo.replay.replay import bring_to, check_base
from mezzo.runs import datasets, setup
from mezzo.runs.events import Events
from mezzo.runs.folder import Folder, Run
from mezzo.runs.health import verdict
from mezzo.runs.mistakes import mistakes
from mezzo.runs.trainer import MeZOTrainer
from mezzo.types import Example, StepRecord

LOOK_AT, STILL = 50, 1e-3
"""After this many steps, an expected movement of the weights below this share of their size is warned about."""


@dataclass(repr=False)
class Session:
    """Made by `mezzo.runs.build`; iterate `records()`, then ask `result()`."""

    parts: setup.Parts
    splits: datasets.Splits
    engine: Engine
    folder: Folder
    journal: Journal
    trainer: MeZOTrainer
    observe: Events
    test: list[Example]
    earlier: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    zero_shot: Evaluation | None = None
    _slopes: list[float] = field(default_factory=list)

    def __repr__(self) -> str:
        space, steps = self.parts.config.space, self.trainer.limits.steps
        return f"<session {self.folder.path}: {self.parts.task.name}, {space}, step {self.trainer.step} of {steps}>"

    # ---- before the first step

    def begin(self, train: int) -> None:
        """Say what is about to happen and, at the start of a run, what the model can do as it came."""
        self._announce(train)
        self._say_what_may_surprise(train)
        if self.zero_shot is None:
            self._evaluate_zero_shot()

    def _say_what_may_surprise(self, train: int) -> None:
        size, start, steps = self.parts.config.batch_size or 0, self.trainer.start, self.trainer.limits.steps
        if size > train and not start:
            text = f"--batch-size {size} is more than the {train} training examples: every step sees all of them"
            self.observe.warn(0, text)
        if start >= steps:
            text = (
                f"this run has finished: its {start} steps are done. Train on with --resume {self.folder.path} "
                f"--steps N, N more than {start}"
            )
            self.observe.warn(start, text)

    def note_command(self, words: list[str]) -> None:
        """What a person typed, for the report."""
        self.folder.note("command", {"step": self.trainer.start, "text": shlex.join(words)})

    def _announce(self, train: int) -> None:
        engine = self.engine.describe()
        self.observe(
            "start",
            {
                "out": str(self.folder.path),
                "step": self.trainer.start,
                "steps": self.trainer.limits.steps,
                "train": train,
                "dev": len(self.splits.dev),
                "test": len(self.test),
                "space": self.parts.config.space,
                "lr": self.parts.config.lr,
                "eps": self.parts.config.eps,
                **engine,
            },
        )

    def _evaluate_zero_shot(self) -> None:
        """The model as it came, before any step; a resumed run has it in its metrics."""
        if self.trainer.start == 0 and self.test:
            self.zero_shot = self._tested().evaluation
            self.observe("zero-shot", {"step": 0, **self.zero_shot.to_dict()})

    def _tested(self) -> Examined:
        return self.parts.examine(self.engine, self.test)

    # ---- running

    def records(self) -> Iterator[StepRecord]:
        """Train; every record has been noted in the metrics when it arrives."""
        try:
            for record in self.trainer.run():
                stats = self.engine.step_stats() if isinstance(self.engine, Workers) else {}
                self.observe("step", _step_line(record, time.monotonic() - self.began) | stats)
                self._warn_if_standing_still(record)
                yield record
        except BaseException as error:
            if isinstance(error, MezzoError):
                with contextlib.suppress(MezzoError):  # the disk may be what failed
                    self.observe("failed", {"step": self.trainer.step, "text": str(error)})
            self.close()
            raise

    def _warn_if_standing_still(self, record: StepRecord) -> None:
        """A learning rate far too small for the space: after the whole run the weights would not have moved visibly."""
        self._slopes += list(record.slopes)
        if record.step - self.trainer.start != LOOK_AT or record.lr == 0 or not any(self._slopes):
            return
        slope = math.sqrt(sum(value * value for value in self._slopes) / len(self._slopes))
        peak = self.parts.config.lr or record.lr
        moved = peak * slope * math.sqrt(self.trainer.limits.steps)
        values = [value[value != 0] for value in self.engine.state().values()]
        count = sum(value.size for value in values)
        scale = math.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in values) / max(1, count))
        if moved < STILL * scale:
            self.observe.warn(
                record.step,
                f"--lr {peak:g} is very small for space {self.parts.config.space!r}: the whole run will move a weight by "
                f"about {moved:.1g}, and weights are about {scale:.1g}. A larger --lr will learn faster",
                "too slow",
            )

    def result(self) -> Run:
        """Test the best checkpoint and sum the run up."""
        trainer, config = self.trainer, self.parts.config
        steps, digest = trainer.step, self.engine.digest()
        best = trainer.best.step if trainer.best else steps
        tested: Evaluation | None = None
        if self.test:
            self._go_to(best)
            examined = self._tested()
            tested = examined.evaluation
            self.folder.write_mistakes(best, mistakes(self.test, examined, self.parts.task))
        records = read(self.folder.path).records
        zero = sum(all(slope == 0 for slope in record.slopes) for record in records)
        skipped = sum(bool(record.skipped) for record in records)
        if skipped:
            self.observe.warn(
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
            metric=self.parts.task.metric,
            value=tested.value if tested else None,
            accuracy=tested.accuracy if tested else None,
            interval=tested.interval if tested else None,
            zero_shot=self.zero_shot.value if self.zero_shot else None,
            zero_shot_calibrated=self.zero_shot.calibrated if self.zero_shot else None,
            best_step=best,
            tested_on="test" if self.splits.tested_apart else "dev",
            n_test=len(self.test),
            zero_slope_share=zero / len(records) if records else 0.0,
            skipped_steps=skipped,
            digest=digest,
            seconds=round((earlier[-1] if earlier else 0.0) + time.monotonic() - self.began, 2),
            forward_passes=2 * config.samples * steps,
            stopped=trainer.stopped,
            warnings=tuple(self.observe.warnings),
            workers=self.engine.run_stats() if isinstance(self.engine, Workers) else None,
            verdict=self._verdict(tested, best),
            memory_mib=round(memory.peak()),
        )
        self.folder.note("engine", {"step": steps, **self.engine.describe()})  # its counters, now that all is done
        self.observe("result", {"step": steps, **run.to_dict()})
        self.close()
        return run

    def _verdict(self, tested: Evaluation | None, best: int) -> str:
        before = self.zero_shot
        found = verdict(
            self.observe.health.kinds,
            tested.value if tested else None,
            tested.interval if tested else None,
            before.value if before else None,
            before.calibrated if before else None,
            best,
        )
        return f"{found.word}: {found.reason}"

    def _go_to(self, step: int) -> None:
        """Weights of the best checkpoint: its snapshot, else the journal from the start."""
        if step == self.trainer.step:
            return
        content = read(self.folder.path)
        if isinstance(self.engine, Workers):
            bring_to(self.engine, content, step, self.folder.snapshots)
            return
        found = self.folder.snapshots.load(step)
        if found is not None and step in content.marks:
            self.engine.load_state(found[0])
            if self.engine.digest() == content.marks[step]:
                return
        parts = self.parts
        config = parts.config.replace(engine="torch", tp=1, url=())  # the same weights, whatever ran the model
        fresh = setup.engine_for(config, parts.family, parts.classes, parts.padding_id)
        check_base(fresh, content)
        bring_to(fresh, content, step)
        self.engine.load_state(fresh.state())
        fresh.close()

    def close(self) -> None:
        self.observe.trackers.close()
        self.journal.close()
        self.folder.close()
        self.engine.close()


def _step_line(record: StepRecord, seconds: float) -> dict[str, Any]:
    line = {
        "step": record.step,
        "loss": sum(record.losses) / len(record.losses),
        "slopes": list(record.slopes),
        "lr": record.lr,
        "seconds": round(seconds, 3),
        "memory_mib": round(memory.in_use()),
    }
    return line | ({"skipped": record.skipped} if record.skipped else {})
