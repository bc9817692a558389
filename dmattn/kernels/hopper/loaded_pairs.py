"""Tiles of pairs that the copy engine of Hopper (sm_90) cannot address, as rows begin anywhere: consumers load them to registers.

The producer, which is ahead of them by the stages in shared memory, may ask for the bias of a tile when it copies the tile's keys, so that
consumers find it in the L2 cache. The forward pass loads the words of a tile's bias before it needs it, if no list says which tile comes.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..base.layout import slice_pointer
from ..base.whole import ANYWHERE, EVEN, multiple

LINE = gl.constexpr(128)  # bytes that come to the cache at once


class Words(NamedTuple):
    """The 32-bit words in which a tile of 16-bit numbers lies, in the layout of `_by_words`; those past the last column are any."""

    within: Any  # [64, COLS / 2]
    beyond: Any  # [64], the word that follows in each row; of rows that begin with a word it is any


@gluon.jit
def prefetch_bias(copied, rules, seq, row, col, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Ask for the bias of pairs of a tile at a query and a key, without waiting for it, unless there is none or it is `copied`.

    Places past an end are the last ones. Only rows whose numbers lie side by side are asked for.
    """
    if copied is None and rules.bias_rows is not None and rules.bias_cols is not None:
        bias = rules.bias
        EACH: gl.constexpr = LINE * 8 // bias.ptr.dtype.element_ty.primitive_bitwidth  # numbers in a line
        CODE: gl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        if bias.col == 1:
            rows = gl.minimum(row + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0])), gl.maximum(seq.len_q, 1) - 1)
            pointers = slice_pointer(bias, seq) + rows.to(gl.int64) * bias.row
            for i in gl.static_range(COLS // EACH + 1):  # a row of the tile begins and ends anywhere in a line
                place = gl.maximum(gl.minimum(col + min(i * EACH, COLS - 1), seq.len_k - 1), 0)
                gl.inline_asm_elementwise(CODE, "=r,l", [(pointers + place).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_pairs(t, seq, rows, cols, row, col, EDGE: gl.constexpr):
    """A tile of a tensor of pairs (`layout.Strided`) at a query and a key, from memory wherever it lies there.

    `rows` and `cols` count from there, and broadcast to the tile, whichever way it stands. Past the end of the keys, which only a tile at an
    EDGE reaches, it is anything; past that of the queries it is the last one's. The key is a multiple of 8. A tile that stands as products have
    it has 64 rows.
    """
    LAYOUT: gl.constexpr = cols.type.layout
    if rows.shape[1] == 1 and are_words(t.whole) and _is_of_products(LAYOUT):  # a lane has pairs of neighbours in a row of the tile
        COLS: gl.constexpr = cols.shape[1]
        return pairs_of_words(words_of_pairs(t, seq, row, col, seq.len_k, COLS, EDGE), t, seq, row, col, LAYOUT)
    else:
        last = gl.maximum(seq.len_q, 1) - 1
        row = gl.minimum(row, last)
        rows = gl.minimum(rows, last - row)
        corner = slice_pointer(t, seq) + multiple(gl.cast(row, gl.int64) * t.row + gl.cast(col, gl.int64) * t.col, t.whole)
        pitch = multiple(t.row, t.whole)
        if len(t.whole) == EVEN:  # for the compiler to know it
            corner = t.ptr + (corner.to(gl.int64) - t.ptr.to(gl.int64)) // 4 * 2
            pitch = t.row // 2 * 2
        if rows.shape[1] == 1:  # what is added last differs by register alone, and is part of the instructions that load
            pointers = (corner + rows * pitch) + cols * t.col
        else:
            pointers = (corner + cols * t.col) + rows * t.row
        if EDGE:
            return gl.load(pointers, mask=cols < seq.len_k - col, other=0)
        else:
            return gl.load(pointers)


@gluon.constexpr_function
def are_words(whole):
    """Whether a tensor by its `whole` has 16-bit numbers side by side, which two lie in a word."""
    return len(whole) in (ANYWHERE.value, EVEN.value)


@gluon.constexpr_function
def _is_of_products(layout):
    return isinstance(layout, gl.NVMMADistributedLayout)


@gluon.jit
def words_of_pairs(t, seq, row, col, end, COLS: gl.constexpr, EDGE: gl.constexpr):
    """The :class:`Words` of a tile at a query and a key; at an EDGE those of keys before an end."""
    LAYOUT: gl.constexpr = _by_words(COLS // 2)
    addresses = _addresses(t, seq, row, col, LAYOUT)
    odd = _odd(t, addresses)
    first = (addresses - 2 * odd).to(gl.pointer_type(gl.int32), bitcast=True)
    index = gl.arange(0, COLS // 2, gl.SliceLayout(0, LAYOUT))
    beyond = gl.full([64], 0, gl.int32, gl.SliceLayout(1, LAYOUT))
    if EDGE:
        within = gl.load(first[:, None] + index[None, :], mask=2 * index[None, :] - odd[:, None] < end - col)
        if len(t.whole) == ANYWHERE:
            beyond = gl.load(first + COLS // 2, mask=(odd != 0) & (end - col >= COLS))
    else:
        within = gl.load(first[:, None] + index[None, :])
        if len(t.whole) == ANYWHERE:
            beyond = gl.load(first + COLS // 2, mask=odd != 0)
    return Words(within, beyond)


@gluon.jit
def pairs_of_words(words, t, seq, row, col, PAIRS: gl.constexpr):
    """The tile at a query and a key from its words, as products have it in registers (PAIRS).

    A lane has the words in which its numbers lie. If a row begins within a word, the second half of each pair comes from the lane beside it;
    that of the last lane of four from the first, whose next word it is.
    """
    LAYOUT: gl.constexpr = words.within.type.layout
    pairs = words.within
    if len(t.whole) == ANYWHERE:
        odd = _odd(t, _addresses(t, seq, row, col, LAYOUT))
        EACH: gl.constexpr = pairs.shape[1] // 4  # words of a row that a lane has
        arguments = [pairs, words.beyond[:, None], odd[:, None]]
        pairs = gl.inline_asm_elementwise(_shifting(EACH), _constraints(EACH), arguments, dtype=gl.int32, is_pure=False, pack=EACH)
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    tile = gl.join(low, high).reshape([64, 2 * pairs.shape[1]])
    return gl.convert_layout(tile.to(t.ptr.dtype.element_ty, bitcast=True), PAIRS)


@gluon.jit
def _addresses(t, seq, row, col, LAYOUT: gl.constexpr):
    """Those of a key of 64 queries in a tensor of pairs, int64; past the last query that of the last."""
    last = gl.maximum(seq.len_q, 1) - 1
    row = gl.minimum(row, last)
    rows = gl.minimum(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), last - row)
    corner = slice_pointer(t, seq) + (gl.cast(row, gl.int64) * t.row + col)
    return corner.to(gl.int64) + (rows * t.row).to(gl.int64) * 2


@gluon.jit
def _odd(t, addresses):
    """1 for rows that begin within a word, else 0."""
    if len(t.whole) == ANYWHERE:
        return ((addresses >> 1) & 1).to(gl.int32)
    else:
        return gl.full(addresses.shape, 0, gl.int32, addresses.type.layout)


@gluon.constexpr_function
def _by_words(words):
    """The layout in registers of the words of a consumer's products of 64 rows: those of a row follow one another."""
    registers = [[0, 4 << bit] for bit in range(8) if 4 << bit < words]
    return gl.DistributedLinearLayout([*registers, [8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, words])


@gluon.constexpr_function
def _constraints(count):
    """Those of `_shifting`."""
    return ",".join(["=&r"] * count + ["r"] * (3 * count))  # results come before the last arguments are read


@gluon.constexpr_function
def _shifting(count):
    """PTX that makes so many pairs of a lane from its words, the word beyond a row, and whether the row begins within a word."""
    lines = [
        "{ .reg .pred first, odd; .reg .b32 lane, next, order;",
        "mov.u32 lane, %laneid; and.b32 next, lane, 3; setp.eq.u32 first, next, 0; add.u32 lane, lane, 1;",
        f"setp.ne.u32 odd, ${3 * count}, 0; selp.b32 order, 0x5432, 0x3210, odd;",
    ]
    for i in range(count):
        word, after = f"${count + i}", f"${count + i + 1}" if i + 1 < count else f"${2 * count}"
        lines += [
            f"selp.b32 next, {after}, {word}, first;",
            "shfl.sync.idx.b32 next, next, lane, 0x1c03, 0xffffffff;",
            f"prmt.b32 ${i}, {word}, next, order;",
        ]
    return "\n".join([*lines, "}"])
