"""Stochastic rounding: unbiased to the last bit, exact on values of the type, one function in NumPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.engines.torch.weights.rounding import store_rounded
from mezzo.method import noise, rounding
from mezzo.types import Update

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
KNOWN_BITS = [23519, 18139, 53030, 42084]
KNOWN = {"bfloat16": ["0x3dcd", "0xbdcd", "0x3587", "0xc040"], "float16": ["0x2e66", "0xae66", "0x11", "0xc200"]}


def round_in_torch(values: np.ndarray, random: np.ndarray, dtype: str) -> np.ndarray:
    target = torch.empty(len(values), dtype=TYPES[dtype])
    store_rounded(target, torch.from_numpy(values.copy()), torch.from_numpy(random.copy().view(np.uint8)))
    return target.view(torch.int16).numpy().view(np.uint16)


def test_known_answers():
    """These values are the format: a change here breaks every journal of 16-bit weights."""
    assert rounding.VERSION == "stochastic16/1"
    bits = rounding.random_bits(1, "a", 2, 6)
    assert bits.tolist() == KNOWN_BITS
    values = np.array([0.1, -0.1, 1e-6, -3.0], dtype=np.float32)
    for dtype, expected in KNOWN.items():
        assert [hex(p) for p in rounding.round_stochastic(values, bits, dtype)] == expected
    stream = noise.words(1, "a/round", 0, 2).view("<u2")
    np.testing.assert_array_equal(bits, stream[2:6])
    assert rounding.first_seed(Update(((7, 0.0), (9, 1.0)))) == 7


@pytest.mark.parametrize("dtype", rounding.DTYPES)
def test_values_that_the_type_can_represent_are_unchanged(dtype):
    patterns = EVERY[np.isfinite(rounding.to_float32(EVERY, dtype))]
    values = rounding.to_float32(patterns, dtype)
    expected = torch.from_numpy(values).to(TYPES[dtype]).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(patterns, expected)  # `to_float32` is what torch means by the type
    for random in (0, 1, 40_000, 65_535):
        bits = np.full(len(values), random, dtype=np.uint16)
        np.testing.assert_array_equal(rounding.round_stochastic(values, bits, dtype), patterns)
        np.testing.assert_array_equal(round_in_torch(values, bits, dtype), patterns)


@pytest.mark.parametrize("dtype", rounding.DTYPES)
@pytest.mark.parametrize(
    "value", [0.1, -0.02, 1.0 + 2**-20, 3e-5, -7e-7, 6.1e-5, 2**-14 - 2**-26, 1e-9, 60_001.0, -0.999999]
)
def test_rounding_is_unbiased(dtype, value):
    """Over all 16-bit numbers: at most two neighbours, whose mean is the value (to 2⁻¹⁶ of their distance)."""
    exact = np.float32(value)
    found = rounding.to_float32(rounding.round_stochastic(np.full(2**16, exact), EVERY, dtype), dtype).astype(
        np.float64
    )
    low, high = found.min(), found.max()
    assert low <= exact <= high
    nearest = torch.tensor(float(exact)).to(TYPES[dtype]).item()
    assert nearest in (low, high)
    assert len(np.unique(found)) <= 2
    assert abs(found.mean() - float(exact)) <= (high - low) * 2**-16


@pytest.mark.parametrize("dtype", rounding.DTYPES)
@given(st.integers(0, 2**32 - 1))
def test_torch_rounds_like_numpy(dtype, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**32, size=300, dtype=np.uint32).view(np.float32)  # every exponent
    values[np.isnan(values)] = np.nan
    values[:200] = rng.normal(0, 0.02, 200)
    values[290:] = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0] * 2)
    values[200:220] = rng.normal(0, 1e-6, 20)
    random = rng.integers(0, 2**16, size=300, dtype=np.uint16)
    expected = rounding.round_stochastic(values, random, dtype)
    found = round_in_torch(values, random, dtype)
    real = ~np.isnan(values)
    np.testing.assert_array_equal(found[real], expected[real])
    assert np.isnan(rounding.to_float32(found[~real], dtype)).all()


def test_bits_of_a_slice_are_those_of_the_whole():
    whole = rounding.random_bits(5, "w", 0, 1000)
    slices = [rounding.random_bits(5, "w", a, b) for a, b in ((0, 3), (3, 501), (501, 1000))]
    np.testing.assert_array_equal(np.concatenate(slices), whole)
    assert abs(np.corrcoef(whole, rounding.random_bits(5, "v", 0, 1000))[0, 1]) < 0.15
    assert abs(np.corrcoef(whole, rounding.random_bits(6, "w", 0, 1000))[0, 1]) < 0.15
