"""What training changed on the test examples: answers before and after, gains with their chance, and how each label fares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mezzo.evaluation.evaluate import Z95, DetailedEvaluation, Evaluation, calibrated_predictions, wrong_where_nan
from mezzo.evaluation.figures import format_figure, format_perplexity, is_reward_metric, perplexity
from mezzo.method.objectives import METRICS
from mezzo.runs.health import has_risen
from mezzo.runs.mistakes import answer_name, text_fields
from mezzo.tasks import Task
from mezzo.types import Example

# Examples that are shown, and labels up to which a confusion matrix is kept.
SHOWN, MAX_MATRIX = 5, 12
# Changed answers from which on the normal approximation stands for the exact test.
MANY_CHANGES = 1000


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model answered to the test examples, and which answers were right; also without the prompt's prior, where the
    answers are labels."""

    given: tuple[int, ...] | tuple[str, ...]
    right: tuple[bool, ...]
    calibrated: tuple[int, ...] | None = None
    calibrated_right: tuple[bool, ...] | None = None
    rewards: tuple[float, ...] | None = None

    def to_event(self) -> dict[str, list[int]]:
        """What a run keeps of them, so that it can compare after it was resumed; nothing of generated texts."""
        if any(isinstance(answer, str) for answer in self.given):
            return {}
        kept = {"predicted": self.given, "predicted_calibrated": self.calibrated}
        return {name: [int(answer) for answer in answers] for name, answers in kept.items() if answers is not None}


@dataclass(frozen=True, slots=True)
class Assessment:
    """An evaluation on the test examples, with the answers where they are known."""

    evaluation: Evaluation
    answers: Answers | None = None


def collect_answers(detail: DetailedEvaluation, examples: Sequence[Example], task: Task) -> Answers:
    if detail.texts is not None:
        return Answers(detail.texts, detail.right, rewards=detail.rewards)
    assert detail.scores is not None
    labels = np.array([example.label for example in examples], dtype=np.int64)
    given = wrong_where_nan(detail.scores.argmax(axis=1), detail.scores, labels).tolist()
    if task.kind != "classification":
        return _answers(given, None, examples)
    calibrated = wrong_where_nan(calibrated_predictions(detail.scores), detail.scores, labels)
    return _answers(given, calibrated.tolist(), examples)


def read_answers(event: Mapping[str, Any], examples: Sequence[Example], task: Task) -> Answers | None:
    """The answers that an event kept; None if it kept none, or none of these examples."""
    given, calibrated = event.get("predicted"), event.get("predicted_calibrated")
    if task.kind != "classification":
        calibrated = None
    if any(not _are_answers(each, len(examples), task) for each in (given, calibrated) if each is not None):
        return None
    return None if given is None else _answers(given, calibrated, examples)


def _are_answers(found: Any, count: int, task: Task) -> bool:
    if not isinstance(found, list) or len(found) != count:
        return False
    return all(type(answer) is int and 0 <= answer < (len(task.labels) or answer + 1) for answer in found)


def _answers(given: Sequence[int], calibrated: Sequence[int] | None, examples: Sequence[Example]) -> Answers:
    labels = [example.label for example in examples]
    right = tuple(answer == label for answer, label in zip(given, labels, strict=True))
    if calibrated is None:
        return Answers(tuple(given), right)
    calibrated_right = tuple(answer == label for answer, label in zip(calibrated, labels, strict=True))
    return Answers(tuple(given), right, tuple(calibrated), calibrated_right)


# ---- gains


@dataclass(frozen=True, slots=True)
class Gain:
    """A figure before and after training, and whether their difference is more than chance."""

    before: float
    after: float
    certain: bool
    metric: str = "accuracy"

    @property
    def better(self) -> bool:
        return self.certain and self.after > self.before

    @property
    def worse(self) -> bool:
        return self.certain and self.after < self.before

    def __str__(self) -> str:
        difference, chance = self.after - self.before, "more than chance" if self.certain else "within chance"
        change = f"{difference:+.4g}" if is_reward_metric(self.metric) else f"{100 * difference:+.1f} points"
        after, before = (format_figure(figure, self.metric) for figure in (self.after, self.before))
        return f"{after} after training, {before} before: {change}, {chance}"


