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

from .hopper import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PANEL,
    PRODUCER_REGISTERS,
    barriers,
    bias_vector,
    copy,
    copy_blocks,
    key_vector,
    listed_key,
    listed_keys,
    mask_of,
    of_pairs,
    open_keys,
    ruled,
    serves,
    stage_of,
    tile_range,
    tiled,
    walked_by_intervals,
)
from .layout import Sequence, slice_pointer, strided
from .replay import launch
from .scores import LOG2E, rules_of
from .sequence import place_sharing
from .softmax import softmax_step
from .walk import key_lists

# NVIDIA H200, 2026-11-21: 128 keys and 2 stages were faster than 64 keys and 2 or 3 stages on every workload with head dim 128.
BLOCK_M = gl.constexpr(64)  # queries of a consumer
DIM = gl.constexpr(128)  # head dims are padded to it as they are copied
KEYS, STAGES = 128, 2  # of a tile; tiles of keys, values and bias in shared memory
KEYS_TOGETHER = 32  # of the blocks that a tile is made of where keys have intervals; PANEL where a bias of pairs has to be copied with them


def takes(problem: Any) -> bool:
    """Whether `forward` takes a problem. Head dims to 64 are as fast in forward.py: there exp takes longer than the products."""
    return serves(problem, (DIM.value,))


