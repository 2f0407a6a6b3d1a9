"""Stochastic rounding: unbiased to the last bit, exact on what the type can hold, one function in NumPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.engines.torch.weights.rounding import store
from mezzo.method import noise, rounding
from mezzo.types import Update

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
KNOWN_BITS = [23519, 18139, 53030, 42084]
KNOWN = {"bfloat16": ["0x3dcd", "0xbdcd", "0x3587", "0xc040"], "float16": ["0x2e66", "0xae66", "0x11", "0xc200"]}


def by_torch(values: np.ndarray, random: np.ndarray, dtype: str) -> np.ndarray:
    target = torch.empty(len(values), dtype=TYPES[dtype])
    store(target, torch.from_numpy(values.copy()), torch.from_numpy(random.copy().view(np.uint8)))
    return target.view(torch.int16).numpy().view(np.uint16)


def test_known_answers():
    """These values are the format: a change here breaks every journal of sixteen-bit weights."""
    assert rounding.VERSION == "stochastic16/1"
    bits = rounding.bits(1, "a", 2, 6)
    assert bits.tolist() == KNOWN_BITS
    values = np.array([0.1, -0.1, 1e-6, -3.0], dtype=np.float32)
    for dtype, expected in KNOWN.items():
        assert [hex(p) for p in rounding.rounded(values, bits, dtype)] == expected
    stream = noise.words(1, "a/round", 0, 2).view("<u2")
    np.testing.assert_array_equal(bits, stream[2:6])
    assert rounding.seed_of(Update(((7, 0.0), (9, 1.0)))) == 7


@pytest.mark.parametrize("dtype", rounding.SHORT)
def test_what_the_type_can_hold_stays(dtype):
    patterns = EVERY[np.isfinite(rounding.widened(EVERY, dtype))]
    values = rounding.widened(patterns, dtype)
    expected = torch.from_numpy(values).to(TYPES[dtype]).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(patterns, expected)  # `widened` is what torch means by the type
    for random in (0, 1, 40_000, 65_535):
        bits = np.full(len(values), random, dtype=np.uint16)
        np.testing.assert_array_equal(rounding.rounded(values, bits, dtype), patterns)
        np.testing.assert_array_equal(by_torch(values, bits, dtype), patterns)


@pytest.mark.parametrize("dtype", rounding.SHORT)
@pytest.mark.parametrize(
    "value", [0.1, -0.02, 1.0 + 2**-20, 3e-5, -7e-7, 6.1e-5, 2**-14 - 2**-26, 1e-9, 60_001.0, -0.999999]
)
def test_the_average_is_the_value(dtype, value):
    """Over all sixteen-bit numbers: two neighbours at most, and their mean is the value (to 2⁻¹⁶ of their distance)."""
    exact = np.float32(value)
    found = rounding.widened(rounding.rounded(np.full(2**16, exact), EVERY, dtype), dtype).astype(np.float64)
    low, high = found.min(), found.max()
    assert low <= exact <= high
    nearest = torch.tensor(float(exact)).to(TYPES[dtype]).item()
    assert nearest in (low, high)
    assert len(np.unique(found)) <= 2
    assert abs(found.mean() - float(exact)) <= (high - low) * 2**-16


@pytest.mark.parametrize("dtype", rounding.SHORT)
@given(st.integers(0, 2**32 - 1))
def test_torch_is_the_same_function(dtype, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**32, size=300, dtype=np.uint32).view(np.float32)  # every exponent
    values[np.isnan(values)] = np.nan
    values[:200] = rng.normal(0, 0.02, 200)
    values[290:] = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0] * 2)
    values[200:220] = rng.normal(0, 1e-6, 20)
    random = rng.integers(0, 2**16, size=300, dtype=np.uint16)
    expected = rounding.rounded(values, random, dtype)
    found = by_torch(values, random, dtype)
    real = ~np.isnan(values)
    np.testing.assert_array_equal(found[real], expected[real])
    assert np.isnan(rounding.widened(found[~real], dtype)).all()


def test_bits_of_pieces_are_those_of_the_whole():
    whole = rounding.bits(5, "w", 0, 1000)
    pieces = [rounding.bits(5, "w", a, b) for a, b in ((0, 3), (3, 501), (501, 1000))]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert abs(np.corrcoef(whole, rounding.bits(5, "v", 0, 1000))[0, 1]) < 0.15
    assert abs(np.corrcoef(whole, rounding.bits(6, "w", 0, 1000))[0, 1]) < 0.15
