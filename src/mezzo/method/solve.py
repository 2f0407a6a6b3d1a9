"""Solve for the move: a step that uses every score, and needs no learning rate.

A step scores a batch at θ and along n directions, solves for the coefficients of the move in the linear model of these
scores (`score_model`), and tries its solutions for several ridges on examples that were not fitted. Which ridge is right is
decided by what all steps so far have shown (`evidence`), not by one, whose few examples often favour a wrong one. How many
directions and examples a step takes, how wide its finite differences are and when to end follow from the steps before, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mezzo.method.batches import ExampleStream
from mezzo.method.evidence import NOTES as EVIDENCE_NOTES
from mezzo.method.evidence import OFFSETS, PRIORS, Evidence, weigh_gains
from mezzo.method.method import Questions
from mezzo.method.noise import step_seed
from mezzo.method.score_model import Floats, ScoreModel, cross_entropies, logits_of
from mezzo.types import Batch, Probe, Question, Scores, StepRecord, Update

# Examples of the first step. The next ones take more while the gains of the last steps (an average) are less than this share of
# what the fitted examples promised: most of the move is then noise, which more examples average out. With a larger share
# forwards are wasted: twice the examples then give less than twice the gain.
FIRST_EXAMPLES, GROWTH, LEAST_SHARE = 64, 1.25, 0.25
# What a step forgets of such an average.
FORGET = 0.25
# Directions at least and at most, and as a share of the wanted examples. More steps along few directions find more of the
# gradient for the same forwards, as long as few examples tell these apart.
LEAST_DIRECTIONS, MOST_DIRECTIONS, RATIO = 64, 256, 0.25
# The weight of an example that an earlier step has fitted, beside one of the batch: moves since then have undone some of its fit.
EARLIER = 0.25
# The k-th move that is taken goes k / (k + DAMPING) of its way. Few directions hold little of what is to be learned: most of a
# move changes scores at random, and that stays, because later directions hold little of it, too. The same change of the loss by
# many moves needs less of it.
DAMPING = 3
# Held-out examples that judge a step at most; where none are held out, as many training examples judge as are fitted.
MOST_JUDGED = 512
# The gain that a move must have on judging examples, in standard errors. Fresh ones only refuse what clearly does harm: their
# evidence is pooled, and a step that is right on average need not look right to a few. The held-out ones judge every step, so
# that a run would soon fit what they happen to favour.
FRESH_MARGIN, HELD_OUT_MARGIN = -2.0, 0.5
# The root mean square by which a probe should change logits. Smaller changes drown in rounding, larger ones are not linear.
WANTED_CHANGE = {"float32": 0.1, "bfloat16": 0.3, "float16": 0.2}
# The moves of so many steps before are directions too.
LAST_MOVES = 4
# The run ends when so many steps together surely gain no more than this share of the loss. Later steps are larger.
LAST_STEPS, LEAST_GAIN = 10, 0.01
# What a step can have had at most.
MOST = {"directions": 2**14, "fitted": 2**31, "judged": 2**31, "forwards": 2**62}
Terms = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step spends: directions, fitted examples and judged examples."""

    directions: int
    fitted: int
    judged: int

    @property
    def forwards(self) -> int:
        return (1 + self.directions) * self.fitted + (1 + len(OFFSETS)) * self.judged


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
    _fitted: int = field(init=False, default=0)
    _judged: int = field(init=False, default=0)
    _wanted: float = field(init=False, default=FIRST_EXAMPLES)
    """Examples that the next step should fit."""
    _share: float = field(init=False, default=1.0)
    """The average over the last steps of the gain, as a share of what the fitted examples promised."""
    _last_moves: list[Terms] = field(init=False, default_factory=list)
    """The newest first. The loss often still falls along them, which fresh directions would have to find again."""
    _evidence: Evidence = field(init=False, default_factory=Evidence)
    _moves: int = field(init=False, default=0)
    """How many were taken."""
    _gains: list[tuple[float, float]] = field(init=False, default_factory=list)
    """Of each step's whole move, 0 where none was taken, and its standard error."""
    _loss: float = field(init=False, default=0.0)

    looks_ahead = False
    """The first question of a step depends on how the step before it ended."""

    def step(self, step: int) -> Questions:
        held_out = 0 if self.held_out is None else len(self.held_out)
        size = plan_step(self._wanted, len(self.train), held_out, self.directions, self.examples)
        batch = self.train.take(self._taken, size.fitted)
        fresh: list[Terms] = [((step_seed(self.seed, step, number), 1.0),) for number in range(size.directions)]
        directions = [*fresh, *self._last_moves]
        answer = yield Question(batch, (Probe(), *(Probe(combine([each], [self.eps])) for each in directions)))
        model, finite = make_model(answer, batch, self.eps, self._earlier_weight(size.fitted))
        notes = {
            "forwards": size.forwards + len(self._last_moves) * size.fitted,
            "directions": len(directions),
            "fitted": size.fitted,
            "judged": size.judged,
            "eps": self.eps,
        }
        if model is None:
            return StepRecord(step, (math.nan,), (), Update(), 0.0, "non-finite loss", notes)
        directions = [each for each, kept in zip(directions, finite, strict=True) if kept]
        unit = max(model.mean_curvature(), 1e-12) / size.fitted
        middle = self._likely_prior(model, unit)
        ridges = [unit * 4.0 ** -(middle + offset) for offset in OFFSETS]
        moves = model.fit_path(ridges)
        judges = self._judges(size)
        terms = [combine(directions, move) for move in moves]
        tried = yield Question(judges, (Probe(), *map(Probe, terms)))
        losses = _losses_per_example(tried, judges)
        gains = losses[0] - losses[1:]
        if self.held_out is None:  # training examples are not fitted yet by the steps before
            left_out = [model.left_out_gains(move, ridge) for move, ridge in zip(moves, ridges, strict=True)]
            gains = np.concatenate([gains, np.stack(left_out)], axis=1)
        notes |= {"prior": middle} | dict(zip(EVIDENCE_NOTES, weigh_gains(gains), strict=True))
        usable = [index for index, row in enumerate(gains) if np.isfinite(row).all()]
        chosen = self._add_evidence(notes).choose_move(usable, middle)
        gain, error = _mean_and_error(losses[0] - losses[1 + chosen]) if usable else (0.0, 0.0)
        taken = gain > error * (FRESH_MARGIN if self.held_out is None else HELD_OUT_MARGIN)
        still = np.zeros(len(directions))
        length = (1 + self._moves) / (1 + self._moves + DAMPING)
        notes |= {
            "step_length": length,
            "change": float(self.eps * model.changes.std()),
            "ridge": ridges[chosen] if taken else math.inf,
            "expected": float((model.losses(still) - model.losses(moves[chosen])).mean()),
            "before": float(losses[0].mean()),
            # A parabola from θ to the whole move, where it is lowest: only the whole move was scored.
            "after": float(losses[0].mean()) - length * (2 - length) * gain,
            "gain": gain,
            "gain_error": error,
        }
        damped = combine(directions, length * moves[chosen])
        update = Update(tuple((seed, -coef) for seed, coef in damped)) if taken else Update()
        loss = float(model.losses(still).mean())
        return StepRecord(step, (loss,), tuple(model.slopes().tolist()), update, 0.0, notes=notes)

    def _earlier_weight(self, fitted: int) -> float:
        """The weight of the examples that earlier steps have fitted; those of the batch, which are none of them, weigh 1."""
        return EARLIER * min(self._fitted, len(self.train) - fitted) / fitted

    def _likely_prior(self, model: ScoreModel, unit: float) -> int:
        """The k with the most evidence; before the first step, by leaving out one example after the other."""
        if self._evidence.gains:
            return self._evidence.likely_prior()
        ridges = [unit * 4.0**-prior for prior in PRIORS]
        fits = zip(PRIORS, model.fit_path(ridges), ridges, strict=True)
        return Evidence({k: float(model.left_out_gains(move, ridge).sum()) for k, move, ridge in fits}).likely_prior()

    def _add_evidence(self, notes: Mapping[str, float]) -> Evidence:
        """With what the judging examples of a step say and, unless all steps fit the same ones, the fits without one example."""
        return self._evidence.add(notes, notes["judged"] + (notes["fitted"] if self.held_out is None else 0))

    def _judges(self, size: StepSize) -> Batch:
        if self.held_out is None:
            return self.train.take(self._taken + size.fitted, size.judged)
        return self.held_out.take(self._judged, size.judged)

    def cost(self, record: StepRecord) -> int:
        return int(record.notes["forwards"])

    def observe(self, record: StepRecord) -> None:
        notes = record.notes
        check_notes(notes)
        self.spent += int(notes["forwards"])
        self._taken += int(notes["fitted"]) + (int(notes["judged"]) if self.held_out is None else 0)
        self._judged += int(notes["judged"])
        self._fitted += 0 if record.update.empty else int(notes["fitted"])
        if record.skipped:
            self.eps /= 4
            return
        gain, self._loss = notes["gain"], record.losses[0]
        self._evidence = self._add_evidence(notes)
        if not record.update.empty:
            self._moves += 1
            self._last_moves = [self._own_part(record), *self._last_moves][:LAST_MOVES]
        self._gains.append((gain if not record.update.empty else 0.0, notes["gain_error"]))
        share = gain / notes["expected"] if notes["expected"] > 0 else 0.0
        self._share += FORGET * (max(-1.0, min(1.0, share)) - self._share)
        self._wanted *= GROWTH if self._share < LEAST_SHARE else 1.0
        ratio = WANTED_CHANGE[self.dtype] / notes["change"] if notes["change"] > 0 else 4.0
        self.eps *= 2.0 ** max(-2, min(2, round(math.log2(ratio))))

    def _own_part(self, record: StepRecord) -> Terms:
        """The part of a step's move along its fresh directions, as a direction of the same length as these."""
        own = {step_seed(self.seed, record.step, number) for number in range(int(record.notes["directions"]))}
        terms = [(seed, -coef) for seed, coef in record.update.terms if seed in own]
        length = math.hypot(*(weight for _, weight in terms))
        return tuple((seed, weight / length) for seed, weight in terms) if length else ()

    @property
    def finished(self) -> str:
        """Why no further step is worth its cost; empty while one is."""
        last = self._gains[-LAST_STEPS:]
        total = sum(gain for gain, _ in last)
        # What fresh examples say of one step is mostly chance; the held-out ones refuse gains within it one by one.
        chance = math.hypot(*(error for _, error in last)) if self.held_out is None else 0.0
        if len(last) < LAST_STEPS or total + chance > LEAST_GAIN * self._loss:
            return ""
        return f"moves stopped helping: the last {LAST_STEPS} gained {total:.2g}"


