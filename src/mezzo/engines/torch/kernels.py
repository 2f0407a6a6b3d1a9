"""The noise of `mezzo.noise` and the rounding of `mezzo.rounding` inside Triton kernels: no noise is ever written to memory.

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
def ones_of(bits):
    """How many bits of an unsigned 32-bit number are set."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return (bits + (bits >> 8) + (bits >> 16) + (bits >> 24)) & 0xFF


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
def scaled_product(scale, row, real, left, right, rows, width, rank, ALIGNED: tl.constexpr):
    """[R, 64]: scale·U·Vᵀ; `left` and `right` hold the signs of a factor's row as the bits of one number.

    In an ALIGNED matrix, whose rows are multiples of 64 elements, one of our rows lies in one row of the matrix.
    """
    lane = tl.arange(0, ROW)[None, :]
    if ALIGNED:
        per_line = width // ROW
        line = row.to(tl.int32) // per_line
        u = tl.load(left + line, mask=line < rows, other=0)[:, None]
        v = tl.load(right + ((row.to(tl.int32) - line * per_line) * ROW)[:, None] + lane, mask=real, other=0)
    else:
        first = row.to(tl.int64) * ROW
        line = first // width
        place = (first - line * width).to(tl.int32)[:, None] + lane
        over = place // width
        u = tl.load(left + line[:, None] + over, mask=real, other=0)
        v = tl.load(right + place - over * width, mask=real, other=0)
    differ = ones_of((u ^ v).to(tl.uint32, bitcast=True)).to(tl.int32)
    return scale * (rank - 2 * differ).to(tl.float32)


@triton.jit
def rounded(values, random, DTYPE: tl.constexpr):
    """Float32 values as sixteen-bit patterns, as `mezzo.rounding.rounded` says."""
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


@triton.jit(do_not_specialize=["rows", "width", "rank"])
def update(
    value,
    count,
    keys,
    index,
    seeds,
    coefs,
    table,
    left,
    right,
    rows,
    width,
    rank,
    unit,
    ALIGNED: tl.constexpr,
    TERMS: tl.constexpr,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    DECAY: tl.constexpr,
    DTYPE: tl.constexpr,
    R: tl.constexpr,
):
    """θ ← fl(keep·θ), then fl(θ − fl(c·z)) a term at a time, in place. Sixteen-bit weights come as int16 bit patterns.

    Low-rank factors of term k are left[k, :rows] and right[k, :width], and `unit` is their 1/√r.
    """
    at, real, key, round_key, row = rows_of(keys, index, count, FLAT, R)
    held = tl.load(value + at, mask=real, other=0)
    if DTYPE == FLOAT32:
        acc = held
    elif DTYPE == BFLOAT16:
        acc = (held.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        acc = held.to(tl.float16, bitcast=True).to(tl.float32)
    if DECAY:
        acc = acc * tl.load(coefs)
    for term in range(TERMS):
        seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
        coef = tl.load(coefs + 1 + term)
        if KIND == FACTORS:
            step = scaled_product(
                coef * unit, row, real, left + term * rows, right + term * width, rows, width, rank, ALIGNED
            )
        else:
            step = scaled_noise(coef, seed, key, row, table, KIND, R)
        acc = tl.where(coef != 0.0, acc - step, acc)  # −0 would not survive −0 − (−0)
    if DTYPE == FLOAT32:
        tl.store(value + at, acc, mask=real)
    else:
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        random = lanes(seed, round_key, row, R)
        tl.store(value + at, rounded(acc, random, DTYPE), mask=real)


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


@triton.jit(do_not_specialize=["count"])
def factor_rows(out, count, seeds, keys, RANK: tl.constexpr, B: tl.constexpr):
    """out[k, i]: the RANK signs of row i of a low-rank factor under seed k, as bits of one number."""
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    term = tl.program_id(1)
    seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
    key = tl.load(keys).to(tl.uint64, bitcast=True)
    bit = place.to(tl.uint64) * RANK
    shift = bit % 64
    found = word(seed, key, bit // 64) >> shift
    if 64 % RANK != 0:  # a row may begin in one word and end in the next
        over = word(seed, key, bit // 64 + 1) << ((64 - shift) % 64)
        found = tl.where(shift > 64 - RANK, found | over, found)
    found = (found & ((1 << RANK) - 1)).to(tl.uint32)
    tl.store(out + term * count + place, found.to(tl.int32, bitcast=True), mask=place < count)
