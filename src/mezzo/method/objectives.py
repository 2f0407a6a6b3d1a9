"""Scores and labels to one loss per probe, in float64 on the host. Lower is better."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mezzo.errors import ConfigError, nearest
from mezzo.types import Batch, Probe, Question, Scores

# Where code lies that is not the user's: this package, and installed ones.
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(np.__file__).parents[1]), os.path.dirname(os.__file__))
# Characters of what a user's code raised.
MAX_MESSAGE = 500
Losses = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
ObjectiveFunction = Callable[[Scores, Batch], Losses]


def cross_entropy(scores: Scores, batch: Batch) -> Losses:
    """Mean negative log-probability of the right candidate: among the candidates, or as the engine normalised it."""
    wide = scores.astype(np.float64)
    if not is_normalised(batch):
        wide = wide - log_sum_exp(wide)
    return -wide[:, np.arange(len(batch)), batch.labels].mean(axis=1)


def is_normalised(batch: Batch) -> bool:
    """Whether scores are log-probabilities already, so that cross-entropy must not normalise over the candidates.

    A single candidate (the LM loss of an answer) has nothing to be normalised against.
    """
    if batch.readout.kind == "words":
        return batch.readout.vocabulary
    return batch.readout.kind == "candidates" and max(len(p.candidates) for p in batch.prompts) == 1


def log_sum_exp(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Over the last axis, kept; −inf entries (absent candidates) count for nothing."""
    top = scores.max(axis=-1, keepdims=True)
    total: npt.NDArray[np.float64] = top + np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
    return total


def accuracy_of(predicted: Labels, labels: Labels, classes: int = 0) -> float:
    return float((predicted == labels).mean())


def f1_of(predicted: Labels, labels: Labels, classes: int = 0) -> float:
    """Binary F1 of class 1; the mean over the classes that occur when the task has more than two."""
    count = classes or 1 + int(max(predicted.max(), labels.max()))
    wanted = [1] if count <= 2 else sorted(set(labels.tolist()) | set(predicted.tolist()))
    return float(np.mean([_f1_of_class(predicted, labels, c) for c in wanted]))


def _f1_of_class(predicted: Labels, labels: Labels, positive: int) -> float:
    hits = int(((predicted == positive) & (labels == positive)).sum())
    both = int((predicted == positive).sum() + (labels == positive).sum())
    return 2 * hits / both if both else 0.0


def matthews_of(predicted: Labels, labels: Labels, classes: int = 0) -> float:
    """Matthews correlation; for more than two classes, the correlation of the one-hot matrices (R_K)."""
    count = 1 + int(max(predicted.max(), labels.max()))
    p, t = np.eye(count)[predicted], np.eye(count)[labels]
    p, t = p - p.mean(axis=0), t - t.mean(axis=0)
    spread = np.sqrt((p * p).sum() * (t * t).sum())
    return float((p * t).sum() / spread) if spread else 0.0


Metric = Callable[[Labels, Labels, int], float]
METRICS: dict[str, Metric] = {
    "accuracy": accuracy_of,
    "f1": f1_of,
    "matthews": matthews_of,
}


class Objective(Protocol):
    """What a method needs of an objective: the question to ask at its probes, and one loss per probe from the answer."""

    @property
    def on_device(self) -> bool:
        """Whether a device computes the same losses by itself."""
        ...

    def question(self, batch: Batch, probes: tuple[Probe, ...]) -> Question: ...

    def losses(self, answer: Any, batch: Batch) -> Losses: ...


@dataclass(frozen=True, slots=True)
class ScoreObjective:
    """An objective over scores[P, B, C]."""

    function: ObjectiveFunction
    vocabulary: bool = False
    """The scores must be log-probabilities over the whole vocabulary, not over the label words alone."""
    smooth: bool = False
    """The losses change with every score. Those of a metric change only where a prediction does."""
    on_device: bool = False

    def question(self, batch: Batch, probes: tuple[Probe, ...]) -> Question:
        return Question(batch, probes)

    def losses(self, answer: Scores, batch: Batch) -> Losses:
        return self.function(answer, batch)


def negative_metric(metric: Metric) -> ObjectiveFunction:
    """A metric of predictions as an objective: its negative, per probe."""

    def function(scores: Scores, batch: Batch) -> Losses:
        values = [-metric(member.argmax(axis=1), batch.labels, scores.shape[2]) for member in scores]
        usable = np.isfinite(scores.max(axis=2)).all(axis=1)  # the argmax of NaN is label 0
        return np.where(usable, np.array(values, dtype=np.float64), np.nan)

    return function


OBJECTIVES: dict[str, ScoreObjective] = {
    "cross_entropy": ScoreObjective(cross_entropy, smooth=True, on_device=True),
    "vocabulary_cross_entropy": ScoreObjective(cross_entropy, vocabulary=True, smooth=True, on_device=True),
    **{name: ScoreObjective(negative_metric(metric)) for name, metric in METRICS.items()},
}


def get_objective(objective: str | ObjectiveFunction) -> ScoreObjective:
    """A registered objective, a callable, or `module:function` that takes (scores[P, B, C], batch) and returns P losses."""
    if isinstance(objective, str) and objective in OBJECTIVES:
        return OBJECTIVES[objective]
    return ScoreObjective(check_result(import_function(objective)))


def import_function(name: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function that `module:function` names, also from the current folder; a callable as it is."""
    if callable(name):
        return name
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(OBJECTIVES)
        raise ConfigError(f"unknown objective {name!r}{nearest(name, OBJECTIVES)} ({known}, or module:function)")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the installed command does not search the current folder
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(f"objective {name!r} cannot be imported: {describe_failure(error)}") from None
    if not callable(function):
        raise ConfigError(f"objective {name!r} is not a function")
    return function  # type: ignore[no-any-return]


def describe_failure(error: BaseException) -> str:
    """What a user's code raised, on one line, and the last line of it that ran."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", *_LIBRARIES))
    ]
    name, line = (own[-1].filename, own[-1].lineno) if own else ("", None)
    if isinstance(error, SyntaxError) and error.filename:
        name, line = error.filename, error.lineno
    place = f" ({os.path.basename(name)}, line {line})" if name else ""
    try:
        text = " ".join(str(getattr(error, "msg", None) or error).split())[:MAX_MESSAGE]
    except Exception:  # its own __str__ may fail
        text = "its message cannot be shown"
    return f"{type(error).__name__}{': ' * bool(text)}{text}{place}"


def check_result(function: Callable[..., Any]) -> ObjectiveFunction:
    """A user's function with its result checked: a wrong shape is explained in one line."""
    name = getattr(function, "__name__", function)

    def objective(scores: Scores, batch: Batch) -> Losses:
        try:
            losses = np.asarray(function(scores, batch), dtype=np.float64)
        except ConfigError:
            raise
        except Exception as error:  # the message must name the function that failed
            raise ConfigError(f"objective {name!r} failed: {describe_failure(error)}") from error
        if losses.shape != (scores.shape[0],):
            raise ConfigError(
                f"objective {name!r} returned shape {losses.shape}; it takes (scores[probes, examples, candidates], batch) "
                f"and returns one loss per probe: ({scores.shape[0]},)"
            )
        return losses

    return objective