def forward(problem: Any, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq) of a problem that it takes."""
    batch, heads, len_q, _ = problem.query.shape
    kv_heads, len_k, value_dim = problem.value.shape[1:]
    block_m = BLOCK_M.value
    packed = None
    if problem.first is None:
        sub = KEYS
        rules = rules_of(problem, key_lists(problem, 2 * block_m, KEYS))
    else:
        sub = PANEL.value if of_pairs(problem.bias) else KEYS_TOGETHER
        rules, packed = walked_by_intervals(problem, 2 * block_m, sub)
    launch(
        _forward_kernel,
        triton.cdiv(len_q, 2 * block_m) * heads * batch,
        q=tiled(problem.query, block_m, DIM.value),
        k=tiled(problem.key, sub, PANEL.value),
        v=tiled(problem.value, sub, PANEL.value),
        bias=tiled(problem.bias if of_pairs(problem.bias) else None, block_m, sub),
        packed=packed,
        rules=rules,
        out=strided(out, heads),
        lse=strided(lse, heads),
        heads=heads,
        groups=heads // kv_heads,
        len_q=len_q,
        len_k=len_k,
        VALUE_DIM=value_dim,
        BLOCK_N=KEYS,
        SUB=sub,
        STAGES=STAGES,
        EVEN_N=len_k % KEYS == 0,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
    )


@gluon.jit
def _forward_kernel(
    q, k, v, bias, packed, rules, out, lse, heads, groups, len_q, len_k,
    VALUE_DIM: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """One program: out and lse of 2 BLOCK_M queries of one (batch, head), from a grid of one axis.

    q, k, v, bias (of pairs) and packed (`walked_by_intervals`) are tensor descriptors; any other bias is read from rules. Tiles of BLOCK_N keys
    are copied by blocks of SUB.
    """
    block, head, batch = place_sharing(rules.shared, len_q, heads, 2 * BLOCK_M)
    if rules.right is not None:  # the last queries see the most keys: they begin first
        block = gl.cdiv(len_q, 2 * BLOCK_M) - 1 - block
    seq = Sequence(batch, head, len_q, len_k)
    row = block * (2 * BLOCK_M)
    walk = tile_range(rules, seq, row, 2 * BLOCK_M, BLOCK_N, SUB)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles = k_tiles
    packed_tiles = k_tiles
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES * 2, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    if packed is not None:
        packed_tiles = gl.allocate_shared_memory(packed.dtype, [STAGES * (BLOCK_N // SUB), 1, 1, 1, packed.block_shape[3]], packed.layout)
    q_full = barriers(1, 1)
    k_full = barriers(STAGES, 1)
    k_free = barriers(STAGES, 2)
    v_full = barriers(STAGES, 1)
    v_free = barriers(STAGES, 2)
    fence_async_shared()
    mbarrier.expect(q_full.index(0), 2 * q.block_type.nbytes)
    copy(q, [batch, head, row, 0], q_full.index(0), q_tiles.index(0))
    copy(q, [batch, head, row + BLOCK_M, 0], q_full.index(0), q_tiles.index(1))
    tiles = (q_tiles, k_tiles, v_tiles, bias_tiles, packed_tiles)
    ready = (q_full, k_full, k_free, v_full, v_free)
    gl.warp_specialize(
        [
            (_consume, (tiles, ready, rules, out, lse, seq, row, walk, 0, VALUE_DIM, BLOCK_N, SUB, STAGES, EVEN_N)),
            (_consume, (tiles, ready, rules, out, lse, seq, row, walk, 1, VALUE_DIM, BLOCK_N, SUB, STAGES, EVEN_N)),
            (_produce, (k, v, bias, packed, tiles, ready, rules, seq, head // groups, row, walk, BLOCK_N, SUB, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    k, v, bias, packed, tiles, ready, rules, seq, kv_head, row, walk, BLOCK_N: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Copy tiles of keys, values, bias and intervals to shared memory, as far ahead as there are free stages."""
    BLOCKS: gl.constexpr = BLOCK_N // SUB
    PANELS: gl.constexpr = DIM // PANEL
    PACKED_BYTES: gl.constexpr = 0 if packed is None else packed.block_type.nbytes
    BIAS_BYTES: gl.constexpr = 0 if bias is None else 2 * bias.block_type.nbytes
    _, k_tiles, v_tiles, bias_tiles, packed_tiles = tiles
    _, k_full, k_free, v_full, v_free = ready
    begin, _, full_end, _, _ = walk
    k_chunks = k_tiles._reinterpret(k.dtype, [STAGES * PANELS * BLOCKS, 1, 1, SUB, PANEL], k.layout)
    v_chunks = v_tiles._reinterpret(v.dtype, [STAGES * PANELS * BLOCKS, 1, 1, SUB, PANEL], v.layout)
    for step in range(begin, full_end, BLOCK_N):
        starts = listed_keys(rules, seq, row, step, walk, 2 * BLOCK_M, BLOCK_N, SUB)
        stage, phase = stage_of((step - begin) // BLOCK_N, STAGES)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BLOCKS * (PANELS * k.block_type.nbytes + PACKED_BYTES + BIAS_BYTES))
        copy_blocks(k, seq.batch, kv_head, starts, k_full.index(stage), k_chunks, stage, BLOCKS, PANELS)
        if packed is not None:
            entry = gl.where(rules.lists.batch == 0, 0, seq.batch)
            head = seq.head // rules.lists.group
            for block in gl.static_range(BLOCKS):
                copy(packed, [entry, head, starts[block] // SUB, 0], k_full.index(stage), packed_tiles.index(stage * BLOCKS + block))
        if bias is not None:
            entry = gl.where(rules.bias.batch == 0, 0, seq.batch)
            head = seq.head // rules.bias.group
            bias_chunks = bias_tiles._reinterpret(bias.dtype, [STAGES * 2 * BLOCKS, 1, 1, BLOCK_M, SUB], bias.layout)
            for block in gl.static_range(BLOCKS):
                for which in gl.static_range(2):
                    chunk = bias_chunks.index((2 * stage + which) * BLOCKS + block)
                    copy(bias, [entry, head, row + which * BLOCK_M, starts[block]], k_full.index(stage), chunk)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), BLOCKS * PANELS * v.block_type.nbytes)
        copy_blocks(v, seq.batch, kv_head, starts, v_full.index(stage), v_chunks, stage, BLOCKS, PANELS)


@gluon.jit
def _consume(
    tiles, ready, rules, out, lse, seq, row, walk,
    which: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """Out and lse of BLOCK_M of the program's queries, the first or the second."""
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q_tiles, _, v_tiles, _, _ = tiles
    q_full, _, _, v_full, _ = ready
    begin, end, full_end, _, _ = walk
    fixed = (q_tiles.index(which).reshape([BLOCK_M, DIM]), tiles, ready, rules, seq, row, walk)
    acc = gl.full([BLOCK_M, DIM], 0.0, gl.float32, OUT)
    weights = gl.full([BLOCK_M, BLOCK_N], 0.0, v_tiles.dtype, gl.DotOperandLayout(0, OUT, 2))
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, PAIRS))
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, PAIRS))
    sums = (acc, weights, row_max, row_sum, 0)
    mbarrier.wait(q_full.index(0), 0)  # also where there is no key: no program may end before what it copies has arrived
    if begin < full_end:
        after = begin + BLOCK_N
        sums = _tile(fixed, sums, begin, which, BLOCK_N, SUB, STAGES, PAIRS, OUT, EVEN_N, True, True)
        if rules.lists is None:
            open_begin, open_end = open_keys(rules, seq, row + which * BLOCK_M, after, end, BLOCK_M, BLOCK_N)
            if rules.left is not None:
                for step in range(after, open_begin, BLOCK_N):
                    sums = _tile(fixed, sums, step, which, BLOCK_N, SUB, STAGES, PAIRS, OUT, EVEN_N, True, False)
            for step in range(open_begin, open_end, BLOCK_N):
                sums = _tile(fixed, sums, step, which, BLOCK_N, SUB, STAGES, PAIRS, OUT, EVEN_N, False, False)
            if rules.right is not None or not EVEN_N:
                for step in range(open_end, end, BLOCK_N):
                    sums = _tile(fixed, sums, step, which, BLOCK_N, SUB, STAGES, PAIRS, OUT, EVEN_N, True, False)
        else:
            for step in range(after, end, BLOCK_N):
                sums = _tile(fixed, sums, step, which, BLOCK_N, SUB, STAGES, PAIRS, OUT, EVEN_N, True, False)
            for step in range(end, full_end, BLOCK_N):
                sums = _tile(fixed, sums, step, which, BLOCK_N, SUB, STAGES, PAIRS, OUT, EVEN_N, False, False)
        acc, weights, row_max, row_sum, turn = sums
        last, phase = stage_of(turn - 1, STAGES)
        mbarrier.wait(v_full.index(last), phase)
        acc = warpgroup_mma(weights, v_tiles.index(last).reshape([BLOCK_N, DIM]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / gl.convert_layout(divisor, gl.SliceLayout(1, OUT))[:, None]
    row += which * BLOCK_M
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))
    lse_rows = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(divisor)) / LOG2E)
    gl.store(slice_pointer(lse, seq) + rows.to(gl.int64) * lse.row, lse_rows, mask=rows < seq.len_q)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    pointers = slice_pointer(out, seq) + (rows.to(gl.int64) * out.row)[:, None] + (dims * out.col)[None, :]
    gl.store(pointers, acc.to(out.ptr.dtype.element_ty), mask=(rows < seq.len_q)[:, None] & (dims < VALUE_DIM)[None, :])


