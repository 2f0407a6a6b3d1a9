"""Kernels for matrices: members at a point, and updates of many matrices of one shape in one launch.

±1 noise comes from memory, one bit an element, where `fill_signs` put it shortly before: so every word of the stream is made
once, and what reads it is bound by bandwidth. The signs of low-rank factors lie there as one number a row (`fill_factors`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.engines.torch.gpu.kernels import philox
from mezzo.engines.torch.gpu.kernels.philox import FACTORS, FLOAT32, ROW, SIGNS

BLOCKS = 64
"""Blocks of the stream, four words each, that a program of `fill_signs` makes; tensors begin at multiples of that."""
WORDS = 4 * BLOCKS
FACTOR_ROWS = 128
"""Rows of factors that a program of `fill_factors` makes; factors begin at multiples of that."""
ENTRY, KEYS = tl.constexpr(6), tl.constexpr(4)
"""Numbers in an entry of `update`'s table, and in one of `perturb`'s keys."""


@triton.jit
def fill_signs(out, step, places, seeds, BLOCKS: tl.constexpr):
    """out[k, w]: words of ±1 noise under seed k, of tensors side by side; places[program] = (key, first block)."""
    program, term = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, BLOCKS)
    key = tl.load(places + 2 * program).to(tl.uint64, bitcast=True)
    first = tl.load(places + 2 * program + 1).to(tl.uint64)
    seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
    w0, w1, w2, w3 = philox.block(seed, key, first + number.to(tl.uint64))
    at = out + term * step + (program.to(tl.int64) * BLOCKS + number) * 4
    tl.store(at, w0.to(tl.int64, bitcast=True))
    tl.store(at + 1, w1.to(tl.int64, bitcast=True))
    tl.store(at + 2, w2.to(tl.int64, bitcast=True))
    tl.store(at + 3, w3.to(tl.int64, bitcast=True))


@triton.jit
def fill_factors(out, step, places, seeds, RANK: tl.constexpr, ROWS: tl.constexpr):
    """out[k, i]: the RANK signs of row i of factors side by side under seed k, as bits of one number."""
    program, term = tl.program_id(0), tl.program_id(1)
    key = tl.load(places + 2 * program).to(tl.uint64, bitcast=True)
    first = tl.load(places + 2 * program + 1).to(tl.uint64)
    seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
    row = tl.arange(0, ROWS)
    bit = (first + row.to(tl.uint64)) * RANK
    shift = bit % 64
    found = philox.word(seed, key, bit // 64) >> shift
    if 64 % RANK != 0:  # a row may begin in one word and end in the next
        over = philox.word(seed, key, bit // 64 + 1) << ((64 - shift) % 64)
        found = tl.where(shift > 64 - RANK, found | over, found)
    found = (found & ((1 << RANK) - 1)).to(tl.uint32)
    tl.store(out + term * step + program.to(tl.int64) * ROWS + row, found.to(out.dtype.element_ty))


@triton.jit
def perturb(value, out, count, rows, signs, keys, seeds, scales, table,
            MEMBERS: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out[m] = θ + scale[m]·z(seed) for all members in one reading of θ: matrices of `rows` rows of 64, side by side."""
    place = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = place[:, None] * ROW + tl.arange(0, ROW)[None, :]
    real = at < count
    theta = tl.load(value + at, mask=real, other=0).to(tl.float32)
    if KIND == SIGNS:
        held = place[:, None] * 8 + tl.arange(0, 8)[None, :]
        bits = tl.load(signs + held, mask=(place * ROW < count)[:, None], other=0)
        for member in tl.static_range(MEMBERS):
            moved = theta + philox.signed(tl.load(scales + member), bits, R)
            tl.store(out + member * count + at, moved.to(out.dtype.element_ty), mask=real)
    else:
        number = place // rows
        key = tl.load(keys + number * KEYS, mask=place * ROW < count, other=0).to(tl.uint64, bitcast=True)
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        z = philox.scaled_noise(1.0, seed, key, (place - number * rows).to(tl.uint64), table, KIND, R)
        for member in tl.static_range(MEMBERS):
            moved = theta + tl.load(scales + member) * z
            tl.store(out + member * count + at, moved.to(out.dtype.element_ty), mask=real)


