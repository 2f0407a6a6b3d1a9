"""Schedules, optimizers, batches, estimators and configuration: what needs no model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.config import flatten, from_file, from_mapping
from mezzo.errors import ConfigError
from mezzo.method.batches import make_batches, take_indices
from mezzo.method.estimators import Spsa
from mezzo.method.method import EstimatorMethod, answer_questions
from mezzo.method.noise import step_seed
from mezzo.method.objectives import OBJECTIVES, ScoreObjective, cross_entropy
from mezzo.method.optimizers import LARGEST, Sgd, schedule
from mezzo.types import Batch, PairRule, Probe, Prompt, Question, Readout, Slope, StepRecord, Update


def test_schedules_with_and_without_warmup():
    assert [schedule("constant", 2.0, 4)(s) for s in range(4)] == [2.0] * 4
    assert [schedule("linear", 2.0, 4)(s) for s in range(4)] == [2.0, 1.5, 1.0, 0.5]
    assert [schedule("cosine", 2.0, 4)(s) for s in range(4)] == pytest.approx(
        [1 + math.cos(math.pi * s / 4) for s in range(4)]
    )
    warm = schedule("linear", 1.0, 10, warmup=4)
    assert [warm(s) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert warm(9) == pytest.approx(1 / 6)
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        schedule("linaer", 1.0, 10)
    with pytest.raises(ConfigError, match="warmup"):
        schedule("linear", 1.0, 10, warmup=11)


def test_sgd_averages_slopes_clips_and_decays():
    update = Sgd(lambda _: 0.1, weight_decay=0.5, clip=2.0).update([Slope(7, 8.0), Slope(9, -1.0)], 0)
    assert update.terms == ((7, float(np.float32(0.1 * 2.0 / 2))), (9, float(np.float32(-0.1 / 2))))
    assert update.keep == float(np.float32(0.95))


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 80), st.integers(0, 200))
def test_batches_are_deterministic_and_an_epoch_has_each_example_once(seed, count, size, step):
    assert take_indices(seed, step * size, count, size) == take_indices(seed, step * size, count, size)
    stream = [i for s in range(step, step + 2 * count) for i in take_indices(seed, s * size, count, size)]
    first = -(step * size) % count
    epoch = stream[first : first + count]
    assert sorted(epoch) == list(range(count))


def test_data_smaller_than_a_batch_is_used_completely():
    prompts = [Prompt((i,), label=0) for i in range(5)]
    batch = make_batches(prompts, Readout("words", words=(1,)), 0, 64)(3)
    assert sorted(p.ids[0] for p in batch.prompts) == list(range(5))


def test_spsa_probes_come_in_pairs_and_give_slopes():
    estimator = Spsa(seed=3, eps=0.5, samples=2)
    probes = estimator.ask(11)
    seeds = [step_seed(3, 11, sample) for sample in (0, 1)]
    assert [p.terms for p in probes] == [
        ((seeds[0], 0.5),),
        ((seeds[0], -0.5),),
        ((seeds[1], 0.5),),
        ((seeds[1], -0.5),),
    ]
    assert estimator.tell(probes, np.array([3.0, 1.0, 0.0, 4.0])) == (Slope(seeds[0], 2.0), Slope(seeds[1], -4.0))
    for invalid in ({"eps": 0.0}, {"eps": 1.0, "samples": 0}):
        with pytest.raises(ConfigError):
            Spsa(seed=0, **invalid)


def test_tables_and_options_of_the_same_name_do_not_collide(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('model = "./x"\n[task]\ntask = "rte"\nk = 3\n[space]\nrank = 2\n')
    merged = {**from_file(path), "task": "sst-2", "space": "lora"}
    config = from_mapping(merged)
    assert (config.task, config.k, config.space, config.rank, config.model) == ("sst-2", 3, "lora", 2, "./x")
    with pytest.raises(ConfigError, match=r"unknown option 'space\.lr': lr belongs to the table \[method\]"):
        flatten({"space": {"lr": 1}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"lr": "nan"}, "lr must be a finite number"),
        ({"lr": -1}, "lr must be at least 0"),
        ({"alpha": float("nan")}, "alpha must be a finite number"),
        ({"alpha": 0}, "alpha must be positive"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"data_seed": -1}, "data_seed must be at least 0"),
        ({"seed": 2**63}, "seed must be at most"),
        ({"words": "good"}, "words are pairs such as negative=bad,positive=good"),
        ({"noise": "lowrang"}, "did you mean 'lowrank'"),
        ({"remote_code": "maybe"}, "remote_code must be true or false"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"targets": 3}, "targets must be a list of words"),
    ],
)
def test_invalid_values_are_explained(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(values)


class NormalizedSgd:
    """An optimizer with state: it divides slopes by the root of their running mean square."""

    def __init__(self) -> None:
        self.lr, self.mean_square = (lambda step: 0.1), 0.0

    def update(self, slopes, step):
        size = math.sqrt(self.mean_square) or 1.0
        return Update(tuple((s.seed, float(np.float32(self.lr(step) * s.value / size))) for s in slopes))

    def pair_rule(self, step, spread):
        return None  # the device does not have the state

    def observe(self, record):
        self.mean_square = 0.9 * self.mean_square + 0.1 * sum(g * g for g in record.slopes)


def make_method(optimizer) -> EstimatorMethod:
    batch = Batch((Prompt((1,), label=0, position=0),) * 2, Readout("words", words=(3, 4)))
    return EstimatorMethod(OBJECTIVES["cross_entropy"], Spsa(seed=3, eps=0.5), optimizer, lambda step: batch)


def answer(question: Question) -> np.ndarray:
    """Scores that depend on the probes alone."""
    rng = np.random.default_rng([seed % 2**32 for probe in question.probes for seed, _ in probe.terms])
    return rng.normal(size=(len(question.probes), 2, 2)).astype(np.float32)


def run_steps(method: EstimatorMethod, first: int, last: int) -> list[StepRecord]:
    records = []
    for step in range(first, last):
        questions = method.step(step)
        records.append(answer_questions(questions, next(questions), answer))
        method.observe(records[-1])
    return records


def test_optimizer_state_is_rebuilt_from_records_on_resume():
    uninterrupted = run_steps(make_method(NormalizedSgd()), 0, 8)
    resumed = make_method(NormalizedSgd())
    for record in uninterrupted[:5]:
        resumed.observe(record)
    assert run_steps(resumed, 5, 8) == uninterrupted[5:]
    assert run_steps(make_method(NormalizedSgd()), 5, 8) != uninterrupted[5:], (
        "the test needs an optimizer whose state matters"
    )


def test_only_steps_that_a_device_can_run_have_a_device_step():
    step = make_method(Sgd(lambda _: 0.1, clip=2.0)).device_step(4)
    assert step is not None and step.rule == PairRule(1.0, 0.1, 2.0, 1.0) and step.probes == Spsa(3, 0.5).ask(4)
    assert make_method(NormalizedSgd()).device_step(4) is None
    for objective in (OBJECTIVES["accuracy"], ScoreObjective(cross_entropy)):
        assert replace(make_method(Sgd(lambda _: 0.1)), objective=objective).device_step(4) is None
    two_samples = replace(make_method(Sgd(lambda _: 0.1)), estimator=Spsa(3, 0.5, samples=2))
    assert two_samples.device_step(4) is None


def test_method_may_ask_several_questions_in_a_step():
    def step():
        first = yield Question(Batch((), Readout("words")), (Probe(),))
        second = yield Question(Batch((), Readout("words")), (Probe(((1, first),)),))
        return StepRecord(0, (second,), (), Update(), 0.0)

    asked_probes = []

    def reply(question: Question) -> float:
        asked_probes.append(question.probes)
        return float(len(asked_probes))

    questions = step()
    record = answer_questions(questions, next(questions), reply)
    assert record.losses == (2.0,) and asked_probes == [(Probe(),), (Probe(((1, 1.0),)),)]


def test_nonfinite_losses_and_updates_skip_the_step():
    method = make_method(Sgd(lambda _: 1e300))
    assert method.conclude(0, np.array([np.nan, 1.0])).skipped and method.conclude(0, np.array([2.0, 1.0])).skipped
    assert method.conclude(0, np.array([2.0, 1.0])).update.empty


@pytest.mark.parametrize(("dtype", "largest"), LARGEST.items())
def test_updates_that_the_weights_cannot_hold_are_not_finite(dtype, largest):
    assert largest == float(torch.finfo(getattr(torch, dtype)).max)
    optimizer = Sgd(lambda _: 1.0, largest=largest)
    assert optimizer.update([Slope(7, largest)], 0).terms == ((7, largest),)
    for slopes in ([Slope(7, 1.001 * largest)], [Slope(7, 1.2 * largest), Slope(9, -1.2 * largest)]):
        assert not any(math.isfinite(coef) for _, coef in optimizer.update(slopes, 0).terms)
    assert math.isfinite(optimizer.update([Slope(7, largest), Slope(9, -largest)], 0).terms[0][1])
    assert math.isinf(Sgd(lambda _: 1.0, weight_decay=2.0 * largest, largest=largest).update([Slope(7, 1.0)], 0).keep)
