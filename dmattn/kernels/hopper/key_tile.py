"""dK and dV on Hopper (sm_90): one tile of queries, as hopper/key_grad.py and hopper/key_grad_intervals.py add it, and their types.

Scores stand with keys down, so that the sums over queries take them for their left factor from registers.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..base.bias_columns import COLUMNS
from ..base.layout import copied_entry, slice_pointer
from ..base.rules import LOG2E
from .copies import (
    column_pieces,
    copied_dims,
    copy,
    copy_tile,
    is_descriptor,
    no_sums_of_rows,
    pieces,
    place_of_keys,
    product_layout,
    product_under_way,
    stage_of,
    store,
    waited,
)
from .distances import numbers_of_pairs
from .key_results import leave_d_scores
from .loaded_pairs import load_pairs
from .mask_words import turned, words_of
from .registers import Hiding, capped, exponent_factor, lane_sums, load_vector, looked_at, mask_of, ruled, up_to
from .term_tiles import are_columns, term_of

BLOCK_N = gl.constexpr(64)  # keys of a consumer
PROBABILITIES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))  # of [BLOCK_N, BLOCK_M]


class Extents(NamedTuple):
    """How much there is, and how programs are given it."""

    heads: Any  # of queries, in all
    group: Any  # query heads of a key-value head
    len_q: Any
    len_k: Any
    dealt: Any  # :class:`group_parts.Dealt`
    wave: Any = None  # `place.wave_of`


class Work(NamedTuple):
    """What a program has: a block of keys, under some query heads that share them."""

    seq: Any  # its sequence, under the first of these heads
    heads: Any  # how many
    dealt: Any  # as in :class:`Extents`
    col: Any  # the first of the keys


class Tiles(NamedTuple):
    """Tiles in shared memory; None where a problem has none of the kind."""

    k: Any  # [CONSUMERS, 1, 1, BLOCK_N, DIM], padded to `copied_dims`; one where consumers share keys; as many for each stage of keys
    v: Any  # the same of DIM_V
    bias_columns: Any  # for each consumer [BLOCK_N, COLUMNS], of a bias of keys
    q: Any  # [STAGES, 1, 1, BLOCK_M, DIM], padded like keys
    terms: Any  # [STAGES, 1, 1, BLOCK_M, COLUMNS] if they are columns, else [STAGES, 1, 1, 2, BLOCK_M]
    d_out: Any  # the same of DIM_V
    bias: Any = None  # of pairs, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], or [STAGES, ...] where they share keys; None if loaded
    mask: Any = None  # of pairs, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N]
    d_bias: Any = None  # [CONSUMERS, 1, 1, BLOCK_M, BLOCK_N]; one tile of zeros where dS is stored on its way to dQ
    p: Any = None  # [BLOCK_N, BLOCK_M]: probabilities, of the consumer that makes dV for that which makes dK, if there are two such
    ds: Any = None  # [D_SCORES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N]: dS on its way to dQ, where one kernel makes all three gradients


class Ones(NamedTuple):
    """Tiles of ones that columns meet in products, in shared memory or registers; None where there are no such columns."""

    keys: Any  # [BLOCK_M, COLUMNS], for those of keys in the products for scores
    scores: Any  # [BLOCK_N, COLUMNS], for those of queries in the products for scores
    d_p: Any  # [BLOCK_N, COLUMNS], for those of queries in the products for dP


class Barriers(NamedTuple):
    """Barriers of a program: full when copies have come, free when they have been read."""

    kv_full: Any  # [1, 1], of keys and values, or one for each stage of them
    q_full: Any  # [STAGES, 1], of queries, terms and bias
    d_out_full: Any  # [STAGES, 1], of dO and mask
    free: Any  # [STAGES, 1], of all tiles of a stage
    p: Any = None  # [2, 1]: there is room for probabilities; they are there
    kv_free: Any = None  # as kv_full, where a program has one block of keys after the other
    ds_full: Any = None  # [D_SCORES, 1], of dS on its way to dQ
    ds_free: Any = None  # the same


class Sources(NamedTuple):
    """Tensor descriptors of the tensors that are copied in tiles of queries; None where a problem has no such tensor."""

    q: Any
    terms: Any
    d_out: Any
    bias: Any = None
    mask: Any = None


class Results(NamedTuple):
    """Tensors to be written: Strided, but of dBias a tensor descriptor where the copy engine can store it; None where nobody asked for it."""

    d_k: Any
    d_v: Any
    key_sums: Any
    d_bias: Any


class Context(NamedTuple):
    """A consumer's block of keys, the tiles that it meets, and the results that it makes."""

    k: Any  # pieces of [BLOCK_N, DIM], in shared memory
    v: Any  # the same of DIM_V
    bias_columns: Any  # [BLOCK_N, COLUMNS], in shared memory
    ones: Any  # :class:`Ones`
    tiles: Any  # :class:`Tiles`
    barriers: Any  # :class:`Barriers`
    rules: Any
    results: Any  # :class:`Results`
    col: Any  # the first of the keys
    which: Any  # the consumer's number among those with other keys, a constexpr


