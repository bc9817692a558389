"""dK and dV on Hopper (sm_90): one tile of queries, as hopper/key_grad.py and hopper/key_grad_intervals.py add it, and their types.

Scores stand with keys down, so that the sums over queries take them for their left factor from registers.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..base.bias_columns import COLUMNS
from ..base.layout import copied_entry, slice_pointer
from ..base.query_terms import Incoming
from ..base.rules import LOG2E
from .bias_columns import tiled_columns
from .copies import copy, stage_of, store, tiled_vectors
from .distances import add_apart, numbers_of
from .registers import Hiding, exponent_factor, lane_sums, load_vector, looked_at, mask_of, ruled, words_of

BLOCK_M = gl.constexpr(64)  # queries of a tile
BLOCK_N = gl.constexpr(64)  # keys of a consumer
PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M.value, 16]))  # of [BLOCK_N, BLOCK_M] in registers: keys down


class Tiles(NamedTuple):
    """Tiles in shared memory; None where a problem has none of the kind."""

    k: Any  # [CONSUMERS, 1, 1, BLOCK_N, DIM]; without the first axis where consumers share their keys
    v: Any  # the same
    bias_columns: Any  # for each consumer [BLOCK_N, COLUMNS], of a bias of keys
    q: Any  # [STAGES, 1, 1, BLOCK_M, DIM]
    terms: Any  # [STAGES, 1, 1, BLOCK_M, COLUMNS] if they are columns, else [STAGES, 1, 1, 2, BLOCK_M]
    d_out: Any  # [STAGES, 1, 1, BLOCK_M, DIM]
    bias: Any = None  # of pairs, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N]; [STAGES, ...] where consumers share their keys
    mask: Any = None  # of pairs, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N]
    d_bias: Any = None  # [CONSUMERS, 1, 1, BLOCK_M, BLOCK_N]


class Ones(NamedTuple):
    """Tiles of ones that columns meet in products, in shared memory or registers; None where there are no such columns."""

    keys: Any  # [BLOCK_M, COLUMNS], for those of keys in the products for scores
    scores: Any  # [BLOCK_N, COLUMNS], for those of queries in the products for scores
    d_p: Any  # [BLOCK_N, COLUMNS], for those of queries in the products for dP


class Barriers(NamedTuple):
    """Barriers of a program: full when copies have come, free when they have been read."""

    kv_full: Any  # [1, 1], of keys and values
    q_full: Any  # [STAGES, 1], of queries, terms and bias
    d_out_full: Any  # [STAGES, 1], of dO and mask
    free: Any  # [STAGES, 1], of all tiles of a stage


class Sources(NamedTuple):
    """Tensor descriptors of the tensors that are copied in tiles of queries; None where a problem has no such tensor."""

    q: Any
    terms: Any
    d_out: Any
    bias: Any = None
    mask: Any = None


class Results(NamedTuple):
    """Tensors to be written: a tensor descriptor of dBias, Strided of all else; None where nobody asked for it."""

    d_k: Any
    d_v: Any
    key_sums: Any
    d_bias: Any


class Context(NamedTuple):
    """A consumer's block of keys, the tiles that it meets, and the results that it makes."""

    k: Any  # [BLOCK_N, DIM], in shared memory
    v: Any  # [BLOCK_N, DIM], in shared memory
    bias_columns: Any  # [BLOCK_N, COLUMNS], in shared memory
    ones: Any  # :class:`Ones`
    tiles: Any  # :class:`Tiles`
    barriers: Any  # :class:`Barriers`
    rules: Any
    results: Any  # :class:`Results`
    col: Any  # the first of the keys
    which: Any  # the consumer's number, a constexpr


class Keys(NamedTuple):
    """Numbers that are the same for all queries of a head, and may differ by key."""

    bias: Any  # the bias times LOG2E where it is one number for all pairs; else 0
    middle2: Any = 0  # [BLOCK_N, 1], twice the middle of a key's interval; as the next, where keys have intervals
    length: Any = 0  # [BLOCK_N, 1], and its length


class Sums(NamedTuple):
    """Running sums over queries in float32."""

    dk: Any  # [BLOCK_N, DIM], without the scale
    dv: Any  # [BLOCK_N, DIM]
    lanes: Any  # [BLOCK_N, 4], of dS by lane (`lane_sums`)


class Turn(NamedTuple):
    """Where the tiles of a step stand in shared memory."""

    stage: Any  # which of those of queries, terms and dO
    phase: Any  # the parity of how often the stage was used before
    pairs: Any  # which of those of bias and mask


def tiled_terms(incoming: Incoming) -> TensorDescriptor:
    """The terms of tiles of queries as the copy engine takes them: as columns, if there are some."""
    if incoming.term_columns is None:
        return tiled_vectors(incoming.terms, 2, BLOCK_M.value)
    return tiled_columns(incoming.term_columns, BLOCK_M.value)


