"""Rows to labels: what `mezzo predict` gives for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mezzo.engines.base import Engine
from mezzo.errors import DataError
from mezzo.evaluation.evaluate import probabilities, scores_of
from mezzo.evaluation.rewards import Rewarded, text_f1
from mezzo.runs import datasets, setup
from mezzo.tasks import load_examples
from mezzo.types import Batch, Example, Probe


def row_of(parts: setup.Parts, row: Any) -> Mapping[str, Any]:
    """A row by column; a text alone is one where the task has one column."""
    columns = parts.task.columns
    if isinstance(row, str) and len(columns) == 1:
        return {datasets.columns_of(parts.config).get(columns[0], columns[0]): row}
    if not isinstance(row, Mapping):
        raise DataError(
            f"a row of task {parts.task.name!r} is an object with {', '.join(columns)}, not {str(row)[:40]!r}"
        )
    return row


def unlabelled(parts: setup.Parts, source: Any) -> list[Example]:
    """Examples to predict: labels, if the source has any, are not looked at."""
    return load_examples(source, parts.task, labelled="ignore", **datasets.reading(parts.config))


def predicted(engine: Engine, parts: setup.Parts, examples: list[Example]) -> Iterator[dict[str, Any]]:
    """Each example's own fields with its label and probabilities, or with the text that is generated for it."""
    prompts = parts.encode(examples)
    if parts.task.kind == "generation":
        texts = Rewarded(engine, parts.decode, text_f1, parts.config.max_new_tokens).texts(
            Batch(prompts, parts.readout), [Probe()]
        )[0]
        yield from ({**example.fields, "answer": text} for example, text in zip(examples, texts, strict=True))
        return
    if any(not (p.candidates or parts.readout.kind != "candidates") for p in prompts):
        raise DataError(f"a row of task {parts.task.name!r} has no candidates to choose from")
    scores = scores_of(engine, prompts, parts.readout)
    for example, row in zip(examples, probabilities(scores), strict=True):
        names = parts.task.labels or tuple(str(i) for i in range(len(row)))
        best = int(row.argmax())
        shown = {name: round(float(p), 6) for name, p in zip(names, row, strict=False)}
        yield {**example.fields, "label": names[best], "probabilities": shown}