class Keys(NamedTuple):
    """Numbers that are the same for all queries of a head, and may differ by key."""

    bias: Any  # the bias times LOG2E where it is one number for all pairs; else 0
    middle2: Any = 0  # [BLOCK_N, 1], twice the middle of a key's interval; as the next, where keys have intervals
    length: Any = 0  # [BLOCK_N, 1], and its length


class Sums(NamedTuple):
    """Running sums over queries in float32.

    Of two consumers of the same keys one makes scores, probabilities and dV. It hands probabilities to the other, which makes dP, dS and dK.
    """

    dk: Any  # pieces of [BLOCK_N, DIM], without the scale; none of the first of such consumers
    dv: Any  # the same of DIM_V; none of the second
    lanes: Any  # [BLOCK_N, 4], of dS by lane (`lane_sums`)


class Turn(NamedTuple):
    """Where the tiles of a step stand in shared memory, and its number."""

    stage: Any  # which of those of queries, terms and dO
    phase: Any  # the parity of how often the stage was used before
    pairs: Any  # which of those of bias and mask
    number: Any


@gluon.jit
def copy_keys(k, v, work, kv_head, full, tiles, config: gl.constexpr, BLOCKS: gl.constexpr = 1, stage=0):
    """Copy a program's keys and values, of so many blocks, to a stage of them; where there is one stage they stay."""
    mbarrier.expect(full, BLOCKS * 2 * BLOCK_N * (copied_dims(config.DIM) + copied_dims(config.DIM_V)))
    entry, first = place_of_keys(work.seq, work.col)
    for i in gl.static_range(BLOCKS):
        copy_tile(k, entry, kv_head, first + i * BLOCK_N, full, tiles.k, stage * BLOCKS + i, config.DIM)
        copy_tile(v, entry, kv_head, first + i * BLOCK_N, full, tiles.v, stage * BLOCKS + i, config.DIM_V)


@gluon.jit
def copy_pairs(source, owner, seq, start, col, full, tiles, stage, CONSUMERS: gl.constexpr = 1):
    """Copy a stage's tiles of `owner`, a bias or mask of pairs: one for each of so many consumers, side by side."""
    entry = copied_entry(owner, seq.batch)
    head = seq.head // owner.group
    for i in gl.static_range(CONSUMERS):
        copy(source, [entry, head, start, col + i * BLOCK_N], full, tiles.index(CONSUMERS * stage + i))


@gluon.jit
def no_lane_sums(BLOCK_M: gl.constexpr):
    """Sums by lane of no tile of BLOCK_M queries."""
    return lane_sums(gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, product_layout(BLOCK_M)))


@gluon.jit
def no_sums(DIM: gl.constexpr, DIM_V: gl.constexpr, BLOCK_M: gl.constexpr, OF_KEYS: gl.constexpr = True, OF_VALUES: gl.constexpr = True):
    """:class:`Sums` of no tile of BLOCK_M queries."""
    dk, dv = (), ()
    if OF_KEYS:
        dk = no_sums_of_rows(DIM)
    if OF_VALUES:
        dv = no_sums_of_rows(DIM_V)
    return Sums(dk, dv, no_lane_sums(BLOCK_M))


@gluon.jit
def turn_of(step, STAGES: gl.constexpr, which: gl.constexpr = 0, CONSUMERS: gl.constexpr = 1):
    """The :class:`Turn` of a step; each of so many consumers has tiles of bias and mask of its own beside the others'."""
    stage, phase = stage_of(step, STAGES)
    return Turn(stage, phase, stage * CONSUMERS + which, step)


