"""Tiles in registers on Hopper (sm_90): the rules of base/rules.py on pairs, spelled for Gluon; 16-bit numbers by twos; rows stored."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..base.layout import slice_pointer
from ..base.rules import LOG2E
from ..base.whole import multiple
from ..base.window import first_key, last_key
from ..visits.intervals import middle_and_length
from .mask_words import kept_by_bits


class Hiding(NamedTuple):
    """What says, beside window and lengths, which pairs of a tile are hidden; each broadcasts to the tile, whichever way it stands."""

    kept: Any = 1  # not 0 where the mask keeps a pair (`mask_of`)
    rows2: Any = 0  # twice the places of queries, float32; as the next two, where keys have intervals
    middle2: Any = 0  # twice the middle of a key's interval (`interval_of`)
    length: Any = 0  # and its length
    words: Any = 0  # bits of a mask of pairs or a block mask (`words_of`)


@gluon.jit
def load_vector(t, stride, seq, start, length, other, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """[BLOCK] from `start` on of a tensor's one axis with this stride; `other` from `length` on."""
    index = gl.arange(0, BLOCK, LAYOUT)
    pointers = slice_pointer(t, seq) + gl.cast(start, gl.int64) * stride + index * stride
    return gl.load(pointers, mask=index < length - start, other=other)


@gluon.jit
def store_vector(t, seq, start, length, x, order=None):
    """A vector to its places in a tensor from `start` on, of so many in all; counted in an `order`, if there is one (:func:`places_of`)."""
    index = start + gl.arange(0, x.shape[0], x.type.layout)
    places = index.to(gl.int64)
    if order is not None:
        places = places_of(order, seq, index, length)
    gl.store(slice_pointer(t, seq) + places * t.row, x.to(t.ptr.dtype.element_ty), mask=index < length)


@gluon.jit
def bias_vector(rules, seq, row, BLOCK_M: gl.constexpr, PAIRS: gl.constexpr):
    """The bias of a tile at a query times LOG2E, queries down, where it does not depend on the key; else 0."""
    if rules.bias is None or rules.bias_cols is not None:
        return 0.0
    elif rules.bias_rows is not None:
        bias = load_vector(rules.bias, rules.bias.row, seq, row, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]
        return bias.to(gl.float32) * LOG2E
    else:
        return gl.load(slice_pointer(rules.bias, seq)).to(gl.float32) * LOG2E


@gluon.jit
def mask_of(rules, seq, rows, cols, row, col):
    """Which pairs a mask of keys, queries or heads keeps of a tile at a query and a key, not 0 where kept; 1 without one.

    One of pairs is read by bits (:func:`words_of`). `rows` and `cols` count from there, and broadcast to the tile, whichever way it stands.
    """
    if rules.mask is None:
        return 1
    else:
        pointers = slice_pointer(rules.mask, seq)
        if rules.mask_rows is not None:
            pointers += gl.cast(row, gl.int64) * rules.mask.row
        if rules.mask_cols is not None:
            pointers += gl.cast(col, gl.int64) * rules.mask.col
        gl.static_assert(rules.mask_rows is None or rules.mask_cols is None)
        if rules.mask_rows is not None:
            return gl.load(pointers + rows * rules.mask.row, mask=rows < seq.len_q - row, other=0).to(gl.int8)
        elif rules.mask_cols is not None:
            return gl.load(pointers + cols * rules.mask.col, mask=cols < seq.len_k - col, other=0).to(gl.int8)
        else:
            return gl.load(pointers).to(gl.int8)


@gluon.jit
def interval_of(rules, seq, col, BLOCK_N: gl.constexpr, PAIRS: gl.constexpr, KEYS_DOWN: gl.constexpr):
    """(twice the middle, length) of the interval of queries of each key of a tile. A key past the end has none."""
    AXIS: gl.constexpr = 1 if KEYS_DOWN else 0
    first = load_vector(rules.first, rules.first.row, seq, col, seq.len_k, 0, BLOCK_N, gl.SliceLayout(AXIS, PAIRS))
    last = load_vector(rules.last, rules.last.row, seq, col, seq.len_k, 0, BLOCK_N, gl.SliceLayout(AXIS, PAIRS))
    middle2, length = middle_and_length(first, last, seq.len_q)
    return middle2.expand_dims(AXIS), length.expand_dims(AXIS)


