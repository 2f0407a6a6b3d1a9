"""Solve for the move: a step that uses every score, and needs no learning rate.

A step scores a batch at θ and along n directions, solves for the coefficients of the move in the linear model of these
scores (`score_model`), and tries the solutions for several degrees of caution on examples that were not fitted. The best one
becomes the update if it lowers their loss; otherwise the step moves nothing. How many directions and examples a step takes, how
wide its finite differences are and when to end follow from the steps before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mezzo.method.batches import ExampleStream
from mezzo.method.method import Questions
from mezzo.method.noise import step_seed
from mezzo.method.score_model import Floats, ScoreModel, cross_entropies, logits_of
from mezzo.types import Batch, Probe, Question, Scores, StepRecord, Update

# Examples of the first step; each step whose gain is less than so many standard errors makes the next one larger: the gradient
# has become smaller than its noise, which more examples average out.
FIRST_EXAMPLES, GROWTH, CLEAR_GAIN = 64, 1.25, 2.0
# Directions, as a multiple of the examples, at least and at most. With few directions, the largest curvature along them limits
# the move; with more than the examples can tell apart, nothing is gained.
RATIO, LEAST_DIRECTIONS, MOST_DIRECTIONS = 1.0, 64, 256
# The solutions that are tried, as multiples of the ridge that cross-validation prefers: the linear model holds near θ only.
CAUTIONS = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
# Held-out examples that judge a step at most; where none are held out, as many training examples judge as are fitted.
MOST_JUDGED = 512
# The gain that a move must have on held-out examples, in standard errors: they judge every step, so that chance adds up.
HELD_OUT_MARGIN = 0.5
# The root mean square by which a probe should change logits. Smaller changes drown in rounding, larger ones are not linear.
WANTED_CHANGE = {"float32": 0.1, "bfloat16": 0.3, "float16": 0.2}
# The run ends when so many steps together gain no more than chance, or than this share of the loss. They triple what was spent.
LAST_STEPS, LEAST_GAIN = 8, 0.01


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step spends: directions, fitted examples and judged examples."""

    directions: int
    fitted: int
    judged: int

    @property
    def forwards(self) -> int:
        return (1 + self.directions) * self.fitted + (1 + len(CAUTIONS)) * self.judged