@gluon.jit
def add_tile(context, seq, keys, sums, turn, start, config: gl.constexpr, EDGE: gl.constexpr, number=None):
    """`sums` and a tile of queries, `start` the first of them, as :class:`Sums`; pairs are hidden only at an EDGE.

    Of a launch's `config` DIM and DIM_V are asked. A `number` of a table of distances is that of all pairs; without it, each loads its own.
    """
    tiles, ones, barriers, rules = context.tiles, context.ones, context.barriers, context.rules
    BLOCK_M: gl.constexpr = tiles.q.shape[3]
    PAIRS: gl.constexpr = product_layout(BLOCK_M)
    OF_SCORES: gl.constexpr = len(sums.dv) > 0
    OF_D_SCORES: gl.constexpr = len(sums.dk) > 0
    AS_COLUMNS: gl.constexpr = are_columns(tiles.terms.dtype)
    MASK_OF_PAIRS: gl.constexpr = rules.mask_rows is not None and rules.mask_cols is not None
    BY_PAIRS: gl.constexpr = OF_SCORES and rules.table is not None and number is None
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_M]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))[:, None]  # [BLOCK_N, 1]
    kept, words = 1, 0
    if EDGE and OF_SCORES:
        words = words_of(rules, seq, start, context.col, BLOCK_M, KEYS_DOWN=True)
        if not MASK_OF_PAIRS:
            kept = mask_of(rules, seq, rows, cols, start, context.col)
    zero = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS)
    s, p, slope, d_p = zero, zero, None, zero
    if BY_PAIRS:
        s = numbers_of_pairs(rules, seq, start, context.col, [BLOCK_N, BLOCK_M], PAIRS, KEYS_DOWN=True)  # [BLOCK_N, BLOCK_M]
    mbarrier.wait(barriers.q_full.index(turn.stage), turn.phase)
    if OF_SCORES:
        # Loads that stand behind products are long in coming: these read all that shared memory gives.
        bias = _bias_of(context, keys, seq, turn, start, EDGE)  # [BLOCK_N, BLOCK_M], or broadcast to it
        s = product_under_way(context.k, pieces(tiles.q, turn.stage, config.DIM), s, BY_PAIRS)  # [BLOCK_N, BLOCK_M]
        if rules.bias_by_key is not None:
            s = warpgroup_mma(context.bias_columns, ones.keys.permute((1, 0)), s, is_async=True)
    if AS_COLUMNS:  # of consumers that make all sums
        term_columns = tiles.terms.index(turn.stage).reshape([BLOCK_M, COLUMNS]).permute((1, 0))  # [COLUMNS, BLOCK_M]
        s = warpgroup_mma(ones.scores, term_columns, s, is_async=True)
    mbarrier.wait(barriers.d_out_full.index(turn.stage), turn.phase)
    FOR_D_P: gl.constexpr = len(context.v) + (1 if AS_COLUMNS else 0)  # products
    if OF_D_SCORES:
        d_p = product_under_way(context.v, pieces(tiles.d_out, turn.stage, config.DIM_V), zero, False)  # [BLOCK_N, BLOCK_M]
        if AS_COLUMNS:
            d_p = warpgroup_mma(ones.d_p, term_columns, d_p, is_async=True)
    if OF_SCORES:
        if EDGE and MASK_OF_PAIRS:
            kept = _keys_down(tiles.mask, turn)
        if EDGE:
            words = turned(rules, words)
        divisor_rows = term_of(tiles.terms, 2 * turn.stage)  # [1, BLOCK_M]
        s = warpgroup_mma_wait(FOR_D_P if OF_D_SCORES else 0, [s])  # dP, and what is added to it, go on
        tanh = capped(s, rules)
        p = _probabilities(context, seq, keys, start, tanh, bias, kept, words, divisor_rows, number, EDGE)
        if rules.softcap is not None:
            slope = 1.0 - tanh * tanh
    if tiles.p is not None:
        p = _handed_over(context, turn, p, slope, OF_SCORES)
    sums = _added(context, seq, sums, turn, start, p, slope, d_p, config)
    mbarrier.arrive(barriers.free.index(turn.stage), count=1)
    return sums


