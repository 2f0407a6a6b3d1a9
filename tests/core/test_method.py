"""Schedules, clipping, batches, estimator, configuration: the parts of the method that need no model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.config import flatten, from_file, from_mapping
from mezzo.errors import ConfigError
from mezzo.method.batches import batch_indices, batches_of
from mezzo.method.estimators import Spsa
from mezzo.method.noise import step_seed
from mezzo.method.optimizers import Sgd, schedule
from mezzo.types import Prompt, Readout, Slope


def test_schedules():
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


def test_updates_average_clip_and_decay():
    update = Sgd(lambda _: 0.1, weight_decay=0.5, clip=2.0).step([Slope(7, 8.0), Slope(9, -1.0)], 0)
    assert update.terms == ((7, float(np.float32(0.1 * 2.0 / 2))), (9, float(np.float32(-0.1 / 2))))
    assert update.keep == float(np.float32(0.95))


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 80), st.integers(0, 200))
def test_batches_are_a_pure_function_and_every_epoch_shows_each_example_once(seed, count, size, step):
    assert batch_indices(seed, step, count, size) == batch_indices(seed, step, count, size)
    stream = [i for s in range(step, step + 2 * count) for i in batch_indices(seed, s, count, size)]
    first = -(step * size) % count
    epoch = stream[first : first + count]
    assert sorted(epoch) == list(range(count))


def test_a_set_smaller_than_a_batch_is_used_whole():
    prompts = [Prompt((i,), label=0) for i in range(5)]
    batch = batches_of(prompts, Readout("words", words=(1,)), 0, 64)(3)
    assert sorted(p.ids[0] for p in batch.prompts) == list(range(5))


def test_spsa_asks_in_pairs_and_tells_slopes():
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
    for wrong in ({"eps": 0.0}, {"eps": 1.0, "samples": 0}):
        with pytest.raises(ConfigError):
            Spsa(seed=0, **wrong)


def test_tables_and_options_of_one_name_do_not_collide(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('model = "x"\n[task]\ntask = "rte"\nk = 3\n[space]\nrank = 2\n')
    merged = {**from_file(path), "task": "sst-2", "space": "lora"}
    config = from_mapping(merged)
    assert (config.task, config.k, config.space, config.rank, config.model) == ("sst-2", 3, "lora", 2, "x")
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
def test_bad_values_are_explained(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(values)