def plan_step(wanted: float, train: int, held_out: int, directions: int = 0, fitted: int = 0) -> StepSize:
    """The size of a step that wants so many examples, with so many training and held-out ones. `directions` and `fitted` fix
    what they name.

    Sizes are powers of two and their middles (64, 96, 128, …): a device then sees few shapes.
    """
    examples = min(fitted or _round(wanted), train if held_out else max(1, train // 2))
    count = directions or min(MOST_DIRECTIONS, max(LEAST_DIRECTIONS, _round(RATIO * wanted)))
    return StepSize(count, examples, min(MOST_JUDGED, held_out) or min(examples, max(1, train - examples)))


def _round(value: float) -> int:
    """The largest of 1, 2, 3, 4, 6, 8, 12, 16, … that is not above."""
    power = 2 ** int(math.log2(max(1.0, value)))
    return int(1.5 * power) if value >= 1.5 * power and power > 1 else power


@dataclass
class Solve:
    """The method. What it remembers follows from the records of the steps before."""

    seed: int
    eps: float
    train: ExampleStream
    held_out: ExampleStream | None = None
    """Examples that judge every step; None: those that follow in the training stream."""
    directions: int = 0
    examples: int = 0
    """Fixed sizes; 0: the method's own choice."""
    dtype: str = "float32"
    spent: int = field(init=False, default=0)
    _taken: int = field(init=False, default=0)
    _judged: int = field(init=False, default=0)
    _wanted: float = field(init=False, default=FIRST_EXAMPLES)
    """Examples that the next step should fit."""
    _gains: list[tuple[float, float]] = field(init=False, default_factory=list)
    """Of each move that was taken, 0 where none was, and its standard error."""
    _loss: float = field(init=False, default=0.0)

    looks_ahead = False
    """The first question of a step depends on how the step before it ended."""

    def step(self, step: int) -> Questions:
        held_out = len(self.held_out) if self.held_out else 0
        size = plan_step(self._wanted, len(self.train), held_out, self.directions, self.examples)
        batch = self.train.take(self._taken, size.fitted)
        seeds = [step_seed(self.seed, step, direction) for direction in range(size.directions)]
        answer = yield Question(batch, (Probe(), *(Probe(((seed, self.eps),)) for seed in seeds)))
        model, usable = make_model(answer, batch, self.eps)
        notes = {
            "forwards": size.forwards,
            "directions": size.directions,
            "fitted": size.fitted,
            "judged": size.judged,
            "eps": self.eps,
        }
        if model is None:
            return StepRecord(step, (math.nan,), (), Update(), 0.0, "non-finite loss", notes)
        seeds = [seed for seed, kept in zip(seeds, usable, strict=True) if kept]
        ridge, expected = model.choose_ridge(step_seed(self.seed, step, 0))
        moves = [_float32(move) for move in model.fit_path([caution * ridge for caution in CAUTIONS])]
        judges = self._judges(size)
        terms = [tuple(zip(seeds, move.tolist(), strict=True)) for move in moves]
        tried = yield Question(judges, (Probe(), *map(Probe, terms)))
        losses = _losses_per_example(tried, judges)
        chosen, gain, error = choose_move(losses, HELD_OUT_MARGIN if self.held_out else 0.0)
        notes |= {
            "change": float(self.eps * model.changes.std()),
            "ridge": ridge,
            "expected": expected,
            "caution": CAUTIONS[chosen] if chosen is not None else math.inf,
            "before": float(losses[0].mean()),
            "gain": gain,
            "gain_error": error,
        }
        update = Update() if chosen is None else Update(tuple((seed, -coef) for seed, coef in terms[chosen]))
        loss = float(model.losses(np.zeros(len(seeds))).mean())
        return StepRecord(step, (loss,), tuple(model.slopes().tolist()), update, 0.0, notes=notes)

    def _judges(self, size: StepSize) -> Batch:
        if self.held_out is None:
            return self.train.take(self._taken + size.fitted, size.judged)
        return self.held_out.take(self._judged, size.judged)

    def cost(self, record: StepRecord) -> int:
        return int(record.notes["forwards"])

    def observe(self, record: StepRecord) -> None:
        notes = record.notes
        self.spent += int(notes["forwards"])
        self._taken += int(notes["fitted"]) + (0 if self.held_out else int(notes["judged"]))
        self._judged += int(notes["judged"])
        if record.skipped:
            self.eps /= 4
            return
        gain, error, self._loss = notes["gain"], notes["gain_error"], record.losses[0]
        self._gains.append((gain if not record.update.empty else 0.0, error))
        self._wanted *= GROWTH if gain < CLEAR_GAIN * error else 1.0
        ratio = WANTED_CHANGE[self.dtype] / notes["change"] if notes["change"] > 0 else 4.0
        self.eps *= 2.0 ** max(-2, min(2, round(math.log2(ratio))))

    @property
    def finished(self) -> str:
        """Why no further step is worth its cost; empty while one is."""
        last = self._gains[-LAST_STEPS:]
        total = sum(gain for gain, _ in last)
        # Held-out examples refuse gains within chance one by one.
        chance = 0.0 if self.held_out else math.hypot(*(error for _, error in last))
        if len(last) < LAST_STEPS or total > max(chance, LEAST_GAIN * self._loss):
            return ""
        return f"moves stopped helping: the last {LAST_STEPS} gained {total:.2g}"


def make_model(scores: Scores, batch: Batch, eps: float) -> tuple[ScoreModel | None, Sequence[bool]]:
    """The linear model from the scores at θ and at every θ + ε·zᵢ, and which directions have finite scores; None where θ or all
    directions have none."""
    logits = logits_of(scores, batch)
    finite = [bool(np.isfinite(member).all()) for member in logits]
    if not finite[0] or not any(finite[1:]):
        return None, finite[1:]
    changes = _centred((logits[1:][finite[1:]] - logits[0]) / eps).astype(np.float32)
    return ScoreModel(logits[0], changes, batch.labels), finite[1:]


def choose_move(losses: Floats, margin: float = 0.0) -> tuple[int | None, float, float]:
    """Which move has the lowest loss on the judging examples, [1 + moves, B] with θ itself first: its index, its gain over θ and
    the standard error of that gain. None: no gain is above so many standard errors."""
    means = np.where(np.isfinite(losses).all(axis=1), losses.mean(axis=1), np.inf)
    best = int(means[1:].argmin())
    if not math.isfinite(means[1 + best]) or not math.isfinite(means[0]):
        return None, 0.0, 0.0
    gains = losses[0] - losses[1 + best]
    error = float(gains.std() / math.sqrt(max(1, len(gains) - 1)))
    gain = float(gains.mean())
    return (best if gain > margin * error else None), gain, error


def _losses_per_example(scores: Scores, batch: Batch) -> Floats:
    with np.errstate(invalid="ignore"):
        return cross_entropies(logits_of(scores, batch), batch.labels)


def _centred(changes: Floats) -> Floats:
    """Without what a change adds to all candidates of an example, which no probability depends on."""
    return changes - changes.mean(axis=-1, keepdims=True)


def _float32(values: Floats) -> Floats:
    return values.astype(np.float32).astype(np.float64)
