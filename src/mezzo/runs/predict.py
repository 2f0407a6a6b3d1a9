"""Labels, or generated answers, for rows of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mezzo.engines.base import Engine
from mezzo.errors import DataError
from mezzo.evaluation.evaluate import probabilities, refuse_nan, score_prompts
from mezzo.evaluation.rewards import first_lines
from mezzo.runs import datasets
from mezzo.runs.setup import Setup
from mezzo.tasks import load_examples
from mezzo.types import Batch, Example, Probe


def to_row(setup: Setup, row: Any) -> Mapping[str, Any]:
    """A row by column; a bare text is a row where the task has one column."""
    columns = setup.task.columns
    if isinstance(row, str) and len(columns) == 1:
        return {datasets.column_names(setup.config).get(columns[0], columns[0]): row}
    if not isinstance(row, Mapping):
        raise DataError(
            f"a row of task {setup.task.name!r} is an object with {', '.join(columns)}, not {str(row)[:40]!r}"
        )
    return row


def load_unlabelled(setup: Setup, source: Any) -> list[Example]:
    """Examples to predict; labels in the source are ignored."""
    return load_examples(source, setup.task, labelled="ignore", **datasets.reading_options(setup.config))


def predict_examples(engine: Engine, setup: Setup, examples: list[Example]) -> Iterator[dict[str, Any]]:
    """Each example's own fields with its label and probabilities, or with the text that is generated for it."""
    prompts = setup.encode(examples)
    if setup.task.kind == "generation":
        answers = engine.generate(Batch(prompts, setup.readout), [Probe()], setup.config.max_new_tokens)
        texts = first_lines(answers, setup.decode)[0]
        yield from ({**example.fields, "answer": text} for example, text in zip(examples, texts, strict=True))
        return
    if any(not (p.candidates or setup.readout.kind != "candidates") for p in prompts):
        raise DataError(f"a row of task {setup.task.name!r} has no candidates to choose from")
    scores = score_prompts(engine, prompts, setup.readout)
    refuse_nan(scores)
    for example, row in zip(examples, probabilities(scores), strict=True):
        names = setup.task.labels or tuple(str(i) for i in range(len(row)))
        best = int(row.argmax())
        shown = {name: round(float(p), 6) for name, p in zip(names, row, strict=False)}
        yield {**example.fields, "label": names[best], "probabilities": shown}