@gluon.jit
def up_to(s, place, bound):
    """Scores of a tile, -inf where a place is past a bound. In PTX for the reason of :func:`_in_interval`."""
    CODE: gl.constexpr = "{ .reg .pred inside; setp.le.s32 inside, $2, $3; selp.f32 $0, $1, 0fff800000, inside; }"
    return gl.inline_asm_elementwise(CODE, "=f,f,r,r", [s, place, bound], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _in_interval(s, rows2, middle2, length):
    """Scores of a tile, -inf where a query is not in the interval of a key; `rows2` are twice the places of queries.

    In PTX, for Triton would compare all pairs first, and keep what it found until the scores are there.
    """
    CODE: gl.constexpr = """{
        .reg .f32 distance;
        .reg .pred inside;
        sub.f32 distance, $2, $3;
        abs.f32 distance, distance;
        setp.lt.f32 inside, distance, $4;
        selp.f32 $0, $1, 0fff800000, inside;
    }"""
    arguments = [s, rows2, middle2, length]
    return gl.inline_asm_elementwise(CODE, "=f,f,f,f,f", arguments, dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def capped(products, rules):
    """Products of a tile, or under a softcap the tanh of what the scores would be over it: scores over :func:`unit_of`.

    From 1 - 2 / (exp(2x) + 1): its error is that of numbers near 1, wherever the tanh lies, which `rules.MOST_SOFTCAP` bounds for scores.
    """
    if rules.softcap is None:
        return products
    else:
        CODE: gl.constexpr = """{
            .reg .f32 power;
            ex2.approx.ftz.f32 power, $1;
            add.f32 power, power, 0f3F800000;
            rcp.approx.ftz.f32 power, power;
            fma.rn.f32 $0, power, 0fC0000000, 0f3F800000;
        }"""
        exponents = products * (2 * LOG2E * rules.scale / rules.softcap)
        return gl.inline_asm_elementwise(CODE, "=f,f", [exponents], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def unit_of(rules):
    """What numbers of :func:`capped` are multiplied by to be scores without a bias."""
    if rules.softcap is None:
        return rules.scale
    else:
        return rules.softcap


@gluon.jit
def ruled(s, bias, hiding, rules, seq, rows, cols, EDGE: gl.constexpr):
    """Scores from the products of one tile (:func:`capped`), -inf where hidden; pairs are hidden only at an EDGE. See `scores`.

    They are in units of :func:`exponent_factor`, whichever costs no instruction more: as they are where there is no bias, or one of keys, which
    is part of products (base/bias_columns.py); natural ones with a bias of pairs; and base 2 with any other, whose product with LOG2E is made
    once for many pairs.

    `bias`, `rows` (queries) and `cols` (keys) broadcast to the tile, whichever way it stands, and so does all of
    `hiding` (:class:`Hiding`). A bias that is not of pairs comes times LOG2E. One of
    pairs comes as None where products were added to it, and the scale multiplied into queries.
    """
    if rules.bias is not None:
        if rules.bias_rows is not None and rules.bias_cols is not None:
            if bias is not None:
                s = s * unit_of(rules) + widened(bias)
        elif rules.bias_by_key is None:
            s = s * (unit_of(rules) * LOG2E) + bias
    if EDGE:
        if rules.mask is not None:
            s = gl.where(hiding.kept != 0, s, float("-inf"))
        if rules.bits is not None:
            s = kept_by_bits(s, hiding.words)
        if rules.first is not None:
            s = _in_interval(s, hiding.rows2, hiding.middle2, hiding.length)
        # One comparison for each pair, with bounds by query. Intervals hide what is past the keys' end themselves. So do a mask by key and the
        # bits of a scanned mask, unless packed sequences have ends of their own.
        OF_KEYS: gl.constexpr = rules.mask is not None and rules.mask_cols is not None
        OF_PAIRS: gl.constexpr = rules.bits is not None and rules.blocks is None
        if rules.right is not None:
            s = up_to(s, cols, gl.minimum(last_key(rules.right, seq, rows), seq.len_k - 1))
        elif rules.first is None and (rules.ends is not None or not (OF_KEYS or OF_PAIRS)):
            s = up_to(s, cols, seq.len_k - 1)
        if rules.left is not None:
            s = up_to(s, first_key(rules.left, seq, rows), cols)
    return s


@gluon.jit
def rounded_pairs(x, DTYPE: gl.constexpr):
    """[ROWS, COLS] float32 rounded to a 16-bit type, as [ROWS, COLS / 2] int32: neighbours in a row share a register.

    That is how products take it, and how it goes from one tile to the next: 16-bit numbers by themselves are taken apart and put together
    again between loops.
    """
    low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    CODE: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if DTYPE.is_fp16() else "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(CODE, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def in_pairs(x):
    """A tile of 16-bit numbers as :func:`rounded_pairs` gives them."""
    low, high = gl.split(x.to(gl.int16, bitcast=True).reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def looked_at(x):
    """The same numbers, which are there before anything goes on that others see.

    An arrival at a barrier does not wait for loads from shared memory: they may stand behind stores, and the copy engine be faster. What their
    numbers lead to is looked at here by an instruction that keeps its place.
    """
    CODE: gl.constexpr = "{ .reg .pred nan; setp.nan.f32 nan, $1, $1; @nan nanosleep.u32 0; mov.b32 $0, $1; }"
    return gl.inline_asm_elementwise(CODE, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def widened(x):
    """A tile in float32. One instruction makes it of a bfloat16, whose neighbour in the row shares its register; Triton takes three for two."""
    if x.dtype.is_bf16():
        LAYOUT: gl.constexpr = x.type.layout
        low, high = gl.split(x.to(gl.int16, bitcast=True).reshape([x.shape[0], x.shape[1] // 2, 2]))
        CODE: gl.constexpr = "{ .reg .b32 pair; mov.b32 pair, {$2, $3}; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"
        low, high = gl.inline_asm_elementwise(CODE, "=r,=r,h,h", [low, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
        return gl.convert_layout(gl.join(low, high).reshape(x.shape).to(gl.float32, bitcast=True), LAYOUT)
    else:
        return x.to(gl.float32)


@gluon.jit
def as_factor(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """What :func:`rounded_pairs` made, as the left factor of a product."""
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    x = gl.join(low, high).reshape([pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(x.to(DTYPE, bitcast=True), LAYOUT)


@gluon.jit
def exponent_factor(rules):
    """What scores of :func:`ruled` are multiplied by to be exponents of 2: with the subtraction that follows, one instruction."""
    if rules.bias_rows is not None and rules.bias_cols is not None:
        return LOG2E
    elif rules.bias is None or rules.bias_by_key is not None:
        return unit_of(rules) * LOG2E
    else:
        return 1.0


@gluon.jit
def lane_sums(x):
    """The sums over each of the four lanes' columns of a tile, [ROWS, 4]: lanes are summed once, at the end (:func:`sums_of_lanes`)."""
    return gl.sum(gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def all_within(sums, votes, DTYPE: gl.constexpr):
    """Whether all sums by lane of a consumer's tile (:func:`lane_sums`) are numbers of at most 2**10 in float16 or 2**64 in bfloat16: 1 or 0.

    Such weights have room in their type, and products of 2**64 with values to 1e13 in sums of 131072 keys. `votes` is shared memory for an
    int8 of each thread.
    """
    MOST: gl.constexpr = "0f44800000" if DTYPE.is_fp16() else "0f5F800000"
    CODE: gl.constexpr = (
        "{ .reg .pred within; setp.le.f32 within, $1, " + MOST + "; setp.le.and.f32 within, $2, " + MOST + ", within; "
        "vote.sync.all.pred within, within, 0xffffffff; selp.b32 $0, 1, 0, within; }"
    )
    low, high = gl.split(sums.reshape([4, 2, 8, 4]).permute((2, 3, 0, 1)))
    vote = gl.inline_asm_elementwise(CODE, "=r,f,f", [low, high], dtype=gl.int32, is_pure=False, pack=1)
    votes.store(vote.reshape([128]).to(gl.int8))  # the votes of the four warps side by side, once for each lane, whose votes are alike
    of_warps = votes._reinterpret(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0])).slice(0, 1).load(gl.BlockedLayout([1], [32], [4], [0]))
    return (gl.min(of_warps, 0) == 0x01010101).to(gl.int32)


@gluon.jit
def sums_of_lanes(sums, PAIRS: gl.constexpr):
    """The sums over all columns, for the rows of tiles in PAIRS."""
    return gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, PAIRS))


@gluon.jit
def reciprocal(x):
    """1 / x within one unit of the last digit. Triton's division takes a dozen instructions, to round each quotient right."""
    return gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def logarithm2(x):
    """log2(x) off by 2**-22 at most between 1/2 and 2, and else by so much of itself. Triton's own takes some twenty instructions."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def store_tile(t, seq, row, length, x, WIDTH: gl.constexpr, order=None, FIRST: gl.constexpr = 0):
    """A tile of sums to its rows of a tensor, of so many in all, and so wide: lanes exchange columns, so that each may store 16 bytes at once.

    Where there is an `order`, rows are counted in it (:func:`places_of`). The tile's columns are those of the tensor from the FIRST on.
    """
    LAYOUT: gl.constexpr = _by_rows(x.shape[0], x.shape[1], 16 if x.shape[1] > 16 else 4)  # 16 columns: 8 bytes at once
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    cols = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    places = rows.to(gl.int64)
    if order is not None:
        places = places_of(order, seq, rows, length)
        cols = cols.to(gl.int64)  # the tensor need not be one that the copy engine can address
    pointers = slice_pointer(t, seq) + multiple(places * t.row, t.whole)[:, None] + (cols * t.col)[None, :]
    HALFWAY: gl.constexpr = _by_rows(x.shape[0], x.shape[1], 4)  # both exchanges at once would go through shared memory
    x = gl.convert_layout(gl.convert_layout(x.to(t.ptr.dtype.element_ty), HALFWAY), LAYOUT)
    gl.store(pointers, x, mask=(rows < length)[:, None] & (cols < WIDTH)[None, :])


@gluon.jit
def places_of(order, seq, rows, length):
    """Where so many rows of a list stand by its order, int64."""
    return gl.load(slice_pointer(order, seq) + rows.to(gl.int64) * order.row, mask=rows < length, other=0).to(gl.int64)


@gluon.constexpr_function
def _by_rows(rows, cols, second):
    """The layout of a consumer's sums in registers, but that a lane's columns begin at multiples of 8 and of `second`, not of 2 and 4."""
    registers = [[0, 1 << bit] for bit in range(8) if 1 << bit < cols and 1 << bit not in (8, second)]
    return gl.DistributedLinearLayout([*registers, [8, 0]], [[0, 8], [0, second], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [rows, cols])


@gluon.constexpr_function
def order_of(count):
    """The layout in registers of so many quadruples for each thread of a consumer, [count, threads, 4]."""
    registers = [[0, 0, 1], [0, 0, 2], *([1 << bit, 0, 0] for bit in range(8) if 1 << bit < count)]
    return gl.DistributedLinearLayout(registers, [[0, 1 << bit, 0] for bit in range(5)], [[0, 32, 0], [0, 64, 0]], [], [count, 128, 4])


@gluon.jit
def by_threads(x):
    """64 rows of 32-bit numbers, a pair of columns for each lane, in the order of the registers of threads: [columns / 8, threads, 4]."""
    COUNT: gl.constexpr = x.shape[1] // 8
    x = x.reshape([4, 2, 8, COUNT, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return gl.convert_layout(x.reshape([COUNT, 128, 4]), order_of(COUNT))


@gluon.jit
def by_rows(x, LAYOUT: gl.constexpr):
    """The same back in 64 rows."""
    x = x.reshape([x.shape[0], 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(x.reshape([64, 8 * x.shape[3]]), LAYOUT)
