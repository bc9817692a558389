"""dK and dV on Hopper (sm_90), what hopper_key_grad.py and hopper_key_grad_intervals.py share: one tile of queries, and what is copied for it.

Scores stand with keys down, so that the sums over queries take them for their left factor from registers.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..replay import launch
from .hopper import store, tiled_vectors
from .hopper_registers import exponent_factor, load_vector, mask_of, ruled
from .layout import Sequence, Span, load_rows, slice_pointer, strided
from .scores import LOG2E
from .sequence import next_step, place
from .softmax import divisor2

BLOCK_M = gl.constexpr(64)  # queries of a tile
BLOCK_N = gl.constexpr(64)  # keys of a consumer


def packed_rows(lse: Tensor, delta: Tensor) -> TensorDescriptor:
    """For each block of queries what scores are lessened by (`divisor2`), then delta, as the copy engine takes them."""
    batch, heads, len_q = lse.shape
    blocks = triton.cdiv(len_q, BLOCK_M.value)
    packed = lse.new_empty((batch, heads, blocks, 2 * BLOCK_M.value))
    launch(
        _packed_rows_kernel,
        blocks * heads * batch,
        lse=strided(lse, heads),
        delta=strided(delta, heads),
        packed=strided(packed, heads),
        heads=heads,
        len_q=len_q,
        BLOCK_M=BLOCK_M.value,
        num_warps=1,
    )
    return tiled_vectors(packed)


@triton.jit
def _packed_rows_kernel(lse, delta, packed, heads, len_q, BLOCK_M: tl.constexpr):
    """One program: one block of queries of one (batch, head). A query past the end has no probabilities."""
    block, head, batch = place(len_q, heads, BLOCK_M)
    seq = Sequence(batch, head, len_q, 0)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M), len_q)
    pointers = slice_pointer(packed, seq) + tl.cast(block, tl.int64) * packed.row + tl.arange(0, BLOCK_M)
    tl.store(pointers, divisor2(load_rows(lse, seq, rows, float("-inf"))))
    tl.store(pointers + BLOCK_M, load_rows(delta, seq, rows, 0.0))


@gluon.jit
def tile(
    fixed, seq, per_key, dk, dv, sums, turn, place, start, col,
    PAIRS: gl.constexpr, FACTOR: gl.constexpr, DIM: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """One tile of queries added to (dk, dv, sums).

    `turn` is (its stage, the parity of how often that was used), `place` where among the tiles of bias and mask, and of dBias, the consumer's
    are; `per_key` is what the keys have that does not depend on the query: their bias, and of their intervals twice the middle and the length.
    """
    key_bias, middle2, length = per_key
    k_tile, v_tile, tiles, ready, rules, results = fixed
    q_tiles, packed_tiles, bias_tiles, mask_tiles, d_out_tiles, d_bias_tiles = tiles
    q_full, d_out_full, free = ready
    d_k, d_v, key_sums, d_bias = results
    stage, phase = turn
    of_tile, of_consumer = place
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, PAIRS))[None, :]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))[:, None]
    kept = 1
    if EDGE and (rules.mask_rows is None or rules.mask_cols is None):
        kept = mask_of(rules, seq, rows, cols, start, col)
    mbarrier.wait(q_full.index(stage), phase)
    q_tile = q_tiles.index(stage).reshape([BLOCK_M, DIM])
    zero = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(d_out_full.index(stage), phase)
    d_out_tile = d_out_tiles.index(stage).reshape([BLOCK_M, DIM])
    d_p = warpgroup_mma(v_tile, d_out_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if EDGE and rules.mask_rows is not None and rules.mask_cols is not None:
        kept = mask_tiles.index(of_tile).reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(PAIRS)
    bias = _bias_of(key_bias, bias_tiles.index(of_tile), rules, seq, start, PAIRS)
    row_vectors = packed_tiles._reinterpret(gl.float32, [2 * packed_tiles.shape[0], BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    divisor_rows = row_vectors.index(2 * stage).load(gl.SliceLayout(0, PAIRS))
    s = warpgroup_mma_wait(1, [s])
    s = ruled(s, bias, (kept, middle2, length), rules, seq, start + rows, col + cols, EDGE)
    p = gl.exp2(s * exponent_factor(rules) - divisor_rows[None, :])
    if d_v is not None:
        dv = warpgroup_mma(gl.convert_layout(p.to(q_tiles.dtype), FACTOR), d_out_tile, dv, is_async=True)
    delta_rows = row_vectors.index(2 * stage + 1).load(gl.SliceLayout(0, PAIRS))
    d_p = warpgroup_mma_wait(0 if d_v is None else 1, [d_p])
    ds = p * (d_p - delta_rows[None, :])
    if d_k is not None:
        dk = warpgroup_mma(gl.convert_layout(ds.to(q_tiles.dtype), FACTOR), q_tile, dk, is_async=True)
    if key_sums is not None:
        sums += gl.sum(ds, 1)
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
def bias_by_key(rules, seq, col, PAIRS: gl.constexpr):
    """The bias of a block of keys times LOG2E, [BLOCK_N, 1], where it does not depend on the query; else 0."""
    if rules.bias is None or rules.bias_rows is not None:
        return 0.0
    elif rules.bias_cols is None:
        return gl.load(slice_pointer(rules.bias, seq)).to(gl.float32) * LOG2E
    else:
        bias = load_vector(rules.bias, rules.bias.col, seq, col, seq.len_k, 0.0, BLOCK_N, gl.SliceLayout(1, PAIRS), False)[:, None]
        return bias.to(gl.float32) * LOG2E


@gluon.jit
def _bias_of(key_bias, bias_tile, rules, seq, start, PAIRS: gl.constexpr):
    """The bias of one tile, keys down, as `ruled` takes it: [BLOCK_N, BLOCK_M], or 1 where it is broadcast."""
    if rules.bias is None or rules.bias_rows is None:
        return key_bias
    elif rules.bias_cols is not None:
        return bias_tile.reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(PAIRS)
    else:
        bias = load_vector(rules.bias, rules.bias.row, seq, start, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(0, PAIRS), False)[None, :]
        return bias.to(gl.float32) * LOG2E
