"""The noise and the rounding of `mezzo.method` inside Triton kernels: no noise is written to memory.

Tensors are seen as rows of 64 elements, which take one word of ±1 noise, or sixteen words of sixteen-bit lanes. A row's stream
is given by its tensor's key and its number within that tensor, so that the same kernels serve one matrix and a buffer in
which many tensors lie side by side. Launched without fusing of multiplications and additions, they round as plain torch does.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW = tl.constexpr(64)
SIGNS, NORMALS, FACTORS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FLOAT32, BFLOAT16, FLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def block(seed, key, number):
    """Four words of 64 bits: block `number` of a stream, as NumPy counts them."""
    zero = tl.zeros_like(number)
    return tl.philox_impl(number + 1, zero, zero, zero, seed, key)


@triton.jit
def word(seed, key, number):
    """One word of a stream."""
    w0, w1, w2, w3 = block(seed, key, number // 4)
    which = number % 4
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def lanes(seed, key, row, R: tl.constexpr):
    """[R, 64] numbers of sixteen bits, for rows of a stream."""
    number = row[:, None] * 4 + tl.arange(0, 4)[None, :].to(tl.uint64)
    w0, w1, w2, w3 = block(seed, key[:, None], number)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [R, 16])
    shift = (tl.arange(0, 4) * 16).to(tl.uint64)
    found = (words[:, :, None] >> shift[None, None, :]).to(tl.uint32) & 0xFFFF
    return tl.reshape(found, [R, ROW])


@triton.jit
def ones_of_bytes(bits):
    """How many bits are set in each of the four bytes of an unsigned 32-bit number."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return (bits + (bits >> 4)) & 0x0F0F0F0F


@triton.jit
def ones_of(bits):
    """How many bits of an unsigned 32-bit number are set."""
    return (ones_of_bytes(bits) * 0x01010101) >> 24


@triton.jit
def scaled_noise(scale, seed, key, row, table, KIND: tl.constexpr, R: tl.constexpr):
    """[R, 64]: scale·z, rounded to float32."""
    if KIND == SIGNS:
        lane = tl.arange(0, ROW).to(tl.uint64)
        bit = (word(seed, key, row)[:, None] >> lane[None, :]) & 1
        return tl.where(bit == 0, scale, -scale)
    else:
        return scale * tl.load(table + (lanes(seed, key, row, R) >> 4))


@triton.jit
def signed(scale, signs, R: tl.constexpr):
    """[R, 64]: ±scale; `signs` [R, 8] holds the bits of a row as bytes."""
    shift = (31 - tl.arange(0, 8)).to(tl.uint32)
    flip = (signs.to(tl.uint32)[:, :, None] << shift[None, None, :]) & 0x80000000
    return tl.reshape(flip ^ scale.to(tl.uint32, bitcast=True), [R, ROW]).to(tl.float32, bitcast=True)


