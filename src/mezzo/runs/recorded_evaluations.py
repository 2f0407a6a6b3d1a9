"""The evaluations that a journal holds. They decide where a run stops and which of its checkpoints is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mezzo.errors import JournalError
from mezzo.evaluation.evaluate import MAX_COUNT, MAX_FIGURE, Evaluation, rank
from mezzo.journal.content import Content
from mezzo.runs.outcome import Assessment, read_answers
from mezzo.tasks import Task
from mezzo.types import Example

# Example-forwards that a run can have taken: no machine does more.
MAX_SPENT = 2**63


@dataclass(frozen=True, slots=True)
class EvaluatedCheckpoint:
    """A journal position with its evaluation on dev, and the example-forwards of training up to it."""

    step: int
    spent: int
    evaluation: Evaluation


def read_evaluations(content: Content) -> list[EvaluatedCheckpoint]:
    return [
        EvaluatedCheckpoint(event["step"], _count(event, content), _parse(event, content))
        for event in content.events
        if event["event"] == "evaluation"
    ]


def read_zero_shot(content: Content, test: Sequence[Example], task: Task) -> Assessment | None:
    """The untrained model on the test examples."""
    found = [event for event in content.events if event["event"] == "zero-shot"]
    return Assessment(_parse(found[-1], content), read_answers(found[-1], test, task)) if found else None


def best_step(content: Content) -> int:
    """The position with the best dev evaluation, the last one if nothing was evaluated."""
    if content.best is not None:
        return content.best
    ranks = [rank(each.evaluation.value, each.evaluation.loss, each.step) for each in read_evaluations(content)]
    return -max(ranks)[2] if ranks else content.steps


def _parse(event: Mapping[str, Any], content: Content) -> Evaluation:
    try:
        figures = {name: float(event[name]) for name in ("value", "accuracy", "loss")}
        calibrated = None if event["calibrated"] is None else float(event["calibrated"])
        low, high = (float(end) for end in event["interval"])
        found = Evaluation(
            metric=str(event["metric"]),
            interval=(low, high),
            n=int(event["n"]),
            calibrated=calibrated,
            failed=int(event.get("failed", 0)),
            **figures,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise JournalError(f"{content.path} has an evaluation without {error}; it was not written by mezzo") from None
    _refuse_impossible(found, content)
    return found


def _refuse_impossible(found: Evaluation, content: Content) -> None:
    """Figures of a run that diverged may be infinite or NaN; none is a number of this size."""
    if not 0 <= found.n < MAX_COUNT:
        raise JournalError(f"{content.path} has an evaluation on {found.n:.3g} examples; it was not written by mezzo")
    for figure in (found.value, *found.interval, found.calibrated):
        if figure is not None and math.isfinite(figure) and abs(figure) > MAX_FIGURE:
            raise JournalError(f"{content.path} has an evaluation of {figure:.3g}; it was not written by mezzo")


def _count(event: Mapping[str, Any], content: Content) -> int:
    if isinstance(spent := event.get("spent"), int) and 0 <= spent <= MAX_SPENT:
        return spent
    raise JournalError(f"{content.path} has an evaluation without 'spent'; it was not written by mezzo")
