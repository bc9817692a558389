"""The forward pass on Hopper (sm_90) for head dims from 33 to 128, in Gluon: copies, matrix products and softmax overlap.

The parts of a program run side by side: two or three consumers of 64 queries each, and a producer that copies tiles of keys, values and bias
to shared memory ahead of them. A consumer issues Q K^T of one tile together with P V of the tile before; the others use the time of its
softmax for their products, three of them in turn (as FlashAttention-3 does: Shah et al., 2024, https://arxiv.org/abs/2407.08608). Rules on
pairs are those of scores.py, spelled for Gluon. What `takes` refuses goes through forward.py.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    bias_vector,
    consumers_of,
    copy,
    exponent_factor,
    interval_of,
    mask_of,
    of_pairs,
    open_keys,
    padded_dim,
    ruled,
    serves,
    stage_of,
    tiled,
)
from .layout import Sequence, Span, slice_pointer, strided
from .replay import launch
from .scores import LOG2E, rules_of
from .sequence import place_queries
from .softmax import softmax_step
from .walk import key_lists, key_range, key_step

# NVIDIA H200, 2026-11-21: 128 keys and 2 stages were faster than 64 keys and 2 or 3 stages on every workload with head dim 128.
BLOCK_M = gl.constexpr(64)  # queries of a consumer
KEYS, STAGES = 128, 2  # of a tile; tiles of keys, values and bias in shared memory
FEWER_KEYS, MORE_STAGES = 64, 3


def takes(problem: Any) -> bool:
    """Whether `forward` takes a problem. Of head dims to 64 it takes long ones without masks and windows; forward.py is faster with others."""
    narrow = problem.mask is None and problem.first is None and problem.left is None and problem.right is None and problem.key.shape[2] >= 2048
    return serves(problem, (64, 128) if narrow and (problem.bias is None or of_pairs(problem.bias)) else (128,))


def forward(problem: Any, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq) of a problem that it takes."""
    batch, heads, len_q, _ = problem.query.shape
    kv_heads, len_k, value_dim = problem.value.shape[1:]
    block_m, dim = BLOCK_M.value, padded_dim(problem)
    consumers = consumers_of(len_q, dim)
    pairs = of_pairs(problem.bias)
    # Smaller tiles waste less on keys of short lives, and leave three consumers room for their biases.
    block_n, stages = (FEWER_KEYS, MORE_STAGES) if problem.first is not None or (pairs and consumers == 3) else (KEYS, STAGES)
    launch(
        _forward_kernel,
        triton.cdiv(len_q, consumers * block_m) * heads * batch,
        q=tiled(problem.query, block_m, dim),
        k=tiled(problem.key, block_n, dim),
        v=tiled(problem.value, block_n, dim),
        bias=tiled(problem.bias if pairs else None, block_m, block_n),
        rules=rules_of(problem, key_lists(problem, consumers * block_m, block_n)),
        out=strided(out, heads),
        lse=strided(lse, heads),
        heads=heads,
        groups=heads // kv_heads,
        len_q=len_q,
        len_k=len_k,
        VALUE_DIM=value_dim,
        BLOCK_N=block_n,
        STAGES=stages,
        DIM=dim,
        CONSUMERS=consumers,
        IN_TURN=consumers == 3 and not pairs,
        EVEN_N=len_k % block_n == 0,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[consumers],
    )


