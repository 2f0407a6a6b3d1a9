"""Kernels for matrices: perturb them along one direction, and update many matrices of one shape in one launch.

±1 noise comes from memory, one bit an element, where `generate_signs` wrote it just before: every word of the stream is then
generated once, and the kernels that read it are limited by bandwidth. For low-rank noise, `generate_factors` writes the signs of
each row of a factor as the bits of one number. Like those of `flat_buffer`, these kernels work on chunks of 64 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.engines.torch.gpu.kernels import philox, rounding
from mezzo.engines.torch.gpu.kernels.philox import CHUNK, FACTORS, SIGNS
from mezzo.engines.torch.gpu.kernels.rounding import FLOAT32

# Philox blocks that a program of `generate_signs` generates; the signs of a tensor begin at a multiple of it.
BLOCKS_PER_PROGRAM = 64
WORDS_PER_PROGRAM = 4 * BLOCKS_PER_PROGRAM
# Rows that a program of `generate_factors` generates; the signs of a factor begin at a multiple of it.
FACTOR_ROWS_PER_PROGRAM = 128
# Words of an entry of `update`'s table, and keys of a tensor in `perturb`.
ENTRY_WORDS, KEYS_PER_TENSOR = tl.constexpr(6), tl.constexpr(4)


@triton.jit
def generate_signs(out, term_stride, positions, seeds, BLOCKS: tl.constexpr):
    """out[k, words]: ±1 noise under seed k of several tensors; positions[program] = (key, first block)."""
    program, term = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, BLOCKS)
    key = tl.load(positions + 2 * program).to(tl.uint64, bitcast=True)
    first = tl.load(positions + 2 * program + 1).to(tl.uint64)
    seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
    w0, w1, w2, w3 = philox.block(seed, key, first + number.to(tl.uint64))
    target = out + term * term_stride + (program.to(tl.int64) * BLOCKS + number) * 4
    tl.store(target, w0.to(tl.int64, bitcast=True))
    tl.store(target + 1, w1.to(tl.int64, bitcast=True))
    tl.store(target + 2, w2.to(tl.int64, bitcast=True))
    tl.store(target + 3, w3.to(tl.int64, bitcast=True))


@triton.jit
def generate_factors(out, term_stride, positions, seeds, RANK: tl.constexpr, ROWS: tl.constexpr):
    """out[k, rows]: the RANK signs of each row of several factors under seed k, as the bits of one number."""
    program, term = tl.program_id(0), tl.program_id(1)
    key = tl.load(positions + 2 * program).to(tl.uint64, bitcast=True)
    first = tl.load(positions + 2 * program + 1).to(tl.uint64)
    seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
    row = tl.arange(0, ROWS)
    bit = (first + row.to(tl.uint64)) * RANK
    shift = bit % 64
    signs = philox.word(seed, key, bit // 64) >> shift
    if 64 % RANK != 0:  # a row may begin in one word and end in the next
        next_word = philox.word(seed, key, bit // 64 + 1) << ((64 - shift) % 64)
        signs = tl.where(shift > 64 - RANK, signs | next_word, signs)
    signs = (signs & ((1 << RANK) - 1)).to(tl.uint32)
    tl.store(out + term * term_stride + program.to(tl.int64) * ROWS + row, signs.to(out.dtype.element_ty))


@triton.jit
def perturb(value, out, count, chunks_per_matrix, signs, keys, seeds, scales, table,
            MEMBERS: tl.constexpr, KIND: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """out[m] = θ + scale[m]·z(seed), reading θ once for all members; `value` holds stacked matrices of one shape."""
    place = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    offset = place[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = offset < count
    theta = tl.load(value + offset, mask=mask, other=0).to(tl.float32)
    if KIND == SIGNS:
        byte = place[:, None] * 8 + tl.arange(0, 8)[None, :]
        sign_bytes = tl.load(signs + byte, mask=(place * CHUNK < count)[:, None], other=0)
        for member in tl.static_range(MEMBERS):
            perturbed = theta + philox.apply_signs(tl.load(scales + member), sign_bytes, CHUNKS)
            tl.store(out + member * count + offset, perturbed.to(out.dtype.element_ty), mask=mask)
    else:
        matrix = place // chunks_per_matrix
        key = tl.load(keys + matrix * KEYS_PER_TENSOR, mask=place * CHUNK < count, other=0).to(tl.uint64, bitcast=True)
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        number = (place - matrix * chunks_per_matrix).to(tl.uint64)
        z = philox.scaled_noise(1.0, seed, key, number, table, KIND, CHUNKS)
        for member in tl.static_range(MEMBERS):
            perturbed = theta + tl.load(scales + member) * z
            tl.store(out + member * count + offset, perturbed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _scaled_factor_product(scale, chunk, mask, exists, left, right, rows, width,
                           RANK: tl.constexpr, ALIGNED: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """[CHUNKS, 64]: scale·U·Vᵀ; `left` and `right` hold the signs of each row of U and V as the bits of one number.

    ALIGNED: the width of the matrix is a multiple of 64, so that a chunk lies in one row of it. Signs of at most eight columns
    are bytes, four of which are counted at once.
    """
    lane = tl.arange(0, CHUNK)[None, :]
    if ALIGNED and RANK <= 8:
        per_row = width // CHUNK
        row = chunk // per_row
        u = tl.load(left + row, mask=exists, other=0).to(tl.uint32) * 0x01010101
        four_bytes = (right + (chunk - row * per_row) * CHUNK).to(tl.pointer_type(tl.uint32))
        v = tl.load(four_bytes[:, None] + tl.arange(0, CHUNK // 4)[None, :], mask=exists[:, None], other=0)
        shift = (tl.arange(0, 4) * 8).to(tl.uint32)
        counts = philox.popcount_bytes(u[:, None] ^ v)
        differing = tl.reshape((counts[:, :, None] >> shift[None, None, :]) & 0xFF, [CHUNKS, CHUNK]).to(tl.int32)
    elif ALIGNED:
        per_row = width // CHUNK
        row = chunk // per_row
        u = tl.load(left + row, mask=row < rows, other=0).to(tl.uint32)[:, None]
        first = tl.multiple_of((chunk - row * per_row) * CHUNK, 64)
        v = tl.load(right + first[:, None] + lane, mask=mask, other=0).to(tl.uint32)
        differing = philox.popcount(u ^ v).to(tl.int32)
    else:
        first = chunk.to(tl.int64) * CHUNK
        row = first // width
        column = (first - row * width).to(tl.int32)[:, None] + lane
        rows_below = column // width
        u = tl.load(left + row[:, None] + rows_below, mask=mask, other=0).to(tl.uint32)
        v = tl.load(right + column - rows_below * width, mask=mask, other=0).to(tl.uint32)
        differing = philox.popcount(u ^ v).to(tl.int32)
    return scale * (RANK - 2 * differing).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def update(value, count, entries, seeds, coefs, table, signs, term_stride, rows, width, unit, terms,
           RANK: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr, DTYPE: tl.constexpr,
           CHUNKS: tl.constexpr):  # fmt: skip
    """θ ← fl(keep·θ), then θ ← fl(θ − fl(c·z)) term by term, in place, for matrices of `count` elements each.

    entries[matrix]: its offset from `value` in elements; the keys of its noise and of its rounding bits; the offset of its
    signs in `signs` [k, term_stride] in bytes, or those of its factors U and V in numbers. `unit` is 1/√r.
    """
    entry = entries + tl.program_id(1) * ENTRY_WORDS
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    offset = chunk.to(tl.int64)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = offset < count
    target = value + tl.multiple_of(tl.load(entry), 16) + offset
    stored = tl.load(target, mask=mask, other=0)
    # One key per chunk even though all are equal: Triton then generates the noise of a chunk in one thread and shares it,
    # where from a scalar key it would generate it again in every thread of the chunk.
    exists = chunk.to(tl.int64) * CHUNK < count
    key = tl.load(entry + 1 + 0 * chunk, mask=exists, other=0).to(tl.uint64, bitcast=True)
    acc = rounding.to_float32(stored, DTYPE)
    if DECAY:
        acc = acc * tl.load(coefs)
    for term in range(terms):
        coef = tl.load(coefs + 1 + term)
        if KIND == FACTORS:
            left = signs + term * term_stride + tl.multiple_of(tl.load(entry + 3), 64)
            right = signs + term * term_stride + tl.multiple_of(tl.load(entry + 4), 64)
            step = _scaled_factor_product(
                coef * unit, chunk, mask, exists, left, right, rows, width, RANK, ALIGNED, CHUNKS
            )
        elif KIND == SIGNS:
            first = signs + term * term_stride + tl.multiple_of(tl.load(entry + 3), 64)
            byte = chunk.to(tl.int64)[:, None] * 8 + tl.arange(0, 8)[None, :]
            step = philox.apply_signs(coef, tl.load(first + byte, mask=exists[:, None], other=0), CHUNKS)
        else:
            seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
            step = philox.scaled_noise(coef, seed, key, chunk.to(tl.uint64), table, KIND, CHUNKS)
        acc = tl.where(coef != 0.0, acc - step, acc)  # −0 − (−0) is +0
    if DTYPE == FLOAT32:
        tl.store(target, acc, mask=mask)
    else:
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        rounding_key = tl.load(entry + 2 + 0 * chunk, mask=exists, other=0).to(tl.uint64, bitcast=True)
        random = philox.lanes(seed, rounding_key, chunk.to(tl.uint64), CHUNKS)
        tl.store(target, rounding.round_stochastic(acc, random, DTYPE), mask=mask)
