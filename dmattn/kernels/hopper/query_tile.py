"""dQ on Hopper (sm_90), a consumer's part of hopper/query_grad.py: terms of its queries, and tiles of keys, one after the other."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..base.layout import slice_pointer
from ..base.query_terms import STORED_COLUMNS, store_terms
from ..base.rules import place_of_first
from ..base.softmax import divisor2
from ..base.whole import multiple
from .copies import column_pieces, first_of, pieces, product_layout, product_under_way, stage_of, waited, widths_of
from .distances import numbers_of_pairs
from .loaded_pairs import load_pairs
from .mask_words import words_of
from .registers import Hiding, as_factor, bias_vector, capped, exponent_factor, lane_sums, load_vector, mask_of, rounded_pairs, ruled
from .walk import bias_columns_of, intervals_of, listed_key

BLOCK_M = gl.constexpr(64)  # queries of a consumer


class Vectors(NamedTuple):
    """Vectors by query in memory (`layout.Strided`) that are read, where the terms go, and O where it is not copied, else None."""

    out: Any
    lse: Any
    d_lse: Any  # may be None
    stored: Any  # query_terms.Stored


class Context(NamedTuple):
    """Everything that tiles of keys of a block of queries share."""

    tiles: Any
    barriers: Any
    rules: Any
    seq: Any
    row: Any  # the first query of the block
    walk: Any
    q_pieces: Any  # of [BLOCK_M, DIM], as the next in shared memory, of one consumer
    d_out_pieces: Any  # of [BLOCK_M, DIM_V]
    divisor_rows: Any  # [BLOCK_M], as the next float32
    delta_rows: Any  # [BLOCK_M]


class Sums(NamedTuple):
    """State of a consumer between tiles."""

    dq: Any  # [BLOCK_M, DIM] float32, in pieces, without the last tile
    ds: Any  # [BLOCK_M, BLOCK_N / 2] int32, dS of the last tile (`rounded_pairs`)
    turn: Any  # tiles so far, of all blocks of queries
    ends: Any  # of dS by lane over the keys that take the first number of a table, and over those that take the last, [BLOCK_M, 4]; or ()


@gluon.jit
def terms_of(vectors, out_pieces, d_out_pieces, seq, row, stored, config: gl.constexpr):
    """The terms of a consumer's queries (`query_terms.Incoming`), which are `stored`, too, or else by another program."""
    ROWS: gl.constexpr = gl.SliceLayout(1, config.PAIRS)
    lse_rows = load_vector(vectors.lse, vectors.lse.row, seq, row, seq.len_q, float("-inf"), BLOCK_M, ROWS)
    if config.BY_COPY:
        delta_rows = _products_of_rows(out_pieces[0], d_out_pieces[0])
        for i in gl.static_range(1, len(out_pieces)):
            delta_rows += gl.convert_layout(_products_of_rows(out_pieces[i], d_out_pieces[i]), delta_rows.type.layout)
    else:
        delta_rows = gl.full([BLOCK_M], 0.0, gl.float32, ROWS)
        for i in gl.static_range(len(d_out_pieces)):
            products = _products_in_memory(vectors.out, d_out_pieces[i], seq, row, first_of(widths_of(config.DIM_V), i), config)
            delta_rows += gl.convert_layout(products, ROWS)
    delta_rows = gl.convert_layout(delta_rows, ROWS)  # [BLOCK_M]
    if vectors.d_lse is not None:
        of_lse = load_vector(vectors.d_lse, vectors.d_lse.row, seq, row, seq.len_q, 0.0, BLOCK_M, ROWS)
        delta_rows = gl.where(lse_rows == float("-inf"), 0.0, delta_rows - of_lse)
    if stored & (row < seq.len_q):
        columns = gl.arange(0, STORED_COLUMNS, gl.SliceLayout(0, config.PAIRS))
        store_terms(vectors.stored, seq, row, gl.arange(0, BLOCK_M, ROWS), columns, lse_rows, delta_rows)
    return divisor2(lse_rows), delta_rows


@gluon.jit
def _products_of_rows(left, right):
    """The sums of the products of rows of two pieces in shared memory, float32."""
    LAYOUT: gl.constexpr = product_layout(left.shape[1])
    return gl.sum(left.load(LAYOUT).to(gl.float32) * right.load(LAYOUT).to(gl.float32), 1)


@gluon.jit
def _products_in_memory(out, right, seq, row, first, config: gl.constexpr):
    """The same of `out` in memory from a column on, and of a piece."""
    COLS: gl.constexpr = right.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [4, 1], [1, 0])
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    cols = first + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    pointers = slice_pointer(out, seq) + multiple((row + rows).to(gl.int64) * out.row, out.whole)[:, None] + (cols * out.col)[None, :]
    out_rows = gl.load(pointers, mask=(row + rows < seq.len_q)[:, None] & (cols < config.VALUE_DIM)[None, :], other=0.0)
    return gl.sum(out_rows.to(gl.float32) * right.load(LAYOUT).to(gl.float32), 1)