@gluon.jit
def _forward_kernel(
    q, k, v, bias, rules, out, lse, heads, groups, len_q, len_k,
    VALUE_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DIM: gl.constexpr, CONSUMERS: gl.constexpr,
    IN_TURN: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """One program: out and lse of CONSUMERS times BLOCK_M queries of one (batch, head), from a grid of one axis.

    q, k, v and bias (of pairs) are tensor descriptors; any other bias is read from rules.
    """
    block, head, batch = place_queries(rules, len_q, heads, CONSUMERS * BLOCK_M)
    seq = Sequence(batch, head, len_q, len_k)
    row = block * (CONSUMERS * BLOCK_M)
    walk = key_range(rules, seq, Span(row, 0, None), CONSUMERS * BLOCK_M, BLOCK_N)
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, BLOCK_M, DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles = k_tiles
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    q_full = barriers(1, 1)
    k_full = barriers(STAGES, 1)
    k_free = barriers(STAGES, CONSUMERS)
    v_full = barriers(STAGES, 1)
    v_free = barriers(STAGES, CONSUMERS)
    turns = barriers(CONSUMERS, 1)
    fence_async_shared()
    mbarrier.expect(q_full.index(0), CONSUMERS * q.block_type.nbytes)
    for i in gl.static_range(CONSUMERS):
        copy(q, [batch, head, row + i * BLOCK_M, 0], q_full.index(0), q_tiles.index(i))
    tiles = (q_tiles, k_tiles, v_tiles, bias_tiles)
    ready = (q_full, k_full, k_free, v_full, v_free, turns)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (tiles, ready, rules, out, lse, seq, row, walk, 0, VALUE_DIM, IN_TURN, EVEN_N)),
                (_consume, (tiles, ready, rules, out, lse, seq, row, walk, 1, VALUE_DIM, IN_TURN, EVEN_N)),
                (_produce, (k, v, bias, tiles, ready, rules, seq, head // groups, row, walk)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tiles, ready, rules, out, lse, seq, row, walk, 0, VALUE_DIM, IN_TURN, EVEN_N)),
                (_consume, (tiles, ready, rules, out, lse, seq, row, walk, 1, VALUE_DIM, IN_TURN, EVEN_N)),
                (_consume, (tiles, ready, rules, out, lse, seq, row, walk, 2, VALUE_DIM, IN_TURN, EVEN_N)),
                (_produce, (k, v, bias, tiles, ready, rules, seq, head // groups, row, walk)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )


@gluon.jit
def _produce(k, v, bias, tiles, ready, rules, seq, kv_head, row, walk):
    """Copy tiles of keys, values and bias to shared memory, as far ahead as there are free stages."""
    q_tiles, k_tiles, v_tiles, bias_tiles = tiles
    _, k_full, k_free, v_full, v_free, _ = ready
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    begin, end, full_end = walk
    for step in range(begin, full_end, BLOCK_N):
        start = key_step(rules, seq, Span(row, 0, None), step, end, full_end, CONSUMERS * BLOCK_M, BLOCK_N)
        stage, phase = stage_of((step - begin) // BLOCK_N, STAGES)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        if bias is None:
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
        else:
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes + CONSUMERS * bias.block_type.nbytes)
        copy(k, [seq.batch, kv_head, start, 0], k_full.index(stage), k_tiles.index(stage))
        if bias is not None:
            entry = gl.where(rules.bias.batch == 0, 0, seq.batch)
            head = seq.head // rules.bias.group
            for i in gl.static_range(CONSUMERS):
                copy(bias, [entry, head, row + i * BLOCK_M, start], k_full.index(stage), bias_tiles.index(CONSUMERS * stage + i))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
        copy(v, [seq.batch, kv_head, start, 0], v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _consume(
    tiles, ready, rules, out, lse, seq, row, walk,
    which: gl.constexpr, VALUE_DIM: gl.constexpr, IN_TURN: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """Out and lse of BLOCK_M of the program's queries, in place `which`."""
    q_tiles, _, v_tiles, _ = tiles
    STAGES: gl.constexpr = v_tiles.shape[0]
    BLOCK_N: gl.constexpr = v_tiles.shape[3]
    DIM: gl.constexpr = v_tiles.shape[4]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q_full, _, _, v_full, _, _ = ready
    begin, end, full_end = walk
    fixed = (q_tiles.index(which).reshape([BLOCK_M, DIM]), tiles, ready, rules, seq, row, walk)
    acc = gl.full([BLOCK_M, DIM], 0.0, gl.float32, OUT)
    weights = gl.full([BLOCK_M, BLOCK_N], 0.0, v_tiles.dtype, gl.DotOperandLayout(0, OUT, 2))
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, PAIRS))
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, PAIRS))
    sums = (acc, weights, row_max, row_sum, 0)
    mbarrier.wait(q_full.index(0), 0)  # also where there is no key: no program may end before what it copies has arrived
    if begin < full_end:
        after = begin + BLOCK_N
        if rules.lists is None:
            sums, vectors = _tile(fixed, sums, 0, begin, which, IN_TURN, PAIRS, OUT, EVEN_N, True, True)
            open_begin, open_end = open_keys(rules, seq, row + which * BLOCK_M, after, end, BLOCK_M, BLOCK_N)
            if rules.left is not None:
                for step in range(after, open_begin, BLOCK_N):
                    sums, vectors = _tile(fixed, sums, 0, step, which, IN_TURN, PAIRS, OUT, EVEN_N, True, False)
            for step in range(open_begin, open_end, BLOCK_N):
                sums, vectors = _tile(fixed, sums, 0, step, which, IN_TURN, PAIRS, OUT, EVEN_N, False, False)
            if rules.right is not None or not EVEN_N:
                for step in range(open_end, end, BLOCK_N):
                    sums, vectors = _tile(fixed, sums, 0, step, which, IN_TURN, PAIRS, OUT, EVEN_N, True, False)
        else:
            vectors = 0
            if rules.first is not None:
                vectors = _vectors(fixed, begin, which, PAIRS, EVEN_N, True)
            sums, vectors = _tile(fixed, sums, vectors, begin, which, IN_TURN, PAIRS, OUT, EVEN_N, True, True)
            for step in range(after, end, BLOCK_N):
                sums, vectors = _tile(fixed, sums, vectors, step, which, IN_TURN, PAIRS, OUT, EVEN_N, True, False)
            if rules.first is not None:
                vectors = (vectors[0], vectors[1], 0, 0)
            for step in range(gl.maximum(after, end), full_end, BLOCK_N):
                sums, vectors = _tile(fixed, sums, vectors, step, which, IN_TURN, PAIRS, OUT, EVEN_N, False, False)
        acc, weights, row_max, row_sum, turn = sums
        last, phase = stage_of(turn - 1, STAGES)
        mbarrier.wait(v_full.index(last), phase)
        acc = warpgroup_mma(weights, v_tiles.index(last).reshape([BLOCK_N, DIM]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / gl.convert_layout(divisor, gl.SliceLayout(1, OUT))[:, None]
    row += which * BLOCK_M
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))
    lse_rows = gl.where(row_sum == 0.0, float("-inf"), (row_max * exponent_factor(rules) + gl.log2(divisor)) / LOG2E)
    gl.store(slice_pointer(lse, seq) + rows.to(gl.int64) * lse.row, lse_rows, mask=rows < seq.len_q)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    pointers = slice_pointer(out, seq) + (rows.to(gl.int64) * out.row)[:, None] + (dims * out.col)[None, :]
    gl.store(pointers, acc.to(out.ptr.dtype.element_ty), mask=(rows < seq.len_q)[:, None] & (dims < VALUE_DIM)[None, :])


@gluon.jit
def _tile(
    fixed, sums, vectors, step, which: gl.constexpr,
    IN_TURN: gl.constexpr, PAIRS: gl.constexpr, OUT: gl.constexpr, EVEN_N: gl.constexpr, EDGE: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """One tile of keys: its scores and softmax, while the values of the tile before, if it is not the FIRST, are added with their weights.

    `sums` are (out so far, weights of the last tile, running maximum, running sum, how many tiles there were). `vectors` are what
    :func:`_vectors` gave, or 0 without lists of blocks by intervals; returned are the sums and the vectors of the next tile.
    """
    q_tile, tiles, ready, rules, seq, row, walk = fixed
    acc, weights, row_max, row_sum, turn = sums
    q_tiles, k_tiles, v_tiles, bias_tiles = tiles
    _, k_full, k_free, v_full, v_free, turns = ready
    _, end, full_end = walk
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    DIM: gl.constexpr = k_tiles.shape[4]
    if rules.first is None or rules.lists is None:
        start = key_step(rules, seq, Span(row, 0, None), step, end, full_end, CONSUMERS * BLOCK_M, BLOCK_N)
        first, last = 0, 0
        if EDGE:
            first, last = interval_of(rules, seq, start, BLOCK_N, PAIRS, False, EVEN_N)
    else:
        start, bias, first, last = vectors
    row += which * BLOCK_M
    stage, phase = stage_of(turn, STAGES)
    before, phase_before = stage_of(turn - 1, STAGES)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]
    hiding = (1, 0, 0)
    if EDGE:
        hiding = (mask_of(rules, seq, rows, cols, row, start), first, last)
    mbarrier.wait(k_full.index(stage), phase)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    if IN_TURN:
        mbarrier.wait(turns.index(which), (turn & 1) ^ (1 if which == 0 else 0))
    s = warpgroup_mma(q_tile, k_tiles.index(stage).reshape([BLOCK_N, DIM]).permute((1, 0)), zero, use_acc=False, is_async=True)
    if not FIRST:
        mbarrier.wait(v_full.index(before), phase_before)
        acc = warpgroup_mma(weights, v_tiles.index(before).reshape([BLOCK_N, DIM]), acc, is_async=True)
    if IN_TURN:
        mbarrier.arrive(turns.index((which + 1) % CONSUMERS), count=1)
    ahead = 0
    if rules.first is None or rules.lists is None:
        bias = bias_vector(rules, seq, row, start, BLOCK_M, BLOCK_N, PAIRS, EVEN_N or not EDGE)
    else:
        ahead = _vectors(fixed, gl.minimum(step + BLOCK_N, full_end - BLOCK_N), which, PAIRS, EVEN_N, EDGE)
    if rules.bias_rows is not None and rules.bias_cols is not None:
        bias = bias_tiles.index(CONSUMERS * stage + which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS)
    s = warpgroup_mma_wait(0 if FIRST else 1, [s])
    s = ruled(s, bias, hiding, rules, seq, row + rows, start + cols, EDGE)
    mbarrier.arrive(k_free.index(stage), count=1)
    p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum, exponent_factor(rules))
    if not FIRST:
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(before), count=1)
        acc *= gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    weights = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, OUT, 2))
    return (acc, weights, row_max, row_sum, turn + 1), ahead


@gluon.jit
def _vectors(fixed, step, which: gl.constexpr, PAIRS: gl.constexpr, EVEN_N: gl.constexpr, EDGE: gl.constexpr):
    """(first key, bias, first, last) of a tile: what is read from global memory for it, the bias if it is not of pairs."""
    _, tiles, _, rules, seq, row, walk = fixed
    q_tiles, k_tiles, _, _ = tiles
    _, end, full_end = walk
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    start = key_step(rules, seq, Span(row, 0, None), step, end, full_end, CONSUMERS * BLOCK_M, BLOCK_N)
    first, last = 0, 0
    if EDGE:
        first, last = interval_of(rules, seq, start, BLOCK_N, PAIRS, False, EVEN_N)
    return start, bias_vector(rules, seq, row + which * BLOCK_M, start, BLOCK_M, BLOCK_N, PAIRS, EVEN_N or not EDGE), first, last
