"""Health of a run: divergence, no signal and overfitting are detected while it trains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mezzo.evaluation.figures import format_perplexity, is_reward_metric, perplexity
from mezzo.method.objectives import OBJECTIVES

Kind = Literal["diverging", "no signal", "overfitting", "forgetting"]
# Steps whose median counts as the present loss when divergence is checked.
RECENT = 10
# Steps whose mean counts as the training loss around a step, for comparison with dev: solve has few and large steps.
WINDOW = {"solve": 4, "spsa": 50, "es": 10, "adam": 50}
AGAINST_DIVERGENCE = {
    "solve": "a smaller --eps or more training examples; the best checkpoint so far is kept",
    "adam": "an --lr three to ten times smaller; the best checkpoint so far is kept",
    "es": "an --lr three to ten times smaller, or a --weight-decay; the best checkpoint so far is kept",
    "spsa": "an --lr three to ten times smaller, or bound single steps with --clip; the best checkpoint so far is kept",
}
# How many times its first perplexity a held-out text has from which on a model forgets.
FORGETTING = 1.5
# Consecutive steps without any slope after which there is no signal.
ZERO_SLOPES = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run, and what to do about it."""

    kind: Kind
    step: int
    text: str


@dataclass
class Health:
    """Watches a run's events and reports each kind of problem once."""

    objective: str = "cross_entropy"
    method: str = "spsa"
    found: list[Finding] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)
    _evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, loss, value) on dev."""
    _zero_streak: int = 0
    _failing: bool = False
    """Calls of the reward failed in the last step."""

    def watch(self, event: str, values: Mapping[str, Any]) -> Iterator[Finding]:
        """New findings after an event of the run; only `step` and `evaluation` matter."""
        if event == "step" and not values.get("skipped"):
            self._failing = bool(values.get("failed"))
            checks = self._check_step(int(values["step"]), float(values["loss"]), [float(g) for g in values["slopes"]])
        elif event == "evaluation":
            of_text = is_reward_metric(str(values.get("metric")))  # the loss is that of a held-out text
            figures = int(values["step"]), float(values["loss"]), float(values["value"])
            checks = self._check_evaluation(*figures, of_text)
        else:
            return
        for finding in checks:
            if finding is not None and finding.kind not in self.kinds:
                self.found.append(finding)
                yield finding

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.found}

    def _check_step(self, step: int, loss: float, slopes: Sequence[float]) -> Iterator[Finding | None]:
        self._losses.append(loss)
        self._zero_streak = 0 if any(slopes) else self._zero_streak + 1
        if self.method in ("spsa", "es"):  # solve looks at all scores, and ends by itself when moves stop helping
            yield self._no_signal(step)
        yield self._exploding_loss(step)

    def _check_evaluation(self, step: int, loss: float, value: float, of_text: bool) -> Iterator[Finding | None]:
        self._evaluations.append((step, loss, value))
        if of_text:
            yield self._forgetting(step, loss)
        elif len(self._evaluations) > 1 and math.isfinite(loss):
            yield self._rising_dev_loss(step, loss)
            yield self._overfitting(step, loss, value)

    def _no_signal(self, step: int) -> Finding | None:
        if self._zero_streak < ZERO_SLOPES:
            return None
        other = "" if is_smooth(self.objective) else ", or --objective cross_entropy"
        remedy = f"Try a larger --eps or --batch-size{other}; 'mezzo signal' measures what helps"
        if self.method == "es":
            remedy = (
                "Calls of the reward fail: mend it first" if self._failing else "Try a larger --eps or --batch-size"
            )
        if "forgetting" in self.kinds:
            remedy = (
                "The model forgets, and broken texts have the same rewards: start again with a smaller --lr or --eps"
            )
        return Finding(
            "no signal",
            step,
            f"the last {ZERO_SLOPES} steps moved nothing: the losses at θ+εz and θ−εz were equal, so every slope was zero. "
            f"{remedy}",
        )

    def _exploding_loss(self, step: int) -> Finding | None:
        """The loss has grown far beyond that of the first step."""
        if len(self._losses) <= RECENT:
            return None
        first, now = self._losses[0], statistics.median(self._losses[-RECENT:])
        return self._diverging(step, "loss", first, now) if now > first + max(1.0, abs(first)) else None

    def _rising_dev_loss(self, step: int, loss: float) -> Finding | None:
        """The dev loss is well above its first value and the training loss is no lower: the steps are too large."""
        first = self._evaluations[0][1]
        early, late = _mean(self._losses[: self._window]), _mean(self._losses[-self._window :])
        return self._diverging(step, "dev loss", first, loss) if loss > 1.2 * first + 0.05 and late >= early else None

    def _overfitting(self, step: int, loss: float, value: float) -> Finding | None:
        """The training loss has kept falling since dev was best, and dev has become worse."""
        best, low, at_best = min(self._evaluations[:-1], key=lambda evaluation: evaluation[1])
        window = self._window
        then, now = self._losses[: max(best, window)][-window:], self._losses[-window:]
        margin = max(0.05 * abs(_mean(then)), 2 * _error(then), 2 * _error(now))
        if loss < low + max(0.1 * abs(low), 0.02) or value > at_best or _mean(now) > _mean(then) - margin:
            return None
        return Finding(
            "overfitting",
            step,
            f"overfitting: the training loss keeps falling ({_mean(then):.3g} to {_mean(now):.3g}) while the dev loss has "
            f"risen from {low:.3g} at step {best} to {loss:.3g}. The best checkpoint is kept and tested; more data, "
            f"{'a smaller --budget' if self.method == 'solve' else 'fewer steps'} or --patience help",
        )

    def _forgetting(self, step: int, loss: float) -> Finding | None:
        before, now = (perplexity(each) for each in (self._evaluations[0][1], loss))
        if not has_risen(before, now):
            return None
        was, is_now = map(format_perplexity, (before, now))
        return Finding(
            "forgetting",
            step,
            f"the model forgets: the perplexity of the held-out text was {was} and is {is_now} now. A smaller --lr or --eps, or "
            "--weight-decay, which pulls towards the base model, helps",
        )

    def _diverging(self, step: int, what: str, first: float, now: float) -> Finding:
        said = f"the run is diverging: the {what} was {first:.3g} at first and is {now:.3g} now. Start again with "
        return Finding("diverging", step, said + AGAINST_DIVERGENCE[self.method])

    @property
    def _window(self) -> int:
        return WINDOW[self.method]


def has_risen(before: float, now: float) -> bool:
    """Whether the perplexity of a held-out text shows that a model forgets; one that is no number any more does."""
    return math.isfinite(before) and not now < FORGETTING * before


def is_smooth(objective: str) -> bool:
    """Whether every change of a score changes the objective; the user's own function is not known to be smooth."""
    return objective in OBJECTIVES and OBJECTIVES[objective].smooth


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
