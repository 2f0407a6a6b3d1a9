"""The masked-LM route by its own names: a prompt with a mask, a word per label, cross-entropy over the words' logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo import api
from mezzo.runs.result import Run
from mezzo.runs.session import Session
from mezzo.runs.trainer import MeZOTrainer
from mezzo.tasks import MLMConfig, Task, get_task


def mezo_mlm_finetune(
    model_path: str,
    task_name: str,
    train_dataset: str | Path | Sequence[Mapping[str, Any]],
    num_steps: int = 10_000,
    batch_size: int = 64,
    learning_rate: float | None = None,
    epsilon: float | None = None,
    *,
    eval_dataset: str | Path | Sequence[Mapping[str, Any]] | None = None,
    mlm_config: MLMConfig | None = None,
    output_dir: str | Path | None = None,
    **options: Any,
) -> Run:
    """Fine-tune a masked LM on a classification task through label words, all parameters by default (`space="full"`).

    `mlm_config` states template and label words where the task's own do not fit. Everything else is an option of
    `mezzo.finetune`.
    """
    trainer = MeZOMLMTrainer.open(
        model_path,
        task_name,
        mlm_config,
        train=train_dataset,
        test=eval_dataset,
        steps=num_steps,
        batch_size=batch_size,
        lr=learning_rate,
        eps=epsilon,
        out=None if output_dir is None else str(output_dir),
        **{"space": "full", **options},
    )
    return trainer.train()


@dataclass(repr=False)
class MeZOMLMTrainer(MeZOTrainer):
    """A trainer whose scores are the logits of one label word per class at the mask. Make one with `open`."""

    session: Session | None = None
    template: str = ""
    label_words: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(
        cls, model: str, task: str | Mapping[str, Any] | Task, mlm: MLMConfig | None = None, **options: Any
    ) -> MeZOMLMTrainer:
        """Everything up to step 1: the model is loaded and checked, the run folder exists."""
        stated = (mlm or MLMConfig()).apply(get_task(task, "masked"), options.get("id_order"))
        given = {name: value for name, value in options.items() if value is not None}
        session = api.open_session(model, task=stated, readout="words", **given)
        values = {f.name: getattr(session.trainer, f.name) for f in dataclasses.fields(MeZOTrainer) if f.init}
        trainer = cls(**values, session=session, template=stated.template, label_words=stated.word_of)
        session.trainer = trainer
        return trainer

    @property
    def label_word_ids(self) -> Sequence[int]:
        """The tokens whose logits are compared, in label order."""
        assert self.session is not None
        return self.session.setup.readout.words

    def train(self) -> Run:
        """Run to the end and return the result."""
        assert self.session is not None
        return self.session.train()