@gluon.jit
def _keys_down(tiles, turn):
    """A turn's tile of pairs in shared memory, [BLOCK_M, BLOCK_N], in registers, keys down."""
    BLOCK_M: gl.constexpr = tiles.shape[3]
    return tiles.index(turn.pairs).reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(product_layout(BLOCK_M))


@gluon.jit
def _handed_over(context, turn, p, slope, OF_SCORES: gl.constexpr):
    """The probabilities of a tile for both consumers of the same keys: that of scores hands them to the other by shared memory.

    The other makes dS alone, and has them times the slope of scores by those without a softcap, if there is one.
    """
    tiles, barriers = context.tiles, context.barriers
    phase = turn.number & 1
    if OF_SCORES:
        mbarrier.wait(barriers.p.index(0), phase ^ 1)
        tiles.p.store((p if slope is None else p * slope).to(tiles.q.dtype))
        mbarrier.arrive(barriers.p.index(1), count=1)
    else:
        mbarrier.wait(barriers.p.index(1), phase)
        p = tiles.p.load(product_layout(tiles.q.shape[3])).to(gl.float32)
    return p


@gluon.jit
def _added(context, seq, sums, turn, start, p, slope, d_p, config: gl.constexpr):
    """`sums` and those of a tile, of its probabilities and of dP, which is under way. Its dBias is stored, too.

    The slope is that of scores by those without a softcap; None without one, or where probabilities were handed over. The tile's queries and
    dO in shared memory are not read any more afterwards.
    """
    tiles, results = context.tiles, context.results
    OF_SCORES: gl.constexpr = len(sums.dv) > 0
    OF_D_SCORES: gl.constexpr = len(sums.dk) > 0
    dk, dv, lanes = sums.dk, sums.dv, sums.lanes
    if results.d_v is not None:
        dv = _times_rows(p.to(tiles.q.dtype), column_pieces(tiles.d_out, turn.stage, config.DIM_V), dv)
    if OF_D_SCORES:
        if slope is not None and results.d_bias is None:
            p = p * slope  # before dP takes registers
        delta_rows = term_of(tiles.terms, 2 * turn.stage + 1)  # [1, BLOCK_M]
        d_p = warpgroup_mma_wait(0 if results.d_v is None else len(dv), [d_p])
        ds = p * (d_p - delta_rows)
        if results.d_k is not None:
            through = (ds if slope is None or results.d_bias is None else ds * slope).to(tiles.q.dtype)
            dk = _times_rows(through, column_pieces(tiles.q, turn.stage, config.DIM), dk)
            if tiles.ds is not None:
                leave_d_scores(context, turn.number, through)
        if results.key_sums is not None:
            lanes += lane_sums(ds)
            if results.d_k is None:
                lanes = looked_at(lanes)  # else no product waits for delta before its place is given back
        if results.d_bias is not None:
            store_d_bias(context, seq, start, ds)
        if tiles.p is not None:
            mbarrier.arrive(context.barriers.p.index(0), count=1)
    if not OF_SCORES:
        dk = waited(dk)
    elif not OF_D_SCORES:
        dv = waited(dv)
    elif len(dk) == 1:
        dk_whole, dv_whole = warpgroup_mma_wait(0, [dk[0], dv[0]])
        dk, dv = (dk_whole,), (dv_whole,)
    else:
        dk_first, dk_last, dv_first, dv_last = warpgroup_mma_wait(0, [dk[0], dk[1], dv[0], dv[1]])
        dk, dv = (dk_first, dk_last), (dv_first, dv_last)
    return Sums(dk, dv, lanes)


@gluon.jit
def _times_rows(pairs, tiles, sums):
    """`sums` with the products of pairs [BLOCK_N, BLOCK_M] and tiles of queries or dO, in pieces; they are under way."""
    made = ()
    for i in gl.static_range(len(tiles)):
        factor = gl.convert_layout(pairs, gl.DotOperandLayout(0, sums[i].type.layout, 2))
        made += (warpgroup_mma(factor, tiles[i], sums[i], is_async=True),)
    return made