@gluon.jit
def added(sums, tiles, stage, config: gl.constexpr):
    """dQ with the last tile, whose keys are in a stage, under way."""
    dq, keys = (), column_pieces(tiles.k, stage, config.DIM)
    for i in gl.static_range(len(keys)):
        ds = as_factor(sums.ds, tiles.k.dtype, gl.DotOperandLayout(0, sums.dq[i].type.layout, 2))
        dq += (warpgroup_mma(ds, keys[i], sums.dq[i], is_async=True),)
    return dq


@gluon.jit
def add_tile(
    context, sums, step, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr, FIRST: gl.constexpr, number=None, at_first=None
):  # fmt: skip
    """The :class:`Sums` after one tile of keys: its dS is made while the tile before, if it is not the FIRST, is added to dQ with its own.

    A `number` of a table of distances is that of all pairs, the first one if it is `at_first`, else the last; without it,
    each pair loads its own.
    """
    tiles, barriers, rules, seq = context.tiles, context.barriers, context.rules, context.seq
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    PAIRS: gl.constexpr = config.PAIRS
    start = 0  # where there are intervals, only a table needs it
    if rules.first is None or rules.table is not None:
        start = listed_key(rules, seq, context.row, step, 0, context.walk, config.CONSUMERS * BLOCK_M, config.SUB)
    row = context.row + which * BLOCK_M
    stage, phase = stage_of(sums.turn, STAGES)
    last = (sums.turn - 1) % STAGES
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]  # [BLOCK_M, 1]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_N]
    hiding = Hiding()
    if EDGE:
        words = words_of(rules, seq, row, start, BLOCK_N, KEYS_DOWN=False, partial=context.walk.partial)
        hiding = Hiding(mask_of(rules, seq, rows, cols, row, start), words=words)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    if rules.bias_rows is not None and rules.bias_cols is not None and tiles.bias is None:
        bias = load_pairs(rules.bias, seq, rows, cols, row, start, EDGE)
    BY_PAIRS: gl.constexpr = rules.table is not None and number is None
    s = zero
    if BY_PAIRS:
        s = numbers_of_pairs(rules, seq, row, start, [BLOCK_M, BLOCK_N], PAIRS, KEYS_DOWN=False)  # [BLOCK_M, BLOCK_N]
    mbarrier.wait(barriers.k_full.index(stage), phase)
    s = product_under_way(context.q_pieces, pieces(tiles.k, stage, config.DIM), s, BY_PAIRS)  # [BLOCK_M, BLOCK_N]
    if rules.bias_by_key is not None:
        s = warpgroup_mma(tiles.ones, bias_columns_of(tiles.bias_columns, stage, BLOCK_N).permute((1, 0)), s, is_async=True)
    mbarrier.wait(barriers.v_full.index(stage), phase)
    d_p = product_under_way(context.d_out_pieces, pieces(tiles.v, stage, config.DIM_V), zero, False)  # [BLOCK_M, BLOCK_N]
    dq = sums.dq
    if not FIRST:
        dq = added(sums, tiles, last, config)
    if rules.bias_rows is not None and rules.bias_cols is not None and tiles.bias is not None:
        bias = tiles.bias.index(config.CONSUMERS * stage + which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS)
    elif rules.bias_rows is None or rules.bias_cols is None:
        bias = bias_vector(rules, seq, row, BLOCK_M, PAIRS)
    if EDGE and rules.first is not None:
        middle2, length = intervals_of(tiles.intervals, stage, BLOCK_N, config.SUB, PAIRS)  # [1, BLOCK_N] each
        hiding = Hiding(rows2=(2 * (row + rows)).to(gl.float32), middle2=middle2, length=length)
    AFTER: gl.constexpr = 0 if FIRST else len(sums.dq)  # products for dQ, behind dP
    s = warpgroup_mma_wait(len(context.d_out_pieces) + AFTER, [s])
    tanh = capped(s, rules)
    s = ruled(tanh, bias, hiding, rules, seq, row + rows, start + cols, EDGE)
    divisor_rows = context.divisor_rows
    if number is not None:
        divisor_rows = divisor_rows - number * exponent_factor(rules)
    p = gl.exp2(s * exponent_factor(rules) - divisor_rows[:, None])
    if rules.softcap is not None:
        p = p * (1.0 - tanh * tanh)  # for dS of the scores without a softcap
    d_p = warpgroup_mma_wait(AFTER, [d_p])
    d_s = p * (d_p - context.delta_rows[:, None])
    if not FIRST:
        dq = waited(dq)
        mbarrier.arrive(barriers.free.index(last), count=1)
    ends = sums.ends
    if len(ends) > 0:
        low_lanes, high_lanes = ends
        if BY_PAIRS:
            place = place_of_first(rules, seq, row, start) + cols - rows
            low_lanes += lane_sums(gl.where(place <= 0, d_s, 0.0))
            high_lanes += lane_sums(gl.where(place >= gl.maximum(rules.distances - 1, 1), d_s, 0.0))  # the only number is the first
        else:
            lanes = lane_sums(d_s)
            low_lanes += gl.where(at_first != 0, lanes, 0.0)
            high_lanes += gl.where(at_first != 0, 0.0, lanes)
        ends = (low_lanes, high_lanes)
    return Sums(dq, rounded_pairs(d_s, tiles.k.dtype), sums.turn + 1, ends)
