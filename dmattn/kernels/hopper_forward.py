"""The forward pass on Hopper (sm_90) for head dims from 65 to 128, in Gluon: copies, matrix products and softmax overlap.

A program has three parts that run side by side: two consumers of 64 queries each, and a producer that copies tiles of keys, values and bias
to shared memory ahead of them. A consumer issues Q K^T of one tile together with P V of the tile before, and computes the softmax of the
first while the second still runs (as FlashAttention-3 does: Shah et al., 2024, https://arxiv.org/abs/2407.08608). Rules on pairs are those
of scores.py, spelled for Gluon. What `takes` refuses goes through forward.py.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper import CONSUMER_REGISTERS, LAUNCH_REGISTERS, PRODUCER_REGISTERS, barriers, copy, load_vector, of_pairs, ruled, serves, tiled
from .layout import Sequence, Span, slice_pointer, strided
from .scores import LOG2E, rules_of
from .sequence import next_step, place_sharing, window_range
from .softmax import softmax_step

# NVIDIA H200, 2026-11-21: 128 keys and 2 stages were faster than 64 keys and 2 or 3 stages on every workload with head dim 128.
BLOCK_M = gl.constexpr(64)  # queries of a consumer
BLOCK_N = gl.constexpr(128)
DIM = gl.constexpr(128)  # head dims are padded to it as they are copied
STAGES = gl.constexpr(2)  # tiles of keys, values and bias in shared memory


def takes(problem: Any) -> bool:
    """Whether `forward` takes a problem. Head dims to 64 are as fast in forward.py: there exp takes longer than the products."""
    return serves(problem, (DIM.value,))


def forward(problem: Any, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq) of a problem that it takes."""
    batch, heads, len_q, _ = problem.query.shape
    kv_heads, len_k, value_dim = problem.value.shape[1:]
    _forward_kernel[(triton.cdiv(len_q, 2 * BLOCK_M.value) * heads * batch,)](
        q=tiled(problem.query, BLOCK_M.value, DIM.value),
        k=tiled(problem.key, BLOCK_N.value, DIM.value),
        v=tiled(problem.value, BLOCK_N.value, DIM.value),
        bias=tiled(problem.bias if of_pairs(problem.bias) else None, BLOCK_M.value, BLOCK_N.value),
        rules=rules_of(problem),
        out=strided(out, heads),
        lse=strided(lse, heads),
        heads=heads,
        groups=heads // kv_heads,
        len_q=len_q,
        len_k=len_k,
        VALUE_DIM=value_dim,
        EVEN_N=len_k % BLOCK_N.value == 0,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
    )


