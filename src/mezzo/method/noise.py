"""Noise as a pure function of (seed, tensor name, element index), the same bits on every machine.

Version 1. Every tensor has a stream of 64-bit words: Philox4x64-10 exactly as `numpy.random.Philox`, keyed by the step's
seed and a hash of the tensor's name, counted from zero. What an element takes from its stream:

- `rademacher`: one bit, element i is bit i % 64 of word i // 64; a set bit is −1.
- `gaussian`: sixteen bits, element i is lane i % 4 of word i // 4; its upper twelve bits index a table of normal
  quantiles, so that no transcendental function decides a bit.
- low rank: ±1 factors U and V from the streams `name/U` and `name/V`; z = U·Vᵀ/√r, whose integer part is exact in any
  order of summation. The 1/√r belongs to the coefficient (`factor_scale`).
"""

from __future__ import annotations

import hashlib
import math
import statistics
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mezzo.errors import ConfigError, nearest

VERSION = "philox4x64-10/1"
# The distribution of dense noise: a key of BITS.
Kind: TypeAlias = str
# Bits of the stream that one element takes.
BITS: dict[Kind, int] = {"rademacher": 1, "gaussian": 16}
KINDS: tuple[Kind, ...] = tuple(BITS)
TABLE_SHA256 = "87d2297bd6f503ad"
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Noise:
    """A choice of `--noise`: dense noise of a kind, or low-rank noise on matrices and that kind on everything else."""

    kind: Kind
    low_rank: bool = False


NOISES: dict[str, Noise] = {
    "rademacher": Noise("rademacher"),
    "gaussian": Noise("gaussian"),
    "lowrank": Noise("rademacher", low_rank=True),
}


def get_noise(name: str | None) -> Noise:
    """The noise that `--noise` names; ConfigError where there is none."""
    if name not in NOISES:
        raise ConfigError(f"unknown noise {name!r}{nearest(str(name), NOISES)} (noises: {', '.join(NOISES)})")
    return NOISES[name]


_local = threading.local()


@lru_cache(maxsize=65536)
def name_hash(name: str) -> int:
    """64 bits that stand for a tensor's name in the Philox key."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def step_seed(run_seed: int, step: int, sample: int) -> int:
    """The seed of one direction; distinct runs, steps and samples get unrelated streams."""
    packed = struct.pack("<QQQ", run_seed & 0xFFFF_FFFF_FFFF_FFFF, step, sample)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"mezzo.step").digest(), "little")


def words(seed: int, name: str, start: int, stop: int) -> Words:
    """Words [start, stop) of the tensor's stream."""
    block, skip = divmod(start, 4)
    generator = getattr(_local, "philox", None)
    if generator is None:
        generator = _local.philox = np.random.Philox(0)
    # Assigning the state costs 2 µs, constructing a generator 20 µs. NumPy increments the counter before each block,
    # so that counter = block yields block number `block` of the stream next.
    generator.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.array([block, 0, 0, 0], dtype=np.uint64),
            "key": np.array([seed, name_hash(name)], dtype=np.uint64),
        },
        "buffer": np.zeros(4, dtype=np.uint64),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    raw: Words = generator.random_raw(skip + stop - start)
    return raw[skip:]


@cache
def quantiles() -> Floats:
    """The 4,096 normal quantiles of `gaussian`, scaled to variance one."""
    half = [statistics.NormalDist().inv_cdf((index + 0.5) / 4096) for index in range(2048, 4096)]
    scale = math.sqrt(math.fsum(value * value for value in half) / 2048)
    upper = np.array([value / scale for value in half], dtype=np.float32)
    table = np.concatenate([-upper[::-1], upper])
    digest = hashlib.sha256(table.astype("<f4").tobytes()).hexdigest()
    if not digest.startswith(TABLE_SHA256):
        raise RuntimeError(
            f"the quantile table of this platform is {digest[:16]}, not {TABLE_SHA256}: noise would differ"
        )
    return table


def stream_bytes(kind: Kind, seed: int, name: str, start: int, stop: int) -> tuple[Bytes, int]:
    """The stream's bytes that hold elements [start, stop), and the index of `start` within them."""
    if kind not in BITS:
        raise ConfigError(f"there is no dense noise {kind!r}{nearest(kind, BITS)} (kinds: {', '.join(BITS)})")
    per_word = 64 // BITS[kind]
    first = start // per_word
    raw = words(seed, name, first, -(-stop // per_word))
    return raw.astype("<u8", copy=False).view(np.uint8), start - first * per_word


def dense(kind: Kind, seed: int, name: str, start: int, stop: int) -> Floats:
    """z[start:stop] of a tensor's flattened noise."""
    raw, skip = stream_bytes(kind, seed, name, start, stop)
    return _DECODERS[kind](raw, skip, skip + stop - start)


def _signs(raw: Bytes, start: int, stop: int) -> Floats:
    bits = np.unpackbits(raw, bitorder="little")[start:stop]
    return np.float32(1) - np.float32(2) * bits


def _normals(raw: Bytes, start: int, stop: int) -> Floats:
    return quantiles()[raw.view("<u2")[start:stop] >> 4]


# Packed bytes to elements [start, stop).
_DECODERS: dict[Kind, Callable[[Bytes, int, int], Floats]] = {"rademacher": _signs, "gaussian": _normals}


def factors(seed: int, name: str, shape: tuple[int, int], rank: int) -> tuple[Floats, Floats]:
    """The ±1 factors U[out, r] and V[in, r] of low-rank noise, before the scale of 1/√r."""
    out, inner = shape
    left = dense("rademacher", seed, f"{name}/U", 0, out * rank).reshape(out, rank)
    right = dense("rademacher", seed, f"{name}/V", 0, inner * rank).reshape(inner, rank)
    return left, right


def factor_scale(coefficient: float, rank: int) -> float:
    """The coefficient of U·Vᵀ that stands for `coefficient` of z: rounded to float32 twice, the same everywhere."""
    return float(np.float32(coefficient) * np.float32(1 / math.sqrt(rank))) if rank else coefficient


def uniform(seed: int, name: str, count: int, bound: float) -> Floats:
    """`count` values in [−bound, bound), for initial weights that do not depend on a library's generator."""
    top = (words(seed, name, 0, count) >> np.uint64(40)).astype(np.float32)
    return (top * np.float32(2.0**-23) - np.float32(1)) * np.float32(bound)


def order(seed: int, name: str, count: int) -> npt.NDArray[np.int64]:
    """A permutation of range(count) that depends on nothing but its arguments."""
    return np.argsort(words(seed, name, 0, count), kind="stable")
