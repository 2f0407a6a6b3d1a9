"""Health of a run: divergence, no signal and overfitting are detected while it trains, and its verdict at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mezzo.method.objectives import OBJECTIVES

Kind = Literal["diverging", "no signal", "overfitting"]
# Steps whose median counts as the present loss when divergence is checked.
RECENT = 10
# Steps whose mean counts as the training loss around a step, for comparison with dev.
WINDOW = 50
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
    found: list[Finding] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)
    _evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, loss, value) on dev."""
    _zero_streak: int = 0

    def watch(self, event: str, values: Mapping[str, Any]) -> Iterator[Finding]:
        """New findings after an event of the run; only `step` and `evaluation` matter."""
        if event == "step" and not values.get("skipped"):
            checks = self._check_step(int(values["step"]), float(values["loss"]), [float(g) for g in values["slopes"]])
        elif event == "evaluation":
            checks = self._check_evaluation(int(values["step"]), float(values["loss"]), float(values["value"]))
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
        yield self._no_signal(step)
        yield self._exploding_loss(step)

    def _check_evaluation(self, step: int, loss: float, value: float) -> Iterator[Finding | None]:
        self._evaluations.append((step, loss, value))
        if len(self._evaluations) > 1 and math.isfinite(loss):
            yield self._rising_dev_loss(step, loss)
            yield self._overfitting(step, loss, value)

    def _no_signal(self, step: int) -> Finding | None:
        if self._zero_streak < ZERO_SLOPES:
            return None
        other = "" if is_smooth(self.objective) else ", or --objective cross_entropy"
        return Finding(
            "no signal",
            step,
            f"the last {ZERO_SLOPES} steps moved nothing: the losses at θ+εz and θ−εz were equal, so every slope was zero. "
            f"Try a larger --eps or --batch-size{other}; 'mezzo signal' measures what helps",
        )

    def _exploding_loss(self, step: int) -> Finding | None:
        """The loss has grown far beyond that of the first step."""
        if len(self._losses) <= RECENT:
            return None
        first, now = self._losses[0], statistics.median(self._losses[-RECENT:])
        return _diverging(step, "loss", first, now) if now > first + max(1.0, abs(first)) else None

    def _rising_dev_loss(self, step: int, loss: float) -> Finding | None:
        """The dev loss is well above its first value and the training loss is no lower: the steps are too large."""
        first = self._evaluations[0][1]
        early, late = _mean(self._losses[:WINDOW]), _mean(self._losses[-WINDOW:])
        return _diverging(step, "dev loss", first, loss) if loss > 1.2 * first + 0.05 and late >= early else None

    def _overfitting(self, step: int, loss: float, value: float) -> Finding | None:
        """The training loss has kept falling since dev was best, and dev has become worse."""
        best, low, at_best = min(self._evaluations[:-1], key=lambda evaluation: evaluation[1])
        then, now = self._losses[: max(best, WINDOW)][-WINDOW:], self._losses[-WINDOW:]
        margin = max(0.05 * abs(_mean(then)), 2 * _error(then), 2 * _error(now))
        if loss < low + max(0.1 * abs(low), 0.02) or value > at_best or _mean(now) > _mean(then) - margin:
            return None
        return Finding(
            "overfitting",
            step,
            f"overfitting: the training loss keeps falling ({_mean(then):.3g} to {_mean(now):.3g}) while the dev loss has "
            f"risen from {low:.3g} at step {best} to {loss:.3g}. The best checkpoint is kept and tested; more data, fewer steps "
            "or --patience help",
        )


def is_smooth(objective: str) -> bool:
    """Whether every change of a score changes the objective; the user's own function is not known to be smooth."""
    return objective in OBJECTIVES and OBJECTIVES[objective].smooth


def _diverging(step: int, what: str, first: float, now: float) -> Finding:
    return Finding(
        "diverging",
        step,
        f"the run is diverging: the {what} was {first:.3g} at first and is {now:.3g} now. Start again with an --lr three to "
        "ten times smaller, or bound single steps with --clip; the best checkpoint so far is kept",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


# ---- the verdict


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a run: a word or two, whether that is good, and why."""

    word: str
    tone: Literal["good", "neutral", "bad"]
    reason: str


def verdict(
    kinds: set[str] | frozenset[str],
    value: float | None,
    interval: Sequence[float] | None,
    zero_shot: float | None,
    calibrated: float | None,
    best_step: int,
) -> Verdict:
    """The verdict on a finished run, from its findings and from the tested checkpoint against the better zero-shot figure."""
    if value is None or interval is None:
        gain, known = "there was nothing to test it on", False
        better = worse = False
    else:
        baselines = [figure for figure in (zero_shot, calibrated) if figure is not None]
        base = max(baselines, default=value)
        known = bool(baselines)
        points, side = 100 * abs(value - base), "over" if value >= base else "under"
        gain = f"{points:.1f} points {side} the better zero-shot figure ({base:.1%}), 95% {interval[0]:.1%} to {interval[1]:.1%}"
        better, worse = interval[0] > base, interval[1] < base
    if "diverging" in kinds:
        kept = f"; the checkpoint of step {best_step} that was tested: {gain}" if known else ""
        return Verdict("diverged", "bad", f"the loss grew instead of falling: a smaller --lr is needed{kept}")
    if "no signal" in kinds and not better:
        return Verdict("no signal", "bad", f"steps without any slope moved nothing: a larger --eps is needed; {gain}")
    if better:
        late = f"; it overfits after step {best_step}, which is what was tested" if "overfitting" in kinds else ""
        return Verdict("worked", "good", f"{gain}: more than chance{late}")
    if "overfitting" in kinds:
        return Verdict(
            "overfits", "bad", f"the training loss fell and dev became worse; tested at step {best_step}: {gain}"
        )
    if worse:
        return Verdict("got worse", "bad", f"{gain}")
    if not known:
        return Verdict("not tested", "neutral", gain)
    if value is not None and value > base:
        return Verdict("unclear", "neutral", f"{gain}: within chance. More test examples, steps or seeds would tell")
    start = "no step was better on dev than the model as it came" if best_step == 0 else gain
    return Verdict("did not move", "bad", f"{start}. A larger --lr, more steps or other label words may help")