@gluon.constexpr_function
def are_columns(dtype):
    """Whether terms that arrive in a kernel are columns, which alone are of 16 bits."""
    return dtype == gl.bfloat16


@gluon.jit
def allocate_terms(terms, STAGES: gl.constexpr):
    """Shared memory for the terms of STAGES tiles of queries."""
    if are_columns(terms.dtype):
        return gl.allocate_shared_memory(terms.dtype, [STAGES, 1, 1, BLOCK_M, COLUMNS], terms.layout)
    else:
        return gl.allocate_shared_memory(terms.dtype, [STAGES, 1, 1, 2, BLOCK_M], terms.layout)


@gluon.jit
def copy_terms(terms, batch, head, start, full, terms_tile):
    """Copy the terms of a tile of queries."""
    if are_columns(terms.dtype):
        copy(terms, [batch, head, start, 0], full, terms_tile)
    else:
        copy(terms, [batch, head, 0, start], full, terms_tile)


@gluon.jit
def copy_pairs(source, owner, seq, start, col, full, tiles, stage, CONSUMERS: gl.constexpr = 1):
    """Copy a stage's tiles of `owner`, a bias or mask of pairs: one for each of so many consumers, side by side."""
    entry = copied_entry(owner, seq.batch)
    head = seq.head // owner.group
    for i in gl.static_range(CONSUMERS):
        copy(source, [entry, head, start, col + i * BLOCK_N], full, tiles.index(CONSUMERS * stage + i))


@gluon.constexpr_function
def sums_layout(dim):
    """The layout of sums [BLOCK_N, dim] in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])


@gluon.jit
def no_lane_sums():
    """Sums by lane of nothing."""
    return lane_sums(gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS))


@gluon.jit
def no_sums(DIM: gl.constexpr):
    """:class:`Sums` of nothing."""
    SUMS: gl.constexpr = sums_layout(DIM)
    dk = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
    dv = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
    return Sums(dk, dv, no_lane_sums())


@gluon.jit
def _term_of(terms_tiles, number):
    """One of the terms of a tile of queries, [1, BLOCK_M]; 0 where products add it."""
    if are_columns(terms_tiles.dtype):
        return 0.0
    else:
        vectors = terms_tiles._reinterpret(gl.float32, [2 * terms_tiles.shape[0], BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return vectors.index(number).load(gl.SliceLayout(0, PAIRS))[None, :]


@gluon.jit
def turn_of(step, STAGES: gl.constexpr, which: gl.constexpr = 0, CONSUMERS: gl.constexpr = 1):
    """The :class:`Turn` of a step; each of so many consumers has tiles of bias and mask of its own beside the others'."""
    stage, phase = stage_of(step, STAGES)
    return Turn(stage, phase, stage * CONSUMERS + which)


