"""Kernels that perturb and update a flat buffer, and perturb a matrix along several directions. Their noise is generated in
registers and never written to memory.

Launched without fused multiply-add, they round as plain torch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import words_on
from mezzo.engines.torch.gpu.kernels import philox, rounding
from mezzo.engines.torch.gpu.kernels.philox import CHUNK
from mezzo.engines.torch.gpu.kernels.rounding import FLOAT32
from mezzo.engines.torch.weights.noise import ALIGN
from mezzo.method import noise
from mezzo.method.rounding import stream_name


def chunk_table(sizes: Sequence[tuple[str, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """For every chunk of a flat buffer of (name, elements): the keys of its tensor, and its number within that tensor."""
    keys: list[int] = []
    numbers: list[int] = []
    for name, count in sizes:
        chunks = -(-count // ALIGN)
        keys += [noise.name_hash(name), noise.name_hash(stream_name(name))] * chunks
        numbers += range(chunks)
    return words_on(device, keys), torch.tensor(numbers, dtype=torch.int64, device=device)


@triton.jit
def _program_chunks(keys, numbers, count, FLAT: tl.constexpr, CHUNKS: tl.constexpr):
    """The chunks of this program: the offsets of their elements, which of these exist, and each chunk's keys and number.

    FLAT: keys[chunk, 2] and numbers[chunk] describe every chunk of a flat buffer; else keys[2] are those of one matrix.
    """
    place = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    offset = place[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    # One key per chunk even where all are equal: Triton then generates the noise of a chunk in one thread and shares it,
    # where from a scalar key it would generate it again in every thread of the chunk.
    exists = place * CHUNK < count
    key_pair = keys + 2 * place if FLAT else keys + 0 * place
    key = tl.load(key_pair, mask=exists, other=0).to(tl.uint64, bitcast=True)
    rounding_key = tl.load(key_pair + 1, mask=exists, other=0).to(tl.uint64, bitcast=True)
    number = tl.load(numbers + place, mask=exists, other=0).to(tl.uint64) if FLAT else place.to(tl.uint64)
    return offset, offset < count, key, rounding_key, number


@triton.jit
def perturb(value, out, count, keys, numbers, seeds, scales, table, terms, MEMBERS: tl.constexpr,
            SINGLE: tl.constexpr, KIND: tl.constexpr, FLAT: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """out[m] = θ + Σ scale[m, k]·z(seed k). θ is read once for all members, and the noise of a single seed is generated once.

    The number of terms is an argument, so that one compiled kernel serves every move of many terms.
    """
    offset, mask, key, _, number = _program_chunks(keys, numbers, count, FLAT, CHUNKS)
    theta = tl.load(value + offset, mask=mask, other=0).to(tl.float32)
    if SINGLE:
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        z = philox.scaled_noise(1.0, seed, key, number, table, KIND, CHUNKS)
        for member in tl.static_range(MEMBERS):
            perturbed = theta + tl.load(scales + member) * z
            tl.store(out + member * count + offset, perturbed.to(out.dtype.element_ty), mask=mask)
    else:
        for member in range(MEMBERS):
            perturbed = theta
            for term in range(terms):
                scale = tl.load(scales + member * terms + term)
                if scale != 0.0:  # members of which each has a direction of its own
                    seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
                    perturbed += philox.scaled_noise(scale, seed, key, number, table, KIND, CHUNKS)
            tl.store(out + member * count + offset, perturbed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def update(value, count, keys, numbers, seeds, coefs, table, terms, KIND: tl.constexpr, DECAY: tl.constexpr,
           DTYPE: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """θ ← fl(keep·θ), then θ ← fl(θ − fl(c·z)) term by term, in place. coefs[0] is keep."""
    offset, mask, key, rounding_key, number = _program_chunks(keys, numbers, count, True, CHUNKS)
    acc = rounding.to_float32(tl.load(value + offset, mask=mask, other=0), DTYPE)
    if DECAY:
        acc = acc * tl.load(coefs)
    for term in range(terms):
        seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
        coef = tl.load(coefs + 1 + term)
        step = philox.scaled_noise(coef, seed, key, number, table, KIND, CHUNKS)
        acc = tl.where(coef != 0.0, acc - step, acc)  # −0 − (−0) is +0
    if DTYPE == FLOAT32:
        tl.store(value + offset, acc, mask=mask)
    else:
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        random = philox.lanes(seed, rounding_key, number, CHUNKS)
        tl.store(value + offset, rounding.round_stochastic(acc, random, DTYPE), mask=mask)