@gluon.jit
def _forward_kernel(q, k, v, bias, rules, out, lse, heads, groups, len_q, len_k, VALUE_DIM: gl.constexpr, EVEN_N: gl.constexpr):
    """One program: out and lse of 2 BLOCK_M queries of one (batch, head), from a grid of one axis.

    q, k, v and bias (of pairs) are tensor descriptors; any other bias is read from rules.
    """
    block, head, batch = place_sharing(rules.shared, len_q, heads, 2 * BLOCK_M)
    if rules.right is not None:  # the last queries see the most keys: they begin first
        block = gl.cdiv(len_q, 2 * BLOCK_M) - 1 - block
    seq = Sequence(batch, head, len_q, len_k)
    row = block * (2 * BLOCK_M)
    begin, end = window_range(rules.left, rules.right, seq, Span(row, 0, None), 2 * BLOCK_M)
    begin = begin // BLOCK_N * BLOCK_N
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles = k_tiles
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES * 2, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    q_full = barriers(1, 1)
    k_full = barriers(STAGES, 1)
    k_free = barriers(STAGES, 2)
    v_full = barriers(STAGES, 1)
    v_free = barriers(STAGES, 2)
    fence_async_shared()
    mbarrier.expect(q_full.index(0), 2 * q.block_type.nbytes)
    copy(q, [batch, head, row, 0], q_full.index(0), q_tiles.index(0))
    copy(q, [batch, head, row + BLOCK_M, 0], q_full.index(0), q_tiles.index(1))
    tiles = (q_tiles, k_tiles, v_tiles, bias_tiles)
    ready = (q_full, k_full, k_free, v_full, v_free)
    gl.warp_specialize(
        [
            (_consume, (tiles, ready, rules, out, lse, seq, row, begin, end, 0, VALUE_DIM, EVEN_N)),
            (_consume, (tiles, ready, rules, out, lse, seq, row, begin, end, 1, VALUE_DIM, EVEN_N)),
            (_produce, (k, v, bias, tiles, ready, rules, seq, head // groups, row, begin, end)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(k, v, bias, tiles, ready, rules, seq, kv_head, row, begin, end):
    """Copy tiles of keys, values and bias to shared memory, as far ahead as there are free stages."""
    _, k_tiles, v_tiles, bias_tiles = tiles
    _, k_full, k_free, v_full, v_free = ready
    for start in range(begin, end, BLOCK_N):
        step = (start - begin) // BLOCK_N
        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        if bias is None:
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
        else:
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes + 2 * bias.block_type.nbytes)
        copy(k, [seq.batch, kv_head, start, 0], k_full.index(stage), k_tiles.index(stage))
        if bias is not None:
            entry = gl.where(rules.bias.batch == 0, 0, seq.batch)
            head = seq.head // rules.bias.group
            copy(bias, [entry, head, row, start], k_full.index(stage), bias_tiles.index(2 * stage))
            copy(bias, [entry, head, row + BLOCK_M, start], k_full.index(stage), bias_tiles.index(2 * stage + 1))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
        copy(v, [seq.batch, kv_head, start, 0], v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _consume(tiles, ready, rules, out, lse, seq, row, begin, end, which: gl.constexpr, VALUE_DIM: gl.constexpr, EVEN_N: gl.constexpr):
    """Out and lse of BLOCK_M of the program's queries, the first or the second."""
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q_tiles, k_tiles, v_tiles, bias_tiles = tiles
    q_full, k_full, k_free, v_full, _v_free = ready
    row += which * BLOCK_M
    q_tile = q_tiles.index(which).reshape([BLOCK_M, DIM])
    acc = gl.full([BLOCK_M, DIM], 0.0, gl.float32, OUT)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, PAIRS))
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, PAIRS))
    mbarrier.wait(q_full.index(0), 0)  # also where there is no key: no program may end before what it copies has arrived
    if begin < end:
        mbarrier.wait(k_full.index(0), 0)
        s = _products(q_tile, k_tiles.index(0), PAIRS)
        bias = _bias_of(bias_tiles.index(which), rules, seq, row, begin, PAIRS, True)
        rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]
        s = warpgroup_mma_wait(0, [s])
        s = ruled(s, bias, rules, seq, rows, begin + keys, True)
        mbarrier.arrive(k_free.index(0), count=1)
        p, _, row_max, row_sum = softmax_step(s, row_max, row_sum)
        weights = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, OUT, 2))
        step = 1
        after = begin + BLOCK_N
        open_begin, open_end = _open_keys(rules, seq, row, after, end)
        if rules.left is not None:
            for start in range(after, open_begin, BLOCK_N):
                acc, weights, row_max, row_sum, step = _tile(
                    q_tile, tiles, ready, rules, seq, acc, weights, row_max, row_sum, step, row, start, which, PAIRS, OUT, True
                )
        for start in range(open_begin, open_end, BLOCK_N):
            acc, weights, row_max, row_sum, step = _tile(
                q_tile, tiles, ready, rules, seq, acc, weights, row_max, row_sum, step, row, start, which, PAIRS, OUT, False
            )
        if rules.right is not None or not EVEN_N:
            for start in range(open_end, end, BLOCK_N):
                acc, weights, row_max, row_sum, step = _tile(
                    q_tile, tiles, ready, rules, seq, acc, weights, row_max, row_sum, step, row, start, which, PAIRS, OUT, True
                )
        last = (step - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((step - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(last).reshape([BLOCK_N, DIM]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / gl.convert_layout(divisor, gl.SliceLayout(1, OUT))[:, None]
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))
    lse_rows = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(divisor)) / LOG2E)
    gl.store(slice_pointer(lse, seq) + rows.to(gl.int64) * lse.row, lse_rows, mask=rows < seq.len_q)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    pointers = slice_pointer(out, seq) + (rows.to(gl.int64) * out.row)[:, None] + (dims * out.col)[None, :]
    gl.store(pointers, acc.to(out.ptr.dtype.element_ty), mask=(rows < seq.len_q)[:, None] & (dims < VALUE_DIM)[None, :])