@dataclass(frozen=True, slots=True)
class Forgetting:
    """The perplexity of the held-out text of a run on rewards: of the untrained model, at the tested checkpoint, and the highest
    of all evaluations."""

    before: float
    tested: float
    highest: float

    @property
    def when_tested(self) -> str:
        """What is said of the tested checkpoint; empty where it has not forgotten."""
        return self._say(self.tested) if has_risen(self.before, self.tested) else ""

    @property
    def at_worst(self) -> str:
        return self._say(self.highest)

    def _say(self, now: float) -> str:
        return f"the perplexity of the held-out text rose from {format_perplexity(self.before)} to {format_perplexity(now)}"


@dataclass(frozen=True, slots=True)
class Gains:
    """The tested checkpoint against the untrained model, like with like. None: not tested, or answers are no labels."""

    n: int = 0
    plain: Gain | None = None
    calibrated: Gain | None = None
    """Both without the prompt's prior."""
    majority: float | None = None
    """The figure of always answering the most frequent label."""
    forgetting: Forgetting | None = None
    """None where no reward is trained on."""


def measure_gains(
    before: Assessment | None,
    after: Assessment | None,
    examples: Sequence[Example],
    task: Task,
    dev_losses: Sequence[float] = (),
) -> Gains:
    rewarded = any(each and is_reward_metric(each.evaluation.metric) for each in (before, after))
    majority = None if rewarded else majority_figure(examples, task)
    if before is None or after is None:
        return Gains(len(examples), majority=majority)
    old, new = before.evaluation, after.evaluation
    # The answers decide about accuracy only: other metrics are no mean over them.
    known = [each.answers for each in (before, after) if each.answers and new.metric == "accuracy"]
    plain = _gain(old.value, new.value, new.interval, [answers.right for answers in known], new.metric)
    rewards = [each.answers.rewards for each in (before, after) if each.answers and each.answers.rewards]
    if len(rewards) == 2:
        plain = replace(plain, certain=differs(*rewards))
    calibrated = None
    if old.calibrated is not None and new.calibrated is not None:
        rights = [answers.calibrated_right for answers in known if answers.calibrated_right]
        calibrated = _gain(old.calibrated, new.calibrated, new.interval, rights)
    forgetting = _forgetting(old.loss, new.loss, dev_losses) if rewarded else None
    return Gains(len(examples), plain, calibrated, majority, forgetting)


def _forgetting(before: float, tested: float, others: Sequence[float]) -> Forgetting:
    found = [perplexity(loss) for loss in (before, tested, *others)]
    return Forgetting(found[0], found[1], max(found, key=lambda value: value if math.isfinite(value) else math.inf))


def _gain(
    before: float,
    after: float,
    interval: Sequence[float],
    rights: Sequence[Sequence[bool]],
    metric: str = "accuracy",
) -> Gain:
    """Chance is judged by the changed answers or, where those before or after are not known, by the figure's 95% interval."""
    if len(rights) == 2:
        return Gain(before, after, is_certain(*count_changes(*rights)))
    return Gain(before, after, 2 * abs(after - before) > interval[1] - interval[0], metric)


def count_changes(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int]:
    """How many answers training corrected, and how many it broke."""
    pairs = list(zip(before, after, strict=True))
    return pairs.count((False, True)), pairs.count((True, False))


def is_certain(corrected: int, broken: int) -> bool:
    """Whether chance would split the changed answers so unevenly in less than 5% of cases (McNemar's test)."""
    count, fewer = corrected + broken, min(corrected, broken)
    if count > MANY_CHANGES:
        return (abs(corrected - broken) - 1) / math.sqrt(count) > Z95
    return 2 * sum(math.comb(count, number) for number in range(fewer + 1)) < 0.05 * 2**count


