"""Noise is a pure function: NumPy's Philox, known values, moments, independent streams, slices that equal the whole."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.engines.torch.weights import noise as torch_noise
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.method import noise

KNOWN_WORDS = ["0x77e198359216f7f8", "0x35525fc4d1252dbd", "0x1dbce9aff6a2075e", "0x87cece0b0f6b92f2"]
KNOWN_SIGNS = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0]
KNOWN_NORMALS = [1.8612985610961914, 0.17813092470169067, 0.2394440770149231, -0.0793459489941597]
KNOWN_SEED = "0x3f664a05fa00854a"
KNOWN_PRODUCT = [[2.0, 2.0], [-2.0, -2.0], [2.0, 2.0]]
SEEDS = st.integers(0, 2**64 - 1)


@given(SEEDS, st.text(max_size=20), st.integers(0, 300), st.integers(0, 300))
def test_words_equal_numpys_philox(seed, name, start, length):
    key = np.array([seed, noise.name_hash(name)], dtype=np.uint64)
    expected = np.random.Philox(key=key).random_raw(start + length)[start:]
    np.testing.assert_array_equal(noise.words(seed, name, start, start + length), expected)


def test_values_of_the_format():
    """These values are part of the file format: changing them breaks every existing journal."""
    assert noise.VERSION == "philox4x64-10/1"
    assert noise.name_hash("a") == int.from_bytes(hashlib.blake2b(b"a", digest_size=8).digest(), "little")
    assert [hex(word) for word in noise.words(1, "a", 0, 4)] == KNOWN_WORDS
    assert noise.dense("rademacher", 1, "a", 0, 12).tolist() == KNOWN_SIGNS
    np.testing.assert_array_equal(noise.dense("gaussian", 1, "a", 0, 4), np.array(KNOWN_NORMALS, dtype=np.float32))
    assert hex(noise.step_seed(0, 0, 0)) == KNOWN_SEED
    left, right = noise.factors(1, "a", (3, 2), 2)
    assert (left @ right.T).tolist() == KNOWN_PRODUCT


@pytest.mark.parametrize("kind", noise.KINDS)
@given(SEEDS, st.integers(1, 400), st.data())
def test_concatenated_slices_equal_the_whole(kind, seed, count, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    edges = [0, *cuts, count]
    slices = [noise.dense(kind, seed, "w", a, b) for a, b in itertools.pairwise(edges)]
    np.testing.assert_array_equal(np.concatenate(slices), noise.dense(kind, seed, "w", 0, count))


@pytest.mark.parametrize("kind", noise.KINDS)
def test_moments_are_those_of_the_distribution(kind):
    z = noise.dense(kind, 5, "w", 0, 1_000_000).astype(np.float64)
    assert abs(z.mean()) < 4e-3
    assert abs(z.var() - 1) < 5e-3
    assert abs((z**3).mean()) < 2e-2
    assert abs((z**4).mean() - (1 if kind == "rademacher" else 3)) < 5e-2


@pytest.mark.parametrize("kind", noise.KINDS)
def test_streams_are_independent(kind):
    """Tensors, seeds and neighbouring elements are uncorrelated: |r| stays within 5 standard errors."""
    n = 100_000
    base = noise.dense(kind, 5, "w", 0, n)
    others = [
        noise.dense(kind, 5, "v", 0, n),
        noise.dense(kind, 6, "w", 0, n),
        noise.dense(kind, noise.step_seed(0, 1, 0), "w", 0, n),
        noise.dense(kind, 5, "w", 1, n + 1),
        noise.dense(kind, 5, "w", n, 2 * n),
    ]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / np.sqrt(n)


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 100))
def test_step_seeds_are_distinct(run, step, sample):
    seed = noise.step_seed(run, step, sample)
    assert 0 <= seed < 2**64
    assert seed != noise.step_seed(run, step + 1, sample)
    assert seed != noise.step_seed(run, step, sample + 1)
    assert seed != noise.step_seed(run + 1, step, sample)


@pytest.mark.parametrize("longest", [2**20, 0], ids=["cached", "in-parts"])
@pytest.mark.parametrize("kind", noise.KINDS)
@pytest.mark.parametrize("shape", [(7, 5), (16, 64), (33, 24)])
def test_torch_noise_is_the_same_function(kind, shape, longest, monkeypatch):
    monkeypatch.setattr(torch_noise, "MAX_CACHED_STREAM_BYTES", longest)
    source = NoiseSource(kind, torch.device("cpu"))
    count = shape[0] * shape[1]
    whole = noise.dense(kind, 9, "w", 0, count)
    np.testing.assert_array_equal(source.dense(9, "w", count).numpy(), whole)
    ids = torch.tensor([[3, 0], [6, 3]])
    np.testing.assert_array_equal(source.rows(9, "w", shape, ids).numpy(), whole.reshape(shape)[ids.numpy()])
    for actual, expected in zip(source.factors(9, "w", shape, 3), noise.factors(9, "w", shape, 3), strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected)


def test_low_rank_products_are_integers_with_unit_variance():
    left, right = noise.factors(2, "w", (200, 300), 8)
    product = left @ right.T
    np.testing.assert_array_equal(product, np.rint(product))
    assert np.abs(product).max() <= 8
    assert abs((product / np.sqrt(8)).var() - 1) < 0.02


@given(SEEDS, st.integers(1, 500))
def test_order_is_a_permutation(seed, count):
    assert sorted(noise.order(seed, "batches", count).tolist()) == list(range(count))


def test_uniform_values_fill_the_range():
    values = noise.uniform(3, "w", 100_000, 0.25)
    assert values.min() >= -0.25
    assert values.max() < 0.25
    assert abs(values.std() - 0.25 / np.sqrt(3)) < 2e-3