@gluon.jit
def add_tile(context, seq, keys, sums, turn, start, EDGE: gl.constexpr):
    """`sums` and a tile of queries, `start` the first of them, as :class:`Sums`; pairs are hidden only at an EDGE."""
    tiles, ones, barriers, rules, results = context.tiles, context.ones, context.barriers, context.rules, context.results
    DIM: gl.constexpr = context.k.shape[1]
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, sums_layout(DIM), 2)
    AS_COLUMNS: gl.constexpr = are_columns(tiles.terms.dtype)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_M]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))[:, None]  # [BLOCK_N, 1]
    kept, words = 1, 0
    if EDGE:
        words = words_of(rules, seq, start, context.col, BLOCK_M, KEYS_DOWN=True)
    if EDGE and (rules.mask_rows is None or rules.mask_cols is None):
        kept = mask_of(rules, seq, rows, cols, start, context.col)
    if rules.table is not None:
        numbers = numbers_of(rules, seq, start, context.col, BLOCK_M, BLOCK_N)
    mbarrier.wait(barriers.q_full.index(turn.stage), turn.phase)
    # Loads that stand behind products are long in coming: these read all that shared memory gives.
    bias = _bias_of(context, keys, seq, turn, start)  # [BLOCK_N, BLOCK_M], or broadcast to it
    q_tile = tiles.q.index(turn.stage).reshape([BLOCK_M, DIM])
    zero = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS)
    s = warpgroup_mma(context.k, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)  # [BLOCK_N, BLOCK_M]
    if rules.bias_by_key is not None:
        s = warpgroup_mma(context.bias_columns, ones.keys.permute((1, 0)), s, is_async=True)
    if AS_COLUMNS:
        term_columns = tiles.terms.index(turn.stage).reshape([BLOCK_M, COLUMNS]).permute((1, 0))  # [COLUMNS, BLOCK_M]
        s = warpgroup_mma(ones.scores, term_columns, s, is_async=True)
    mbarrier.wait(barriers.d_out_full.index(turn.stage), turn.phase)
    d_out_tile = tiles.d_out.index(turn.stage).reshape([BLOCK_M, DIM])
    d_p = warpgroup_mma(context.v, d_out_tile.permute((1, 0)), zero, use_acc=False, is_async=True)  # [BLOCK_N, BLOCK_M]
    if AS_COLUMNS:
        d_p = warpgroup_mma(ones.d_p, term_columns, d_p, is_async=True)
    if EDGE and rules.mask_rows is not None and rules.mask_cols is not None:
        kept = tiles.mask.index(turn.pairs).reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(PAIRS)  # [BLOCK_N, BLOCK_M]
    divisor_rows = _term_of(tiles.terms, 2 * turn.stage)  # [1, BLOCK_M]
    s = warpgroup_mma_wait(2 if AS_COLUMNS else 1, [s])  # dP, and what is added to it, go on
    rows2, middle2 = 0, keys.middle2
    if EDGE and rules.first is not None:  # what differs by lane joins the middle, for a lane to have constants in its registers' places
        rows2 = (2 * (rows & ~6)).to(gl.float32)  # [1, BLOCK_M]
        middle2 = middle2 - (2 * (start + (rows & 6))).to(gl.float32)  # [BLOCK_N, BLOCK_M]
    if rules.table is not None:
        s = add_apart(s, numbers, rows, cols)
        if EDGE:
            s += numbers.number
        else:
            divisor_rows = divisor_rows - numbers.number * exponent_factor(rules)
    s = ruled(s, bias, Hiding(kept, rows2, middle2, keys.length, words), rules, seq, start + rows, context.col + cols, EDGE)
    exponents = s * exponent_factor(rules) - divisor_rows
    OF_PAIRS: gl.constexpr = (rules.bias is not None and rules.bias_by_key is None) or rules.table is not None
    if AS_COLUMNS and OF_PAIRS and tiles.q.dtype.is_fp16():
        exponents = gl.where(exponents > 1.0, 1.0, exponents)  # of a row far from 0 they are rounded to more than 16 bits may hold
    p = gl.exp2(exponents)
    dk, dv, lanes = sums.dk, sums.dv, sums.lanes
    if results.d_v is not None:
        dv = warpgroup_mma(gl.convert_layout(p.to(tiles.q.dtype), FACTOR), d_out_tile, dv, is_async=True)
    delta_rows = _term_of(tiles.terms, 2 * turn.stage + 1)  # [1, BLOCK_M]
    d_p = warpgroup_mma_wait(0 if results.d_v is None else 1, [d_p])
    ds = p * (d_p - delta_rows)
    if results.d_k is not None:
        dk = warpgroup_mma(gl.convert_layout(ds.to(tiles.q.dtype), FACTOR), q_tile, dk, is_async=True)
    if results.key_sums is not None:
        lanes += lane_sums(ds)
        if results.d_k is None:
            lanes = looked_at(lanes)  # else no product waits for delta before its place is given back
    if results.d_bias is not None:
        store_d_bias(context, seq, start, ds)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(barriers.free.index(turn.stage), count=1)
    return Sums(dk, dv, lanes)


@gluon.jit
def store_d_bias(context, seq, start, ds):
    """dS of a tile, keys down, to its place in dBias, by way of shared memory."""
    d_bias, d_bias_tile = context.results.d_bias, context.tiles.d_bias.index(context.which)
    tma.store_wait(0)  # the copy engine has read what the tile held
    d_bias_tile.reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).store(ds.to(d_bias.dtype))
    fence_async_shared()
    store(d_bias, [seq.batch, seq.head, start, context.col], d_bias_tile)


@gluon.jit
def uniform_bias_of(rules, seq):
    """The bias of a sequence times LOG2E where that is one number; else 0."""
    if rules.bias is None or rules.bias_rows is not None or rules.bias_cols is not None:
        return 0.0
    else:
        return gl.load(slice_pointer(rules.bias, seq)).to(gl.float32) * LOG2E


@gluon.jit
def _bias_of(context, keys, seq, turn, start):
    """The bias of one tile, keys down, as `ruled` takes it: [BLOCK_N, BLOCK_M], or 1 where it is broadcast."""
    rules = context.rules
    if rules.bias is None or rules.bias_rows is None:
        return keys.bias
    elif rules.bias_cols is not None:
        return context.tiles.bias.index(turn.pairs).reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(PAIRS)
    else:
        bias = load_vector(rules.bias, rules.bias.row, seq, start, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(0, PAIRS), EVEN=False)[None, :]
        return bias.to(gl.float32) * LOG2E
