"""The noise of `mezzo.method.noise` inside Triton kernels.

Kernels process tensors in chunks of 64 elements. A chunk of ±1 noise is one 64-bit word of the tensor's stream, a chunk of 16-bit
lanes (normal noise, rounding bits) is sixteen words. The stream is that of the tensor's key, a hash of its name, so a chunk is
identified by (seed, key, chunk number within the tensor).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Elements.
CHUNK = tl.constexpr(64)
# Kinds of noise: ±1, normal, and the product of two ±1 factors.
SIGNS, NORMALS, FACTORS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {"rademacher": SIGNS, "gaussian": NORMALS}


@triton.jit
def block(seed, key, number):
    """Four 64-bit words: block `number` of a stream, counted as NumPy counts."""
    zero = tl.zeros_like(number)
    return tl.philox_impl(number + 1, zero, zero, zero, seed, key)


@triton.jit
def word(seed, key, number):
    """One 64-bit word of a stream."""
    w0, w1, w2, w3 = block(seed, key, number // 4)
    which = number % 4
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def lanes(seed, key, chunk, CHUNKS: tl.constexpr):
    """[CHUNKS, 64] 16-bit numbers: those of whole chunks of a stream."""
    number = chunk[:, None] * 4 + tl.arange(0, 4)[None, :].to(tl.uint64)
    w0, w1, w2, w3 = block(seed, key[:, None], number)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [CHUNKS, 16])
    shift = (tl.arange(0, 4) * 16).to(tl.uint64)
    numbers = (words[:, :, None] >> shift[None, None, :]).to(tl.uint32) & 0xFFFF
    return tl.reshape(numbers, [CHUNKS, CHUNK])


@triton.jit
def popcount_bytes(bits):
    """The number of set bits in each of the four bytes of an unsigned 32-bit number."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return (bits + (bits >> 4)) & 0x0F0F0F0F


@triton.jit
def popcount(bits):
    """The number of set bits in an unsigned 32-bit number."""
    return (popcount_bytes(bits) * 0x01010101) >> 24


@triton.jit
def scaled_noise(scale, seed, key, chunk, table, KIND: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS, 64]: scale·z, rounded to float32."""
    if KIND == SIGNS:
        lane = tl.arange(0, CHUNK).to(tl.uint64)
        bit = (word(seed, key, chunk)[:, None] >> lane[None, :]) & 1
        return tl.where(bit == 0, scale, -scale)
    else:
        return scale * tl.load(table + (lanes(seed, key, chunk, CHUNKS) >> 4))


@triton.jit
def apply_signs(scale, sign_bytes, CHUNKS: tl.constexpr):
    """[CHUNKS, 64]: ±scale, by the sign bits of each chunk, sign_bytes[CHUNKS, 8]."""
    shift = (31 - tl.arange(0, 8)).to(tl.uint32)
    flip = (sign_bytes.to(tl.uint32)[:, :, None] << shift[None, None, :]) & 0x80000000
    return tl.reshape(flip ^ scale.to(tl.uint32, bitcast=True), [CHUNKS, CHUNK]).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count", "first", "words_per_row"])
def words(out, count, first, rows, words_per_row, seeds, keys, SELECT_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Words [first, first + count) of a stream; or, of a matrix with `words_per_row` words a row, those of `rows`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds).to(tl.uint64, bitcast=True)
    key = tl.load(keys).to(tl.uint64, bitcast=True)
    if SELECT_ROWS:
        row = place // words_per_row
        number = tl.load(rows + row, mask=place < count, other=0) * words_per_row + (place - row * words_per_row)
    else:
        number = place + first
    generated = word(seed, key, number.to(tl.uint64))
    tl.store(out + place, generated.to(tl.int64, bitcast=True), mask=place < count)
