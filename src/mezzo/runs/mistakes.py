"""The examples a model got wrong, the most confident mistakes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mezzo.evaluation.evaluate import DetailedEvaluation, probabilities
from mezzo.runs.folder import MAX_MISTAKES
from mezzo.tasks import Task
from mezzo.types import Example

# Characters of a text that are kept.
MAX_CHARACTERS = 600


def list_mistakes(examples: Sequence[Example], detail: DetailedEvaluation, task: Task) -> list[dict[str, Any]]:
    """Rows with the texts, the right and the given answer, and how sure the model was."""
    if detail.texts is not None:
        return [
            {
                **text_fields(example, task),
                "right": _shorten(example.fields.get(task.label_column, "")),
                "given": _shorten(text),
            }
            for example, text, good in zip(examples, detail.texts, detail.right, strict=True)
            if not good
        ][:MAX_MISTAKES]
    assert detail.scores is not None
    chances = probabilities(detail.scores)
    given = chances.argmax(axis=1)
    wrong = [place for place, good in enumerate(detail.right) if not good]
    wrong.sort(key=lambda place: -chances[place, given[place]])
    return [
        {
            **text_fields(examples[place], task),
            "right": answer_name(task, examples[place], examples[place].label),
            "given": answer_name(task, examples[place], int(given[place])),
            "sure": round(float(chances[place, given[place]]), 4),
        }
        for place in wrong[:MAX_MISTAKES]
    ]


def text_fields(example: Example, task: Task) -> dict[str, Any]:
    shown = (
        task.columns if task.kind == "generation" else [name for name in example.fields if name != task.label_column]
    )
    return {"fields": {name: _shorten(example.fields[name]) for name in shown}}


def answer_name(task: Task, example: Example, index: int) -> str:
    """A label by name; of a choice task, the candidate's text."""
    if task.labels:
        return task.labels[index]
    texts = [text for column in task.candidates for text in np.atleast_1d(example.fields.get(column, []))]
    return _shorten(texts[index]) if index < len(texts) else str(index)


def _shorten(value: Any) -> str:
    text = " / ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