@triton.jit
def rounded(values, random, DTYPE: tl.constexpr):
    """Float32 values as sixteen-bit patterns, as `mezzo.method.rounding.rounded` says."""
    pattern = values.to(tl.uint32, bitcast=True)
    if DTYPE == BFLOAT16:
        found = (pattern + random) >> 16
    else:
        size = pattern & 0x7FFFFFFF
        normal = ((size + (random >> 3)) >> 13) - (112 << 10)
        tiny = size < 0x38800000
        fixed = (tl.where(tiny, tl.abs(values), 0.0) * 1099511627776.0).to(tl.int32).to(tl.uint32)
        found = tl.where(tiny, (fixed + random) >> 16, normal)
        found = tl.where(found > 0x7C00, 0x7C00, found)
        found = tl.where(size > 0x7F800000, 0x7E00, found) | ((pattern >> 16) & 0x8000)
    return found.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def widened(held, DTYPE: tl.constexpr):
    """Stored weights in float32; those of sixteen bits come as bit patterns."""
    if DTYPE == FLOAT32:
        return held
    elif DTYPE == BFLOAT16:
        return (held.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return held.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def rows_of(keys, index, count, FLAT: tl.constexpr, R: tl.constexpr):
    """This program's rows: where their elements lie, which of them exist, and each row's keys and number."""
    place = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = place[:, None] * ROW + tl.arange(0, ROW)[None, :]
    # One key a row even where all are the same: what begins with a load is computed by one thread a row and handed to the
    # others, where Triton would let every thread of a row make the row's noise anew.
    real = place * ROW < count
    line = keys + 2 * place if FLAT else keys + 0 * place
    key = tl.load(line, mask=real, other=0).to(tl.uint64, bitcast=True)
    round_key = tl.load(line + 1, mask=real, other=0).to(tl.uint64, bitcast=True)
    row = tl.load(index + place, mask=real, other=0).to(tl.uint64) if FLAT else place.to(tl.uint64)
    return at, at < count, key, round_key, row


@triton.jit
def perturb(
    value,
    out,
    count,
    keys,
    index,
    seeds,
    scales,
    table,
    MEMBERS: tl.constexpr,
    TERMS: tl.constexpr,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    R: tl.constexpr,
):
    """out[m] = θ + Σ scale[m, k]·z(seed k) for all members in one reading of θ; one seed's noise is made once for all."""
    at, real, key, _, row = rows_of(keys, index, count, FLAT, R)
    theta = tl.load(value + at, mask=real, other=0).to(tl.float32)
    if TERMS == 1:
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        z = scaled_noise(1.0, seed, key, row, table, KIND, R)
        for member in tl.static_range(MEMBERS):
            moved = theta + tl.load(scales + member) * z
            tl.store(out + member * count + at, moved.to(out.dtype.element_ty), mask=real)
    else:
        for member in tl.static_range(MEMBERS):
            moved = theta
            for term in range(TERMS):
                seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
                scale = tl.load(scales + member * TERMS + term)
                moved += scaled_noise(scale, seed, key, row, table, KIND, R)
            tl.store(out + member * count + at, moved.to(out.dtype.element_ty), mask=real)


@triton.jit
def update(value, count, keys, index, seeds, coefs, table, TERMS: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr,
           DTYPE: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """θ ← fl(keep·θ), then fl(θ − fl(c·z)) a term at a time, in place, for a flat buffer; matrices have `matrices.update`."""
    at, real, key, round_key, row = rows_of(keys, index, count, True, R)
    held = tl.load(value + at, mask=real, other=0)
    acc = widened(held, DTYPE)
    if DECAY:
        acc = acc * tl.load(coefs)
    for term in range(TERMS):
        seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
        coef = tl.load(coefs + 1 + term)
        step = scaled_noise(coef, seed, key, row, table, KIND, R)
        acc = tl.where(coef != 0.0, acc - step, acc)  # −0 would not survive −0 − (−0)
    if DTYPE == FLOAT32:
        tl.store(value + at, acc, mask=real)
    else:
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        tl.store(value + at, rounded(acc, lanes(seed, round_key, row, R), DTYPE), mask=real)


@triton.jit(do_not_specialize=["count", "first", "per_row"])
def words(out, count, first, rows, per_row, seeds, keys, PICKED: tl.constexpr, B: tl.constexpr):
    """Words [first, first + count) of a stream; or, of a stream with `per_row` words a row, those of the rows picked."""
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    seed = tl.load(seeds).to(tl.uint64, bitcast=True)
    key = tl.load(keys).to(tl.uint64, bitcast=True)
    if PICKED:
        line = place // per_row
        number = tl.load(rows + line, mask=place < count, other=0) * per_row + (place - line * per_row)
    else:
        number = place + first
    found = word(seed, key, number.to(tl.uint64))
    tl.store(out + place, found.to(tl.int64, bitcast=True), mask=place < count)