def differs(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the mean change of the same examples' rewards lies outside the 95% interval of chance around zero."""
    changes = np.array(after) - np.array(before)
    error = float(changes.std(ddof=1)) / math.sqrt(len(changes)) if len(changes) > 1 else math.inf
    return abs(float(changes.mean())) > Z95 * error


def majority_figure(examples: Sequence[Example], task: Task) -> float | None:
    """The task's metric of always answering the most frequent label; None where answers are no labels."""
    if task.kind != "classification" or not examples:
        return None
    labels = np.array([example.label for example in examples])
    return METRICS[task.metric](np.full(len(labels), np.bincount(labels).argmax()), labels, len(task.labels))


# ---- details


def describe_changes(
    before: Assessment | None, after: Assessment | None, examples: Sequence[Example], task: Task
) -> dict[str, Any]:
    """The fields of a Run about single answers."""
    if after is None or after.answers is None:
        return {}
    found: dict[str, Any] = {"classes": per_class(examples, task, after.answers)}
    if before is not None and before.answers is not None:
        found["corrected"], found["broken"] = count_changes(*_compare(before.answers, after.answers))
        found["examples"] = tuple(pick_examples(examples, task, before.answers, after.answers))
    return found


def _compare(before: Answers, after: Answers) -> tuple[Sequence[bool], Sequence[bool]]:
    """Which answers are right, before and after training; of rewards, which of the two is higher."""
    if before.rewards is None or after.rewards is None:
        return before.right, after.right
    pairs = list(zip(before.rewards, after.rewards, strict=True))
    return [old > new for old, new in pairs], [new > old for old, new in pairs]


def pick_examples(examples: Sequence[Example], task: Task, before: Answers, after: Answers) -> list[dict[str, Any]]:
    """A few examples with both answers: corrected ones first, at most one that training broke."""
    by_change: dict[tuple[bool, bool], list[int]] = {}
    for place, change in enumerate(zip(*_compare(before, after), strict=True)):
        by_change.setdefault(change, []).append(place)
    broken = by_change.get((True, False), [])[:1]
    corrected = by_change.get((False, True), [])[: SHOWN - len(broken)]
    others = by_change.get((True, True), []) + by_change.get((False, False), [])
    return [
        {
            **text_fields(examples[place], task),
            "right": _name(task, examples[place], examples[place].label),
            "before": _name(task, examples[place], before.given[place]),
            "after": _name(task, examples[place], after.given[place]),
            "right_before": before.right[place],
            "right_after": after.right[place],
            **({"rewards": [each.rewards[place] for each in (before, after) if each.rewards]} if after.rewards else {}),
        }
        for place in (corrected + broken + others)[:SHOWN]
    ]


def _name(task: Task, example: Example, answer: int | str) -> str:
    if isinstance(answer, str):
        return answer
    if answer < 0:  # no right one is known
        return ""
    return " / ".join(task.answers(example)) if task.kind == "generation" else answer_name(task, example, answer)


def per_class(examples: Sequence[Example], task: Task, answers: Answers) -> dict[str, Any] | None:
    """Each label's examples and recall, and how often which label was given for it; None where answers are no labels."""
    if task.kind != "classification" or answers.rewards is not None:
        return None
    classes = len(task.labels)
    matrix = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(matrix, (np.array([example.label for example in examples]), np.array(answers.given)), 1)
    counts = matrix.sum(axis=1)
    return {
        "labels": list(task.labels),
        "n": counts.tolist(),
        "recall": [round(float(matrix[i, i] / counts[i]), 6) if counts[i] else None for i in range(classes)],
        "confusion": matrix.tolist() if classes <= MAX_MATRIX else None,
    }
