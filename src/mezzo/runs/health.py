"""Is a run all right? The three ways it can go wrong are noticed while it trains, and said in one sentence each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["diverging", "no signal", "overfitting"]
RECENT = 10
"""Steps whose median is "the loss now" for divergence."""
WINDOW = 50
"""Steps whose mean is the training loss at a place, for comparison with dev."""
DEAD = 20
"""Steps in a row without any slope after which there is no signal."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a run, and what to do about it."""

    kind: Kind
    step: int
    text: str


@dataclass
class Health:
    """Sees a run's events one by one and reports each kind of trouble once."""

    objective: str = "cross_entropy"
    found: list[Finding] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)
    _looks: list[tuple[int, float, float]] = field(default_factory=list)
    _flat: int = 0
    _zero: int = 0

    def see(self, event: str, values: Mapping[str, Any]) -> Iterator[Finding]:
        """New findings after an event of the run (`step`, `evaluation`; others say nothing)."""
        if event == "step" and not values.get("skipped"):
            checks = self._step(int(values["step"]), float(values["loss"]), [float(g) for g in values["slopes"]])
        elif event == "evaluation":
            checks = self._look(int(values["step"]), float(values["loss"]), float(values["value"]))
        else:
            return
        for finding in checks:
            if finding is not None and finding.kind not in self.kinds:
                self.found.append(finding)
                yield finding

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.found}

    def _step(self, step: int, loss: float, slopes: Sequence[float]) -> Iterator[Finding | None]:
        self._losses.append(loss)
        zero = not any(slopes)
        self._zero += zero
        self._flat = self._flat + 1 if zero else 0
        yield self._dead(step)
        yield self._exploding(step)

    def _look(self, step: int, loss: float, value: float) -> Iterator[Finding | None]:
        self._looks.append((step, loss, value))
        if len(self._looks) > 1 and math.isfinite(loss):
            yield self._climbing(step, loss)
            yield self._overfitting(step, loss, value)

    def _dead(self, step: int) -> Finding | None:
        if self._flat < DEAD:
            return None
        other = "" if self.objective.endswith("cross_entropy") else ", or --objective cross_entropy"
        return Finding(
            "no signal",
            step,
            f"the last {DEAD} steps moved nothing: the losses at θ+εz and θ−εz were equal, so every slope was zero. "
            f"Try a larger --eps or --batch-size{other}; 'mezzo signal' measures what helps",
        )

    def _exploding(self, step: int) -> Finding | None:
        """Finite losses that grow far beyond the first one, which was measured before any step."""
        if len(self._losses) <= RECENT:
            return None
        first, now = self._losses[0], statistics.median(self._losses[-RECENT:])
        return _diverging(step, "loss", first, now) if now > first + max(1.0, abs(first)) else None

    def _climbing(self, step: int, loss: float) -> Finding | None:
        """The dev loss well above where it began, and the training loss no lower: the steps are too large."""
        first = self._looks[0][1]
        early, late = _mean(self._losses[:WINDOW]), _mean(self._losses[-WINDOW:])
        return _diverging(step, "dev loss", first, loss) if loss > 1.2 * first + 0.05 and late >= early else None

    def _overfitting(self, step: int, loss: float, value: float) -> Finding | None:
        """The training loss has gone on falling since dev was best, and dev has become worse."""
        best, low, at_best = min(self._looks[:-1], key=lambda look: look[1])
        then, now = self._losses[: max(best, WINDOW)][-WINDOW:], self._losses[-WINDOW:]
        margin = max(0.05 * abs(_mean(then)), 2 * _error(then), 2 * _error(now))
        if loss < low + max(0.1 * abs(low), 0.02) or value > at_best or _mean(now) > _mean(then) - margin:
            return None
        return Finding(
            "overfitting",
            step,
            f"overfitting: the training loss goes on falling ({_mean(then):.3g} to {_mean(now):.3g}) while the dev loss has "
            f"risen from {low:.3g} at step {best} to {loss:.3g}. The best checkpoint is kept and tested; more data, fewer steps "
            "or --patience help",
        )


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


# ---- the whole run in a word


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a run: a word or two, whether that is good, and why."""

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
    """Judge a finished run: its health, and the tested checkpoint against the better of both zero-shot figures."""
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