@triton.jit
def scaled_product(scale, row, real, some, left, right, lines, width,
                   RANK: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """[R, 64]: scale·U·Vᵀ; `left` and `right` hold the signs of a factor's row as the bits of one number.

    In an ALIGNED matrix, whose rows are multiples of 64 elements, one of our rows lies in one row of the matrix. Signs of at
    most eight columns are bytes, and four of them are counted at once.
    """
    lane = tl.arange(0, ROW)[None, :]
    if ALIGNED and RANK <= 8:
        per_line = width // ROW
        line = row // per_line
        u = tl.load(left + line, mask=some, other=0).to(tl.uint32) * 0x01010101
        fours = (right + (row - line * per_line) * ROW).to(tl.pointer_type(tl.uint32))
        v = tl.load(fours[:, None] + tl.arange(0, ROW // 4)[None, :], mask=some[:, None], other=0)
        shift = (tl.arange(0, 4) * 8).to(tl.uint32)
        counts = philox.ones_of_bytes(u[:, None] ^ v)
        differ = tl.reshape((counts[:, :, None] >> shift[None, None, :]) & 0xFF, [R, ROW]).to(tl.int32)
    elif ALIGNED:
        per_line = width // ROW
        line = row // per_line
        u = tl.load(left + line, mask=line < lines, other=0).to(tl.uint32)[:, None]
        first = tl.multiple_of((row - line * per_line) * ROW, 64)
        v = tl.load(right + first[:, None] + lane, mask=real, other=0).to(tl.uint32)
        differ = philox.ones_of(u ^ v).to(tl.int32)
    else:
        first = row.to(tl.int64) * ROW
        line = first // width
        place = (first - line * width).to(tl.int32)[:, None] + lane
        over = place // width
        u = tl.load(left + line[:, None] + over, mask=real, other=0).to(tl.uint32)
        v = tl.load(right + place - over * width, mask=real, other=0).to(tl.uint32)
        differ = philox.ones_of(u ^ v).to(tl.int32)
    return scale * (RANK - 2 * differ).to(tl.float32)


@triton.jit(do_not_specialize=["lines"])
def update(value, count, entries, seeds, coefs, table, signs, step, lines, width, unit,
           RANK: tl.constexpr, ALIGNED: tl.constexpr, TERMS: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr,
           DTYPE: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """θ ← fl(keep·θ), then fl(θ − fl(c·z)) a term at a time, in place, for matrices of `count` elements each.

    entries[matrix]: where it begins, counted in elements from `value`; the keys of its noise and of its rounding; where its
    signs begin in `signs` [k, step] (bytes), or those of its factors U and V (numbers). `unit` is their 1/√r.
    """
    entry = entries + tl.program_id(1) * ENTRY
    row = tl.program_id(0) * R + tl.arange(0, R)
    at = row.to(tl.int64)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    real = at < count
    target = value + tl.multiple_of(tl.load(entry), 16) + at
    held = tl.load(target, mask=real, other=0)
    # One key a row even where all are the same: what begins with a load is computed by one thread and handed to the others,
    # where Triton would let every thread of a row make the row's noise anew.
    some = row.to(tl.int64) * ROW < count
    key = tl.load(entry + 1 + 0 * row, mask=some, other=0).to(tl.uint64, bitcast=True)
    acc = philox.widened(held, DTYPE)
    if DECAY:
        acc = acc * tl.load(coefs)
    for term in range(TERMS):
        coef = tl.load(coefs + 1 + term)
        if KIND == FACTORS:
            left = signs + term * step + tl.multiple_of(tl.load(entry + 3), 64)
            right = signs + term * step + tl.multiple_of(tl.load(entry + 4), 64)
            moved = scaled_product(coef * unit, row, real, some, left, right, lines, width, RANK, ALIGNED, R)
        elif KIND == SIGNS:
            first = signs + term * step + tl.multiple_of(tl.load(entry + 3), 64)
            place = row.to(tl.int64)[:, None] * 8 + tl.arange(0, 8)[None, :]
            moved = philox.signed(coef, tl.load(first + place, mask=some[:, None], other=0), R)
        else:
            seed = tl.load(seeds + term).to(tl.uint64, bitcast=True)
            moved = philox.scaled_noise(coef, seed, key, row.to(tl.uint64), table, KIND, R)
        acc = tl.where(coef != 0.0, acc - moved, acc)  # −0 would not survive −0 − (−0)
    if DTYPE == FLOAT32:
        tl.store(target, acc, mask=real)
    else:
        seed = tl.load(seeds).to(tl.uint64, bitcast=True)
        round_key = tl.load(entry + 2 + 0 * row, mask=some, other=0).to(tl.uint64, bitcast=True)
        random = philox.lanes(seed, round_key, row.to(tl.uint64), R)
        tl.store(target, philox.rounded(acc, random, DTYPE), mask=real)
