"""The decisions of `--method solve`: sizes of steps, choice of moves, memory, and the end."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mezzo.journal.lines import encode_record, parse_record
from mezzo.method import evidence, solve
from mezzo.method.batches import ExampleStream
from mezzo.method.evidence import NOTES, OFFSETS, PRIORS, Evidence, weigh_gains
from mezzo.method.method import answer_questions
from mezzo.method.noise import dense
from mezzo.method.score_model import cross_entropies
from mezzo.method.solve import Solve, plan_step
from mezzo.types import Probe, Prompt, Question, Readout, StepRecord, Update

CLASSES, WIDTH = 3, 6
READOUT = Readout("words", words=tuple(range(CLASSES)))


class LinearEngine:
    """Softmax regression: scores are x·W, so that the linear model is exact and the best loss is known."""

    def __init__(self, examples: int, seed: int = 0, width: int = WIDTH) -> None:
        rng = np.random.default_rng(seed)
        self.inputs = rng.normal(size=(examples, width))
        truth = rng.normal(size=(width, CLASSES)) * 2
        self.inputs[:, WIDTH:] *= 0.3
        truth[WIDTH:] = 0.0
        noise = rng.gumbel(size=(examples, CLASSES))
        self.labels = (self.inputs @ truth + noise).argmax(axis=1)
        self.weights = np.zeros(width * CLASSES)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(Prompt((number,), label=int(label), position=0) for number, label in enumerate(self.labels))

    def score(self, question: Question) -> np.ndarray:
        rows = self.inputs[[prompt.ids[0] for prompt in question.batch.prompts]]
        points = [self.weights + self._move(probe.terms) for probe in question.probes]
        return np.stack([rows @ point.reshape(-1, CLASSES) for point in points]).astype(np.float32)

    def apply(self, update: Update) -> None:
        self.weights = self.weights - self._move(update.terms)

    def _move(self, terms) -> np.ndarray:
        return sum(
            (scale * dense("rademacher", seed, "w", 0, len(self.weights)) for seed, scale in terms),
            np.zeros(len(self.weights)),
        )


def run(engine: LinearEngine, method: Solve, steps: int) -> list[StepRecord]:
    records = []
    for step in range(steps):
        questions = method.step(step)
        record = answer_questions(questions, next(questions), engine.score)
        engine.apply(record.update)
        method.observe(record)
        records.append(record)
    return records


def stream(engine: LinearEngine, first: int, last: int) -> ExampleStream:
    return ExampleStream(engine.prompts[first:last], READOUT, seed=0)


def loss_on(engine: LinearEngine, first: int, last: int) -> float:
    batch = stream(engine, first, last).take(0, last - first)
    scores = engine.score(Question(batch, (Probe(),)))[0].astype(np.float64)
    return float(cross_entropies(scores, batch.labels).mean())


def test_one_whole_move_nearly_solves_a_linear_model(monkeypatch):
    monkeypatch.setattr(solve, "DAMPING", 0)
    engine = LinearEngine(3000)
    method = Solve(0, 1e-2, stream(engine, 0, 3000), directions=40, examples=1000)
    first, second = run(engine, method, 2)
    assert first.losses[0] == pytest.approx(math.log(CLASSES))
    assert second.losses[0] < 0.75 * math.log(CLASSES)
    assert second.notes["gain"] < 0.1 * first.notes["gain"]  # almost nothing was left to gain


def test_the_first_moves_go_a_part_of_their_way():
    engine = LinearEngine(3000)
    method = Solve(0, 1e-2, stream(engine, 0, 3000))
    for step in range(3):
        questions = method.step(step)
        tried = questions.send(engine.score(next(questions)))
        with pytest.raises(StopIteration) as end:
            questions.send(engine.score(tried))
        record = end.value.value
        part = (1 + step) / (1 + step + solve.DAMPING)
        assert record.notes["step_length"] == part and not record.update.empty
        assert 0 < record.notes["before"] - record.notes["after"] < record.notes["gain"]
        moved = {seed: -coef for seed, coef in record.update.terms}
        assert any(
            all(moved[seed] == pytest.approx(part * coef, rel=1e-5) for seed, coef in probe.terms)
            for probe in tried.probes[1:]
        )
        method.observe(record)
    method.observe(replace(record, update=Update()))
    assert method._moves == 3  # a refused move is none


def test_damped_moves_reach_a_lower_loss_with_less_noise(monkeypatch):
    """Where most weights have nothing to learn, whole moves leave noise in them that later moves do not take back."""
    losses, noise = [], []
    for damping in (0, solve.DAMPING):
        monkeypatch.setattr(solve, "DAMPING", damping)
        found = []
        for seed in range(3):
            engine = LinearEngine(6000, seed, width=400)
            engine.weights[: WIDTH * CLASSES] = np.random.default_rng(seed).normal(size=WIDTH * CLASSES)
            run(engine, Solve(seed, 1e-2, stream(engine, 0, 5000), directions=64, examples=64), 12)
            found.append((loss_on(engine, 5000, 6000), float(np.linalg.norm(engine.weights[WIDTH * CLASSES :]))))
        for kept, values in zip((losses, noise), zip(*found, strict=True), strict=True):
            kept.append(float(np.mean(values)))
    assert losses[1] < losses[0] and noise[1] < 0.9 * noise[0]


def test_the_shortest_move_within_chance_of_the_most_evidence_is_taken():
    notes = {"prior": 0.0, **dict(zip(NOTES, (1.0, 85.0, 95.0, 100.0, 99.0), strict=True))}
    every = range(len(OFFSETS))

    def choose(usable, examples: float, earlier: float = 0.0, **changes: float) -> int:
        return Evidence(variance=earlier).add(notes | changes, examples).choose_move(usable, 0)

    assert choose(every, 100) == 2  # the standard error is √100
    assert choose(every, 100, **{NOTES[1]: 91.0}) == 1
    assert choose(every, 36, **{NOTES[1]: 91.0}) == 2
    assert choose(every, 100, earlier=10_000.0) == 1
    assert choose([0, 4], 100) == 4  # those that are not finite are not asked
    assert choose([], 100) == 0


def test_fits_without_one_example_are_evidence_unless_all_steps_fit_the_same():
    notes = {"prior": 0.0, "fitted": 64.0, "judged": 36.0, **dict.fromkeys(NOTES, 1.0)}
    nobody = ExampleStream((), READOUT, 0)
    assert Solve(0, 1e-2, nobody)._add_evidence(notes).variance == 100.0
    assert Solve(0, 1e-2, nobody, nobody)._add_evidence(notes).variance == 36.0


def test_no_move_is_taken_that_does_not_help_on_unfitted_examples():
    engine = LinearEngine(3000)
    engine.labels = np.random.default_rng(1).integers(CLASSES, size=3000)  # nothing to learn
    method = Solve(0, 1e-2, stream(engine, 0, 96), stream(engine, 96, 3000))
    records = run(engine, method, 6)
    for record in records:
        accepted = not record.update.empty
        assert accepted == (record.notes["gain"] > solve.HELD_OUT_MARGIN * record.notes["gain_error"])
    assert abs(engine.weights).max() < 0.5


def test_it_ends_when_moves_no_longer_help():
    engine = LinearEngine(3000)
    method = Solve(0, 1e-2, stream(engine, 0, 200), stream(engine, 200, 1000), directions=36)
    records = run(engine, method, 25)
    assert "stopped helping" in method.finished and records[0].notes["gain"] > 10 * records[-1].notes["gain_error"]


def test_what_it_remembers_follows_from_the_records():
    engine = LinearEngine(3000)
    method = Solve(3, 1e-2, stream(engine, 0, 3000))
    records = run(engine, method, 5)
    again = Solve(3, 1e-2, stream(engine, 0, 3000))
    for record in records:
        again.observe(parse_record(json.loads(json.dumps(encode_record(record)))))
    assert again == method
    assert next(again.step(5)) == next(method.step(5))


def test_fitted_and_judging_examples_are_different_ones():
    engine = LinearEngine(3000)
    method = Solve(0, 1e-2, stream(engine, 0, 3000))
    questions = method.step(0)
    fitted = next(questions)
    judged = questions.send(engine.score(fitted))
    assert not {p.ids for p in fitted.batch.prompts} & {p.ids for p in judged.batch.prompts}
    assert fitted.probes[0].terms == () == judged.probes[0].terms
    assert len(judged.probes) == 1 + len(OFFSETS)


def test_scores_that_are_not_finite_leave_out_a_direction_or_skip_the_step():
    engine = LinearEngine(300)
    method = Solve(0, 1e-2, stream(engine, 0, 300), directions=4, examples=50)
    questions = method.step(0)
    scores = engine.score(next(questions))
    scores[2] = np.nan
    tried = questions.send(scores)
    assert len(tried.probes[1].terms) == 3
    questions = method.step(0)
    next(questions)
    scores[0] = np.nan
    with pytest.raises(StopIteration) as end:
        questions.send(scores)
    assert end.value.value.skipped and end.value.value.update.empty
    method.observe(end.value.value)
    assert method.eps == 1e-2 / 4 and method.spent == method.cost(end.value.value)


def answer_step(method: Solve, engine: LinearEngine, change) -> StepRecord:
    """A first step whose scores of the moves, [1 + moves, B, C], are changed before the method sees them."""
    questions = method.step(0)
    tried = questions.send(engine.score(next(questions)))
    with pytest.raises(StopIteration) as end:
        questions.send(change(engine.score(tried)))
    return end.value.value


def test_moves_that_are_not_finite_are_never_chosen(monkeypatch):
    monkeypatch.setattr(evidence, "DOUBT", 0.0)
    engine = LinearEngine(3000)
    usual = answer_step(Solve(0, 1e-2, stream(engine, 0, 3000)), engine, lambda scores: scores)
    taken = max(range(len(OFFSETS)), key=lambda index: usual.notes[NOTES[index]])

    def spoil(scores: np.ndarray) -> np.ndarray:
        scores[1 + taken, 0] = np.nan
        return scores

    spoilt = answer_step(Solve(0, 1e-2, stream(engine, 0, 3000)), engine, spoil)
    assert not spoilt.update.empty and spoilt.update != usual.update
    assert spoilt.notes["ridge"] != usual.notes["ridge"] and math.isfinite(spoilt.notes["gain"])


def test_a_step_without_finite_moves_moves_nothing_and_is_no_evidence_of_the_end():
    engine = LinearEngine(3000)
    method = Solve(0, 1e-2, stream(engine, 0, 3000))
    record = answer_step(method, engine, lambda scores: np.concatenate([scores[:1], scores[1:] * np.nan]))
    assert record.update.empty and record.notes["gain"] == 0.0
    again = parse_record(json.loads(json.dumps(encode_record(record))))
    method.observe(again)
    usual = answer_step(Solve(0, 1e-2, stream(engine, 0, 3000)), engine, lambda scores: scores)
    for _ in range(9):
        method.observe(usual)
    assert not method.finished and math.isfinite(method._share)


def test_moves_that_are_not_finite_count_as_harm():
    gains = np.array([[1.0, 2.0, 3.0], [1.0, 2.5, 2.0], [np.nan, 1.0, 1.0]])
    first, second, broken = weigh_gains(gains)
    assert broken == -3.0 < 0.0 < second < first
    assert weigh_gains(gains * np.nan) == [-3.0] * 3


@pytest.mark.parametrize("gains", [np.array([[0.4, 0.2], [np.nan, 1.0]]), np.full((5, 1), 0.3), np.zeros((2, 4))])
def test_one_step_cannot_outweigh_all_others(gains):
    """Where nothing tells moves apart, differences between them are no unit."""
    assert max(map(abs, weigh_gains(gains))) <= gains.shape[1] / evidence.LEAST_SPREAD


def end_of(gain: float, error: float, held_out: bool) -> str:
    """What the method says after ten steps with that gain."""
    engine = LinearEngine(200)
    method = Solve(0, 1e-2, stream(engine, 0, 100), stream(engine, 100, 200) if held_out else None)
    record = run(engine, method, 1)[0]
    method = replace(method)  # without its memory
    for _ in range(solve.LAST_STEPS):
        method.observe(replace(record, losses=(1.0,), notes=record.notes | {"gain": gain, "gain_error": error}))
    return method.finished


def test_the_end_is_certain_where_training_examples_judge():
    assert end_of(0.0, 0.001, held_out=False) and not end_of(0.0, 0.1, held_out=False)
    assert end_of(0.0, 0.1, held_out=True)  # each of its moves had to gain something
    assert not end_of(0.1, 0.001, held_out=False) and not end_of(0.1, 0.001, held_out=True)


def test_shorter_moves_than_those_tried_gain_less_and_old_evidence_fades():
    notes = {"prior": 0.0, **{name: 10.0 + offset for name, offset in zip(NOTES, OFFSETS, strict=True)}}
    first = Evidence().add(notes, 0)
    assert first.gains[-3] == 8.0 / 4 and first.gains[-4] == 8.0 / 16 and first.gains[3] == first.gains[2] == 12.0
    assert first.add(notes | dict.fromkeys(NOTES, 0.0), 0).gains[0] == (1 - evidence.FORGET) * 10.0


def test_examples_that_all_steps_have_fitted_are_not_asked_without_themselves(monkeypatch):
    """Where dev examples judge, a run fits all training examples in every step."""
    engine, asked = LinearEngine(400), []
    left_out = solve.ScoreModel.left_out_gains
    monkeypatch.setattr(solve.ScoreModel, "left_out_gains", lambda *args: asked.append(1) or left_out(*args))
    for held_out, later in ((None, len(OFFSETS)), (stream(engine, 200, 400), 0)):
        method = Solve(0, 1e-2, stream(engine, 0, 200), held_out)
        counts = []
        for step in range(2):
            asked.clear()
            record = answer_questions(questions := method.step(step), next(questions), engine.score)
            method.observe(record)
            counts.append(len(asked))
        assert counts == [len(PRIORS) + later, later]


def test_a_move_that_clearly_does_harm_is_refused():
    engine = LinearEngine(3000)

    def worsen(scores: np.ndarray) -> np.ndarray:
        return np.concatenate([scores[:1], np.roll(5 * scores[1:], 1, axis=-1)])

    record = answer_step(Solve(0, 1e-2, stream(engine, 0, 3000)), engine, worsen)
    assert record.update.empty and record.notes["gain"] < solve.FRESH_MARGIN * record.notes["gain_error"]


def test_the_ridge_follows_the_evidence_of_all_steps():
    """A step in which luck favours long moves does not outweigh what many steps have shown."""
    engine = LinearEngine(3000)
    method = Solve(0, 1e-2, stream(engine, 0, 3000))
    records = run(engine, method, 6)
    middle = int(records[-1].notes["prior"])
    lucky = {name: 5.0 * offset for name, offset in zip(NOTES, OFFSETS, strict=True)}
    method.observe(replace(records[-1], notes={**records[-1].notes, **lucky}))
    questions = method.step(6)
    tried = questions.send(engine.score(next(questions)))
    assert len(tried.probes) == 1 + len(OFFSETS)
    with pytest.raises(StopIteration) as end:
        questions.send(engine.score(tried))
    assert end.value.value.notes["prior"] == middle


def test_examples_of_earlier_steps_keep_moves_from_following_the_noise_of_their_own():
    """Steps of the same size then end nearer to the best weights, as the average of many steps would."""
    excess = []
    for weight in (0.0, solve.EARLIER):
        losses = []
        for seed in range(4):
            engine = LinearEngine(6000, seed)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(solve, "EARLIER", weight)  # by itself
                patch.setattr(solve, "DAMPING", 0)
                patch.setattr(evidence, "DOUBT", 0.0)
                run(engine, Solve(seed, 1e-2, stream(engine, 0, 5000), directions=24, examples=48), 20)
            losses.append(loss_on(engine, 5000, 6000))
        excess.append(float(np.mean(losses)))
    assert excess[1] < excess[0]


def test_earlier_examples_are_those_that_moved_the_weights_and_no_more_than_there_are():
    engine = LinearEngine(200)
    method = Solve(0, 1e-2, stream(engine, 0, 200), examples=50)
    assert method._earlier_weight(50) == 0.0
    record = run(engine, method, 1)[0]
    assert not record.update.empty and method._earlier_weight(50) == solve.EARLIER * 1.0
    method.observe(replace(record, update=Update()))
    assert method._earlier_weight(50) == solve.EARLIER * 1.0
    for _ in range(9):
        method.observe(record)
    assert method._earlier_weight(50) == solve.EARLIER * 3.0


def test_labels_by_chance_lead_to_short_moves():
    """Where nothing can be learned, examples that were not fitted say so, although the fitted ones promise something."""
    moved = []
    for known in (True, False):
        engine = LinearEngine(3000)
        if not known:
            engine.labels = np.random.default_rng(1).integers(CLASSES, size=3000)
        records = run(engine, Solve(0, 1e-2, stream(engine, 0, 3000)), 6)
        moved.append(float(np.linalg.norm(engine.weights)))
    assert all(record.notes["expected"] > 0 for record in records)
    assert moved[1] < 0.05 * moved[0]


@pytest.mark.parametrize(("train", "held_out"), [(5000, 0), (96, 96), (32, 32), (20, 2), (3, 0), (1, 1), (700, 80)])
def test_steps_grow_and_fit_the_data(train, held_out):
    sizes = [plan_step(solve.FIRST_EXAMPLES * solve.GROWTH**step, train, held_out) for step in range(40)]
    assert all(1 <= size.fitted <= train and size.judged >= 1 for size in sizes)
    assert all(size.judged <= (held_out or max(1, train - size.fitted)) for size in sizes)
    costs = [size.forwards for size in sizes]
    assert costs == sorted(costs)
    assert all(solve.LEAST_DIRECTIONS <= size.directions <= solve.MOST_DIRECTIONS for size in sizes)


def test_sizes_can_be_fixed():
    size = plan_step(1e9, 5000, 0, directions=5, fitted=17)
    assert (size.directions, size.fitted) == (5, 17)


def test_the_width_of_the_difference_follows_the_change_of_scores():
    method = Solve(0, 1e-3, ExampleStream((), READOUT, 0))
    notes = {
        "forwards": 1,
        "directions": 1,
        "fitted": 1,
        "judged": 1,
        "gain": 0.1,
        "gain_error": 0.1,
        "expected": 0.2,
        "change": 0.012,
    }
    notes |= {"prior": -4, **dict.fromkeys(NOTES, 0.0)}
    record = StepRecord(0, (1.0,), (), Update(), 0.0, notes=notes)
    method.observe(record)
    assert method.eps == 4e-3
    method.observe(replace(record, notes=notes | {"change": 0.2}))
    assert method.eps == 2e-3
    method.observe(replace(record, notes=notes | {"change": 0.0}))
    assert method.eps == 8e-3