@gluon.jit
def _tile(
    q_tile, tiles, ready, rules, seq, acc, weights, row_max, row_sum, step, row, start,
    which: gl.constexpr, PAIRS: gl.constexpr, OUT: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """One tile of keys: its scores and softmax, while the values of the tile before are added to acc with their `weights`."""
    _, k_tiles, v_tiles, bias_tiles = tiles
    _, k_full, k_free, v_full, v_free = ready
    stage = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    s = _products(q_tile, k_tiles.index(stage), PAIRS)
    mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(before).reshape([BLOCK_N, DIM]), acc, is_async=True)
    bias = _bias_of(bias_tiles.index(2 * stage + which), rules, seq, row, start, PAIRS, EDGE)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]
    s = warpgroup_mma_wait(1, [s])
    s = ruled(s, bias, rules, seq, rows, start + keys, EDGE)
    mbarrier.arrive(k_free.index(stage), count=1)
    p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(v_free.index(before), count=1)
    acc *= gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    weights = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, OUT, 2))
    return acc, weights, row_max, row_sum, step + 1


@gluon.jit
def _open_keys(rules, seq, row, begin, end):
    """[begin, end) of the tiles of which no pair is hidden, in steps of BLOCK_N from the given begin."""
    offset = seq.len_k - seq.len_q
    open_begin = begin
    if rules.left is not None:
        open_begin = next_step(begin, row + BLOCK_M - 1 + offset - rules.left, BLOCK_N)
    open_end = seq.len_k - BLOCK_N + 1  # the first start that is none
    if rules.right is not None:
        open_end = gl.minimum(open_end, row + offset + rules.right - BLOCK_N + 2)
    open_end = next_step(begin, open_end, BLOCK_N)
    last = next_step(begin, end, BLOCK_N)
    open_begin = gl.minimum(open_begin, last)
    return open_begin, gl.minimum(gl.maximum(open_end, open_begin), last)


@gluon.jit
def _products(q_tile, k_tile, PAIRS: gl.constexpr):
    """Q K^T of one tile, under way."""
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    return warpgroup_mma(q_tile, k_tile.reshape([BLOCK_N, DIM]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _bias_of(bias_tile, rules, seq, row, start, PAIRS: gl.constexpr, EDGE: gl.constexpr):
    """The bias of one tile: [BLOCK_M, BLOCK_N], or 1 where it is broadcast; 0 without one."""
    if rules.bias is None:
        return 0.0
    elif rules.bias_rows is not None and rules.bias_cols is not None:
        return bias_tile.reshape([BLOCK_M, BLOCK_N]).load(PAIRS)
    elif rules.bias_cols is not None:
        return load_vector(rules.bias, rules.bias.col, seq, start, seq.len_k, 0.0, BLOCK_N, gl.SliceLayout(0, PAIRS), not EDGE)[None, :]
    elif rules.bias_rows is not None:
        return load_vector(rules.bias, rules.bias.row, seq, row, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(1, PAIRS), False)[:, None]
    else:
        return gl.load(slice_pointer(rules.bias, seq))