@gluon.jit
def _probabilities(context, seq, keys, start, s, bias, kept, words, divisor_rows, number, EDGE: gl.constexpr):
    """The probabilities of a tile's products, [BLOCK_N, BLOCK_M], of which `kept` and `words` hide some at an EDGE."""
    rules = context.rules
    BLOCK_M: gl.constexpr = context.tiles.q.shape[3]
    PAIRS: gl.constexpr = product_layout(BLOCK_M)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_M]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))[:, None]  # [BLOCK_N, 1]
    rows2, middle2 = 0, keys.middle2
    if EDGE and rules.first is not None:  # what differs by lane joins the middle, for a lane to have constants in its registers' places
        rows2 = (2 * (rows & ~6)).to(gl.float32)  # [1, BLOCK_M]
        middle2 = middle2 - (2 * (start + (rows & 6))).to(gl.float32)  # [BLOCK_N, BLOCK_M]
    if number is not None:
        divisor_rows = divisor_rows - number * exponent_factor(rules)
    s = ruled(s, bias, Hiding(kept, rows2, middle2, keys.length, words), rules, seq, start + rows, context.col + cols, EDGE)
    if EDGE and rules.ends is not None:  # a bias past the last query may be NaN
        s = up_to(s, start + rows, seq.len_q - 1)
    exponents = s * exponent_factor(rules) - divisor_rows
    OF_PAIRS: gl.constexpr = (rules.bias is not None and rules.bias_by_key is None) or rules.table is not None
    if are_columns(context.tiles.terms.dtype) and OF_PAIRS and context.tiles.q.dtype.is_fp16():
        exponents = gl.where(exponents > 1.0, 1.0, exponents)  # of a row far from 0 they are rounded to more than 16 bits may hold
    return gl.exp2(exponents)


@gluon.jit
def store_d_bias(context, seq, start, ds):
    """dS of a tile, keys down, to its place in dBias by way of shared memory."""
    d_bias, d_bias_tile = context.results.d_bias, context.tiles.d_bias.index(context.which)
    BLOCK_M: gl.constexpr = context.tiles.q.shape[3]
    rows_down = d_bias_tile.reshape([BLOCK_M, BLOCK_N])
    if is_descriptor(d_bias.type):
        tma.store_wait(0)  # the copy engine has read what the tile held
        rows_down.permute((1, 0)).store(ds.to(d_bias_tile.dtype))
        fence_async_shared()
        store(d_bias, [seq.batch, seq.head, start, context.col], d_bias_tile)
    else:
        rows_down.permute((1, 0)).store(ds.to(d_bias_tile.dtype))
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))[:, None]  # [BLOCK_M, 1]
        cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, BLOCK_N]
        pointers = slice_pointer(d_bias, seq) + gl.cast(context.col, gl.int64) * d_bias.col
        pointers = (pointers + (start + rows).to(gl.int64) * d_bias.row) + cols * d_bias.col
        gl.store(pointers, rows_down.load(LAYOUT), mask=(rows < seq.len_q - start) & (cols < seq.len_k - context.col))


@gluon.jit
def uniform_bias_of(rules, seq):
    """The bias of a sequence times LOG2E where that is one number; else 0."""
    if rules.bias is None or rules.bias_rows is not None or rules.bias_cols is not None:
        return 0.0
    else:
        return gl.load(slice_pointer(rules.bias, seq)).to(gl.float32) * LOG2E


@gluon.jit
def _bias_of(context, keys, seq, turn, start, EDGE: gl.constexpr):
    """The bias of one tile, keys down, as `ruled` takes it: [BLOCK_N, BLOCK_M], or 1 where it is broadcast."""
    rules = context.rules
    BLOCK_M: gl.constexpr = context.tiles.q.shape[3]
    PAIRS: gl.constexpr = product_layout(BLOCK_M)
    if rules.bias is None or rules.bias_rows is None:
        return keys.bias
    elif rules.bias_cols is not None and context.tiles.bias is None:
        rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_M]
        cols = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))[:, None]  # [BLOCK_N, 1]
        return load_pairs(rules.bias, seq, rows, cols, start, context.col, EDGE)
    elif rules.bias_cols is not None:
        return _keys_down(context.tiles.bias, turn)
    else:
        bias = load_vector(rules.bias, rules.bias.row, seq, start, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(0, PAIRS))[None, :]
        return bias.to(gl.float32) * LOG2E