def check_notes(notes: Mapping[str, float]) -> None:
    """Refuse counts that no step has: the journal may come from anybody."""
    for name, most in MOST.items():
        if not 0 <= notes[name] <= most:
            raise ValueError(f"{name} is {notes[name]:g}")


def combine(directions: Sequence[Terms], coefficients: Iterable[float]) -> Terms:
    """The sum of directions times coefficients, as terms with float32 values."""
    pairs = zip(directions, coefficients, strict=True)
    return tuple((seed, float(np.float32(weight * coef))) for each, coef in pairs for seed, weight in each)


def make_model(
    scores: Scores, batch: Batch, eps: float, earlier_weight: float = 0.0
) -> tuple[ScoreModel | None, Sequence[bool]]:
    """The linear model from the scores at θ and at every θ + ε·zᵢ, and which directions have finite scores; None where θ or all
    directions have none."""
    logits = logits_of(scores, batch)
    finite = [bool(np.isfinite(member).all()) for member in logits]
    if not finite[0] or not any(finite[1:]):
        return None, finite[1:]
    changes = _centred((logits[1:][finite[1:]] - logits[0]) / eps).astype(np.float32)
    return ScoreModel(logits[0], changes, batch.labels, earlier_weight), finite[1:]


def _mean_and_error(values: Floats) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(max(1, len(values) - 1)))


def _losses_per_example(scores: Scores, batch: Batch) -> Floats:
    with np.errstate(invalid="ignore"):
        return cross_entropies(logits_of(scores, batch), batch.labels)


def _centred(changes: Floats) -> Floats:
    """Without what a change adds to all candidates of an example, which no probability depends on."""
    return changes - changes.mean(axis=-1, keepdims=True)