@gluon.jit
def _tile(
    fixed, sums, step, which: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr,
    PAIRS: gl.constexpr, OUT: gl.constexpr, EVEN_N: gl.constexpr, EDGE: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """One tile of keys: its scores and softmax, while the values of the tile before, if it is not the FIRST, are added with their weights.

    `sums` are (out so far, weights of the last tile, running maximum, running sum, how many tiles there were).
    """
    q_tile, tiles, ready, rules, seq, row, walk = fixed
    acc, weights, row_max, row_sum, turn = sums
    _, k_tiles, v_tiles, bias_tiles, packed_tiles = tiles
    _, k_full, k_free, v_full, v_free = ready
    BY_KEY: gl.constexpr = rules.bias_rows is None and rules.bias_cols is not None
    PARTS: gl.constexpr = 4 if BY_KEY else 2
    start = 0  # where there are intervals, nothing needs it
    if rules.first is None:
        start = listed_key(rules, seq, row, step, 0, walk, 2 * BLOCK_M, BLOCK_N, SUB)
    row += which * BLOCK_M
    stage, phase = stage_of(turn, STAGES)
    before, phase_before = stage_of(turn - 1, STAGES)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]
    hiding = (1, 0, 0)
    if EDGE:
        hiding = (mask_of(rules, seq, rows, cols, row, start), 0, 0)
    mbarrier.wait(k_full.index(stage), phase)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    s = warpgroup_mma(q_tile, k_tiles.index(stage).reshape([BLOCK_N, DIM]).permute((1, 0)), zero, use_acc=False, is_async=True)
    if not FIRST:
        mbarrier.wait(v_full.index(before), phase_before)
        acc = warpgroup_mma(weights, v_tiles.index(before).reshape([BLOCK_N, DIM]), acc, is_async=True)
    if rules.first is not None and BY_KEY:
        bias = key_vector(packed_tiles, stage, 2, BLOCK_N, SUB, PARTS, PAIRS)
    else:
        bias = bias_vector(rules, seq, row, start, BLOCK_M, BLOCK_N, PAIRS, EVEN_N or not EDGE)
    if rules.bias_rows is not None and rules.bias_cols is not None:
        bias = bias_tiles.index(2 * stage + which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS)
    s = warpgroup_mma_wait(0 if FIRST else 1, [s])
    if EDGE and rules.first is not None:
        first = key_vector(packed_tiles, stage, 0, BLOCK_N, SUB, PARTS, PAIRS)
        hiding = (1, first, key_vector(packed_tiles, stage, 1, BLOCK_N, SUB, PARTS, PAIRS))
    s = ruled(s, bias, hiding, rules, seq, row + rows, start + cols, EDGE)
    mbarrier.arrive(k_free.index(stage), count=1)
    p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum)
    if not FIRST:
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(before), count=1)
        acc *= gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    weights = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, OUT, 2))
    return acc, weights, row_max, row_sum, turn + 1
