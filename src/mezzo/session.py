"""One run from start to end: the trainer between a run folder that remembers and an observer that shows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from mezzo import assembly
from mezzo.batches import batches_of
from mezzo.config import RunConfig, from_mapping
from mezzo.engines.base import Engine, Unit
from mezzo.errors import JournalError
from mezzo.estimators import Spsa
from mezzo.evaluation import Evaluation
from mezzo.journal import Journal
from mezzo.objectives import OBJECTIVES, Objective, get_objective, imported
from mezzo.optim import Sgd, schedule
from mezzo.rebuild import bring_to, check_base
from mezzo.rewards import Reward, Rewarded, mean_reward, text_f1
from mezzo.run import Folder, Run
from mezzo.tasks import Task, get_task
from mezzo.trainer import Limits, MeZOTrainer
from mezzo.types import Batch, Example, Prompt, StepRecord

Observer = Callable[[str, dict[str, Any]], None]
LOOK_AT, STILL = 50, 1e-3
"""After this many steps, an expected movement of the weights below this share of their size is warned about."""


@dataclass
class Session:
    """Use `Session.new` or `Session.resume`, iterate `records()`, then ask `result()`."""

    parts: assembly.Parts
    splits: assembly.Splits
    engine: Engine
    folder: Folder
    journal: Journal
    trainer: MeZOTrainer
    observe: Observer
    test: list[Example]
    earlier: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    zero_shot: Evaluation | None = None
    warnings: list[str] = field(default_factory=list)
    _slopes: list[float] = field(default_factory=list)

    # ---- starting

    @classmethod
    def new(
        cls, config: RunConfig, observe: Observer, objective: Objective | None = None, task: Task | None = None
    ) -> Session:
        """Check everything, then create the run folder."""
        parts, splits = _prepared(config, task)
        train, dev, test = (parts.encode(splits.train), splits.dev, splits.test)
        trainer_parts = _method(parts.config, objective)
        observe("loading", {"model": config.model, "task": parts.task.name})
        engine = assembly.engine_for(parts.config, parts.family, parts.classes, parts.tokenizer.pad_token_id)
        try:
            engine.check(Batch(train, parts.readout), parts.config.eps or 1e-3)
            folder = Folder.create(config.out, f"{parts.task.name}-{_word(parts.config.space or '')}")
            folder.write_config({**parts.config.to_dict(), "out": str(folder.path)})
            journal = Journal.create(folder.path, assembly.header_of(parts, engine, train))
        except BaseException:
            engine.close()  # an engine may hold processes of its own
            raise
        session = cls._joined(parts, splits, engine, folder, journal, trainer_parts, (train, dev, test), observe)
        session._announce(len(train), len(dev))
        session._evaluate_zero_shot()
        return session

    @classmethod
    def resume(
        cls,
        path: str | Path,
        observe: Observer,
        changes: dict[str, Any] | None = None,
        objective: Objective | None = None,
    ) -> Session:
        """Continue a run where its journal ends; only its limits may change."""
        folder = Folder.open(path)
        journal = Journal.resume(folder.path)
        try:
            config = from_mapping({**journal.content.header["config"], **(changes or {}), "out": str(folder.path)})
            parts, splits = _prepared(config, get_task(journal.content.header["task"]))
            train, dev, test = (parts.encode(splits.train), splits.dev, splits.test)
            assembly.check_header(journal.content.header, parts, train)
            observe("loading", {"model": config.model, "task": parts.task.name})
            engine = assembly.engine_for(parts.config, parts.family, parts.classes, parts.tokenizer.pad_token_id)
            engine.unit = Unit(**journal.content.header["unit"])
            check_base(engine, journal.content)
            if journal.content.torn:
                observe(
                    "warning",
                    {"text": f"the last {journal.content.torn} bytes of the journal were torn and have been cut"},
                )
            records = journal.content.records
            bring_to(engine, records, len(records), folder.snapshots)
            earlier = folder.rewind_metrics(len(records))
        except BaseException:
            journal.close()
            raise
        made = _method(parts.config, objective)
        session = cls._joined(parts, splits, engine, folder, journal, made, (train, dev, test), observe, earlier)
        session._announce(len(train), len(dev))
        if session.zero_shot is None:
            session._evaluate_zero_shot()
        return session

    @classmethod
    def _joined(
        cls,
        parts: assembly.Parts,
        splits: assembly.Splits,
        engine: Engine,
        folder: Folder,
        journal: Journal,
        method: tuple[Spsa, Sgd, str | Objective],
        data: tuple[tuple[Prompt, ...], list[Example], list[Example]],
        observe: Observer,
        earlier: Sequence[dict[str, Any]] = (),
    ) -> Session:
        config = parts.config
        train, dev, test = data
        assert config.steps is not None and config.batch_size is not None

        def notify(event: str, values: dict[str, Any]) -> None:
            folder.note(event, values)
            observe(event, values)

        limits = Limits(
            steps=config.steps,
            eval_every=config.eval_every or 0,
            patience=config.patience,
            seconds=60 * config.time_limit if config.time_limit else float("inf"),
            snapshot_seconds=60 * config.snapshot_minutes,
        )
        estimator, optimizer, objective = method
        trainer = MeZOTrainer(
            _seen_by(parts, engine, objective),
            estimator,
            optimizer,
            mean_reward if _reads_texts(parts, objective) else get_objective(objective),
            batches_of(train, parts.readout, config.seed, config.batch_size),
            journal,
            limits,
            evaluate=(lambda: parts.evaluate(engine, dev)) if dev else None,
            snapshots=folder.snapshots,
            notify=notify,
            start=journal.content.steps,
            history=[(e["step"], _evaluation(e)) for e in earlier if e.get("event") == "evaluation"],
        )
        known = [e for e in earlier if e.get("event") == "zero-shot"]
        session = cls(parts, splits, engine, folder, journal, trainer, notify, test, list(earlier))
        session.zero_shot = _evaluation(known[-1]) if known else None
        return session

    def _announce(self, train: int, dev: int) -> None:
        engine = self.engine.describe()
        self.observe(
            "start",
            {
                "out": str(self.folder.path),
                "step": self.trainer.start,
                "steps": self.trainer.limits.steps,
                "train": train,
                "dev": dev,
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
            self.zero_shot = self._tested()
            self.observe("zero-shot", {"step": 0, **self.zero_shot.to_dict()})

    def _tested(self) -> Evaluation:
        return self.parts.evaluate(self.engine, self.test)

    # ---- running

    def records(self) -> Iterator[StepRecord]:
        """Train; every record has been noted in the metrics when it arrives."""
        try:
            for record in self.trainer.run():
                self.observe("step", _step_line(record, time.monotonic() - self.began))
                self._warn_if_standing_still(record)
                yield record
        except BaseException:
            self.close()
            raise

    def _warn_if_standing_still(self, record: StepRecord) -> None:
        """A learning rate far too small for the space: after the whole run the weights would not have moved visibly."""
        self._slopes += list(record.slopes)
        if record.step - self.trainer.start != LOOK_AT or record.lr == 0 or not any(self._slopes):
            return
        slope = math.sqrt(sum(value * value for value in self._slopes) / len(self._slopes))
        moved = record.lr * slope * math.sqrt(self.trainer.limits.steps)
        values = [value[value != 0] for value in self.engine.state().values()]
        count = sum(value.size for value in values)
        scale = math.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in values) / max(1, count))
        if moved < STILL * scale:
            self.warn(
                f"--lr {record.lr:g} is very small for space {self.parts.config.space!r}: the whole run will move a weight by "
                f"about {moved:.1g}, and weights are about {scale:.1g}. A larger --lr will learn faster"
            )

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.observe("warning", {"step": self.trainer.step, "text": text})

    def result(self) -> Run:
        """Test the best checkpoint and sum the run up."""
        trainer, config = self.trainer, self.parts.config
        steps, digest = trainer.step, self.engine.digest()
        best = trainer.best.step if trainer.best else steps
        tested: Evaluation | None = None
        if self.test:
            self._go_to(best)
            tested = self._tested()
        lines = [e for e in self.folder.metrics() if e.get("event") == "step"]
        zero = sum(all(slope == 0 for slope in e["slopes"]) for e in lines)
        earlier = sum(e.get("seconds", 0.0) for e in self.earlier if e.get("event") == "result")
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
            n_test=len(self.test),
            zero_slope_share=zero / len(lines) if lines else 0.0,
            skipped_steps=sum(bool(e.get("skipped")) for e in lines),
            digest=digest,
            seconds=round(earlier + time.monotonic() - self.began, 2),
            forward_passes=2 * config.samples * steps,
            stopped=trainer.stopped,
            warnings=tuple(self.warnings),
        )
        self.folder.note("engine", {"step": steps, **self.engine.describe()})  # its counters, now that all is done
        self.observe("result", {"step": steps, **run.to_dict()})
        self.close()
        return run

    def _go_to(self, step: int) -> None:
        """Weights of the best checkpoint: its snapshot, else the journal from the start."""
        if step == self.trainer.step:
            return
        found = self.folder.snapshots.load(step)
        if found is not None:
            self.engine.load_state(found[0])
            if self.engine.digest() == found[1]:
                return
        config = self.parts.config.replace(engine="torch", tp=1, url=())  # the same weights, whatever ran the model
        fresh = assembly.engine_for(config, self.parts.family, self.parts.classes, self.parts.tokenizer.pad_token_id)
        from mezzo.journal import read

        bring_to(fresh, read(self.folder.path).records, step)
        self.engine.load_state(fresh.state())

    def close(self) -> None:
        self.journal.close()
        self.folder.close()
        self.engine.close()


def _prepared(config: RunConfig, task: Task | None) -> tuple[assembly.Parts, assembly.Splits]:
    parts = assembly.prepare(config, task)
    return parts, assembly.splits_of(parts.config, parts.task)


def _method(config: RunConfig, objective: Objective | None) -> tuple[Spsa, Sgd, str | Objective]:
    assert config.lr is not None and config.eps is not None and config.steps is not None
    name = "cross_entropy" if config.objective == "vocabulary_cross_entropy" else config.objective
    chosen = objective or (name if name in OBJECTIVES else imported(name))
    assert config.schedule is not None
    rate = schedule(config.schedule, config.lr, config.steps, config.warmup)
    return Spsa(config.seed, config.eps, config.samples), Sgd(rate, config.weight_decay or 0.0, config.clip), chosen


def _reads_texts(parts: assembly.Parts, objective: str | Objective) -> bool:
    """F1 of a generation task, or a function marked with `over_texts`."""
    return (objective == "f1" and parts.task.kind == "generation") or getattr(objective, "over_texts", False)


def _seen_by(parts: assembly.Parts, engine: Engine, objective: str | Objective) -> Engine:
    """The engine as the objective sees it: through its scores, or through the text it generates."""
    if not _reads_texts(parts, objective):
        return engine
    reward = text_f1 if isinstance(objective, str) else cast(Reward, objective)
    return cast(Engine, Rewarded(engine, parts.decode, reward, parts.config.max_new_tokens))


def _step_line(record: StepRecord, seconds: float) -> dict[str, Any]:
    line = {
        "step": record.step,
        "loss": sum(record.losses) / len(record.losses),
        "slopes": list(record.slopes),
        "lr": record.lr,
        "seconds": round(seconds, 3),
    }
    return line | ({"skipped": record.skipped} if record.skipped else {})


def _evaluation(line: dict[str, Any]) -> Evaluation:
    try:
        values = {name: line[name] for name in Evaluation.__slots__}
        return Evaluation(**{**values, "interval": tuple(values["interval"])})
    except (KeyError, TypeError) as error:
        raise JournalError(f"metrics.jsonl has an evaluation without {error}; delete the line and resume") from None


def _word(space: str) -> str:
    return space if space.isalnum() else "pattern"
