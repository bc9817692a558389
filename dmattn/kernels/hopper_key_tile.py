"""dK and dV on Hopper (sm_90), what hopper_key_grad.py and hopper_key_grad_intervals.py share: one tile of queries.

Scores stand with keys down, so that the sums over queries take them for their left factor from registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper import copy, store, tiled_vectors
from .hopper_lift import ones_for_lifts, tiled_lifts
from .hopper_registers import Hiding, exponent_factor, lane_sums, load_vector, looked_at, mask_of, ruled
from .layout import slice_pointer
from .lift import COLUMNS
from .row_terms import Incoming
from .scores import LOG2E
from .sequence import next_step

BLOCK_M = gl.constexpr(64)  # queries of a tile
BLOCK_N = gl.constexpr(64)  # keys of a consumer


def tiled_terms(incoming: Incoming) -> TensorDescriptor:
    """The terms of tiles of queries as the copy engine takes them: as lifts, if there are some."""
    if incoming.lifts is None:
        return tiled_vectors(incoming.terms, 2, BLOCK_M.value)
    return tiled_lifts(incoming.lifts, BLOCK_M.value)


@gluon.constexpr_function
def holds_lifts(dtype):
    """Whether terms that arrive in a kernel are lifts, which alone are of 16 bits."""
    return dtype == gl.bfloat16


@gluon.jit
def allocate_terms(terms, STAGES: gl.constexpr):
    """Shared memory for the terms of STAGES tiles of queries."""
    if holds_lifts(terms.dtype):
        return gl.allocate_shared_memory(terms.dtype, [STAGES, 1, 1, BLOCK_M, COLUMNS], terms.layout)
    else:
        return gl.allocate_shared_memory(terms.dtype, [STAGES, 1, 1, 2, BLOCK_M], terms.layout)


@gluon.jit
def copy_terms(terms, batch, head, start, full, terms_tile):
    """Copy the terms of a tile of queries."""
    if holds_lifts(terms.dtype):
        copy(terms, [batch, head, start, 0], full, terms_tile)
    else:
        copy(terms, [batch, head, 0, start], full, terms_tile)


@gluon.jit
def _term_of(terms_tiles, number, PAIRS: gl.constexpr):
    """One of the terms of a tile of queries, across; 0 where products add it."""
    if holds_lifts(terms_tiles.dtype):
        return 0.0
    else:
        vectors = terms_tiles._reinterpret(gl.float32, [2 * terms_tiles.shape[0], BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return vectors.index(number).load(gl.SliceLayout(0, PAIRS))[None, :]


@gluon.jit
def ones_for_terms(terms, unused):
    """What lifts of queries meet in the products for scores and for dP; two `unused` ones if the terms are no lifts. A fence has to follow."""
    if holds_lifts(terms.dtype):
        return ones_for_lifts(BLOCK_N), ones_for_lifts(BLOCK_N, 3)
    else:
        return unused, unused


@gluon.jit
def tile(
    fixed, seq, per_key, dk, dv, sums, turn, place, start, col,
    PAIRS: gl.constexpr, FACTOR: gl.constexpr, DIM: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """One tile of queries added to (dk, dv, sums).

    `turn` is (its stage, the parity of how often that was used), `place` where among the tiles of bias and mask, and of dBias, the consumer's
    are; `per_key` is what does not depend on the query: a bias that is one number, and of the keys' intervals twice the middle and the length.
    """
    uniform_bias, middle2, length = per_key
    k_tile, v_tile, lifting, tiles, ready, rules, results = fixed
    lifts, ones, lowered = lifting
    q_tiles, terms_tiles, bias_tiles, mask_tiles, d_out_tiles, d_bias_tiles = tiles
    q_full, d_out_full, free = ready
    d_k, d_v, key_sums, d_bias = results
    stage, phase = turn
    of_tile, of_consumer = place
    LIFTED: gl.constexpr = holds_lifts(terms_tiles.dtype)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, PAIRS))[None, :]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))[:, None]
    kept = 1
    if EDGE and (rules.mask_rows is None or rules.mask_cols is None):
        kept = mask_of(rules, seq, rows, cols, start, col)
    mbarrier.wait(q_full.index(stage), phase)
    # Loads that stand behind products are long in coming: these read all that shared memory gives.
    bias = _bias_of(uniform_bias, bias_tiles.index(of_tile), rules, seq, start, PAIRS)
    q_tile = q_tiles.index(stage).reshape([BLOCK_M, DIM])
    zero = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if rules.bias_by_key is not None:
        s = warpgroup_mma(lifts, ones.permute((1, 0)), s, is_async=True)
    if LIFTED:
        of_scores, of_d_p = lowered
        query_lifts = terms_tiles.index(stage).reshape([BLOCK_M, COLUMNS]).permute((1, 0))
        s = warpgroup_mma(of_scores, query_lifts, s, is_async=True)
    mbarrier.wait(d_out_full.index(stage), phase)
    d_out_tile = d_out_tiles.index(stage).reshape([BLOCK_M, DIM])
    d_p = warpgroup_mma(v_tile, d_out_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if LIFTED:
        d_p = warpgroup_mma(of_d_p, query_lifts, d_p, is_async=True)
    if EDGE and rules.mask_rows is not None and rules.mask_cols is not None:
        kept = mask_tiles.index(of_tile).reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(PAIRS)
    divisor_rows = _term_of(terms_tiles, 2 * stage, PAIRS)
    s = warpgroup_mma_wait(2 if LIFTED else 1, [s])  # dP, and what is added to it, go on
    rows2 = 0
    if EDGE and rules.first is not None:  # what differs by lane joins the middle, for a lane to have constants in its registers' places
        rows2 = (2 * (rows & ~6)).to(gl.float32)
        middle2 = middle2 - (2 * (start + (rows & 6))).to(gl.float32)
    s = ruled(s, bias, Hiding(kept, rows2, middle2, length), rules, seq, start + rows, col + cols, EDGE)
    exponents = s * exponent_factor(rules) - divisor_rows
    if LIFTED and rules.bias is not None and rules.bias_by_key is None and q_tiles.dtype.is_fp16():
        exponents = gl.where(exponents > 1.0, 1.0, exponents)  # of a row far from 0 they are rounded to more than 16 bits may hold
    p = gl.exp2(exponents)
    if d_v is not None:
        dv = warpgroup_mma(gl.convert_layout(p.to(q_tiles.dtype), FACTOR), d_out_tile, dv, is_async=True)
    delta_rows = _term_of(terms_tiles, 2 * stage + 1, PAIRS)
    d_p = warpgroup_mma_wait(0 if d_v is None else 1, [d_p])
    ds = p * (d_p - delta_rows)
    if d_k is not None:
        dk = warpgroup_mma(gl.convert_layout(ds.to(q_tiles.dtype), FACTOR), q_tile, dk, is_async=True)
    if key_sums is not None:
        sums += lane_sums(ds)
        if d_k is None:
            sums = looked_at(sums)  # else no product waits for delta before its place is given back
    if d_bias is not None:
        store_tile(d_bias, d_bias_tiles.index(of_consumer), ds, seq, start, col)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(free.index(stage), count=1)
    return dk, dv, sums


@gluon.jit
def open_queries(rules, seq, col, begin, end):
    """[begin, end) of the tiles of which no pair is hidden, in steps of BLOCK_M from the given begin."""
    offset = seq.len_k - seq.len_q
    last = next_step(begin, end, BLOCK_M)
    open_begin = begin
    if rules.right is not None:
        open_begin = next_step(begin, col + BLOCK_N - 1 - offset - rules.right, BLOCK_M)
    open_begin = gl.where(col + BLOCK_N > seq.len_k, last, gl.minimum(open_begin, last))
    open_end = last
    if rules.left is not None:
        open_end = next_step(begin, col + rules.left - offset - BLOCK_M + 2, BLOCK_M)
    return open_begin, gl.minimum(gl.maximum(open_end, open_begin), last)


@gluon.jit
def store_tile(d_bias, buffer, ds, seq, start, col):
    """dS of a tile, keys down, to its place in dBias, by way of shared memory."""
    tma.store_wait(0)  # the copy engine has read what the buffer held
    buffer.reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).store(ds.to(d_bias.dtype))
    fence_async_shared()
    store(d_bias, [seq.batch, seq.head, start, col], buffer)


@gluon.jit
def uniform_bias_of(rules, seq):
    """The bias of a sequence times LOG2E where that is one number; else 0."""
    if rules.bias is None or rules.bias_rows is not None or rules.bias_cols is not None:
        return 0.0
    else:
        return gl.load(slice_pointer(rules.bias, seq)).to(gl.float32) * LOG2E


@gluon.jit
def _bias_of(uniform_bias, bias_tile, rules, seq, start, PAIRS: gl.constexpr):
    """The bias of one tile, keys down, as `ruled` takes it: [BLOCK_N, BLOCK_M], or 1 where it is broadcast."""
    if rules.bias is None or rules.bias_rows is None:
        return uniform_bias
    elif rules.bias_cols is not None:
        return bias_tile.reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(PAIRS)
    else:
        bias = load_vector(rules.bias, rules.bias.row, seq, start, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(0, PAIRS), False)[None, :]
        return bias.to(gl.float32) * LOG2E
