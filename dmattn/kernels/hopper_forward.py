"""The forward pass on Hopper (sm_90) for head dims from 33 to 128, in Gluon: copies, matrix products and softmax overlap.

The parts of a program run side by side: two or three consumers of 64 queries each, and a producer that copies tiles of keys, values and bias to
shared memory ahead of them. A consumer (its tiles: hopper_forward_tile.py) issues Q K^T of one tile beside P V of the tile before; the others
use the time of its softmax for their products, three of them in turn but beside a bias of pairs (as FlashAttention-3 does: Shah et al., 2024,
https://arxiv.org/abs/2407.08608). Where blocks of queries have about the same work, there is one program for each processor, whose producer
begins the next block while the consumers end theirs. Rules on pairs are those of scores.py, spelled for Gluon. What `takes` refuses goes
through forward.py.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .device import processors
from .hopper import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LAUNCH_REGISTERS,
    PANEL,
    PRODUCER_REGISTERS,
    barriers,
    consumers_of,
    copy,
    of_pairs,
    padded_dim,
    serves,
    stage_of,
    sync_threads,
    tiled,
)
from .hopper_forward_tile import BLOCK_M, step_of, tile, tiles_between
from .hopper_lift import ones_for_lifts
from .hopper_registers import (
    as_factor,
    exponent_factor,
    lane_sums,
    rounded_pairs,
    store_rows,
    sums_of_lanes,
)
from .hopper_walk import (
    Lengths,
    copy_blocks,
    copy_described,
    even_work,
    key_walk,
    listed_keys,
    open_keys,
    tile_range,
    visits_of,
    work_of,
)
from .launch import launch
from .layout import slice_pointer, strided
from .lift import COLUMNS
from .overlap import follow
from .scores import LOG2E

# NVIDIA H200, 2026-11-21 and 22: 128 keys and 2 stages were faster than 64 keys and 2 or 3 stages on every workload.
KEYS, STAGES = 128, 2  # of a tile; tiles of keys, values and bias in shared memory


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
    rules, intervals, lifts, sub = key_walk(problem, consumers * block_m, KEYS)
    works = triton.cdiv(len_q, consumers * block_m) * heads * batch
    launch(
        _forward_kernel,
        min(works, processors(problem.query.device)) if even_work(problem) else works,
        q=tiled(problem.query, block_m, dim),
        k=tiled(problem.key, sub, PANEL.value),
        v=tiled(problem.value, sub, PANEL.value),
        bias=tiled(problem.bias if pairs else None, block_m, sub),
        intervals=intervals,
        lifts=lifts,
        rules=rules,
        out=strided(out, heads),
        lse=strided(lse, heads),
        heads=heads,
        groups=heads // kv_heads,
        works=works,
        len_q=len_q,
        len_k=len_k,
        VALUE_DIM=value_dim,
        BLOCK_N=KEYS,
        STAGES=STAGES,
        DIM=dim,
        CONSUMERS=consumers,
        IN_TURN=consumers == 3 and not pairs,
        EVEN_N=len_k % KEYS == 0,
        BIAS_FIRST=pairs and scales_exactly(problem),
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[consumers],
    )


def scales_exactly(problem: Any) -> bool:
    """Whether queries times the scale have no other digits: it is 1, or they are bfloat16 and it is a smaller power of 2.

    The bias is then what products are added to, and the tensor cores round it with each 16 dims: beside a bias far from 0, lse is off by about
    2e-7 of it.
    """
    return problem.scale == 1 or (problem.query.dtype == torch.bfloat16 and problem.scale < 1 and math.frexp(problem.scale)[0] == 0.5)


@gluon.jit
def _forward_kernel(
    q, k, v, bias, intervals, lifts, rules, out, lse, heads, groups, works, len_q, len_k,
    VALUE_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DIM: gl.constexpr, CONSUMERS: gl.constexpr,
    IN_TURN: gl.constexpr, EVEN_N: gl.constexpr, BIAS_FIRST: gl.constexpr,
):  # fmt: skip
    """One program: out and lse of some of the `works`, CONSUMERS times BLOCK_M queries of one (batch, head) each, from a grid of one axis.

    q, k, v, bias (of pairs), intervals and lifts (`key_walk`) are tensor descriptors; a bias that does not depend on the key is read from
    rules. A tile of BLOCK_N keys is copied by blocks. BIAS_FIRST says that queries are multiplied by the scale, and products added to the bias.
    """
    follow()
    SUB: gl.constexpr = k.block_shape[2]
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, BLOCK_M, DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles = k_tiles
    interval_tiles = k_tiles
    lift_tiles = k_tiles
    ones = k_tiles
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    if intervals is not None:
        interval_tiles = gl.allocate_shared_memory(intervals.dtype, [STAGES * (BLOCK_N // SUB), 1, 1, 1, 2 * SUB], intervals.layout)
    if lifts is not None:
        lift_tiles = gl.allocate_shared_memory(lifts.dtype, [STAGES * (BLOCK_N // SUB), 1, 1, SUB, COLUMNS], lifts.layout)
        ones = ones_for_lifts(BLOCK_M)
    q_full = barriers(1, 1)
    q_free = barriers(1, CONSUMERS)
    k_full = barriers(STAGES, 1)
    k_free = barriers(STAGES, CONSUMERS)
    v_full = barriers(STAGES, 1)
    v_free = barriers(STAGES, CONSUMERS)
    turns = barriers(CONSUMERS, 1)
    votes = gl.allocate_shared_memory(gl.int8, [CONSUMERS, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    tiles = (q_tiles, k_tiles, v_tiles, bias_tiles, interval_tiles, lift_tiles, ones)
    ready = (q_full, q_free, k_full, k_free, v_full, v_free, turns, votes)
    lengths = Lengths(works, heads, len_q, len_k)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (tiles, ready, rules, lengths, out, lse, 0, VALUE_DIM, SUB, IN_TURN, EVEN_N, BIAS_FIRST)),
                (_consume, (tiles, ready, rules, lengths, out, lse, 1, VALUE_DIM, SUB, IN_TURN, EVEN_N, BIAS_FIRST)),
                (_produce, (q, k, v, bias, intervals, lifts, tiles, ready, rules, lengths, groups)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tiles, ready, rules, lengths, out, lse, 0, VALUE_DIM, SUB, IN_TURN, EVEN_N, BIAS_FIRST)),
                (_consume, (tiles, ready, rules, lengths, out, lse, 1, VALUE_DIM, SUB, IN_TURN, EVEN_N, BIAS_FIRST)),
                (_consume, (tiles, ready, rules, lengths, out, lse, 2, VALUE_DIM, SUB, IN_TURN, EVEN_N, BIAS_FIRST)),
                (_produce, (q, k, v, bias, intervals, lifts, tiles, ready, rules, lengths, groups)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )


@gluon.jit
def _produce(q, k, v, bias, intervals, lifts, tiles, ready, rules, lengths, groups):
    """Copy queries, and tiles of keys, values, bias, intervals and lifts to shared memory, as far ahead as there are free stages."""
    q_tiles, k_tiles, v_tiles, bias_tiles, interval_tiles, lift_tiles, _ = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, _, _ = ready
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    TILE_BYTES: gl.constexpr = 2 * k_tiles.shape[3] * k_tiles.shape[4]
    SUB: gl.constexpr = k.block_shape[2]
    BLOCKS: gl.constexpr = BLOCK_N // SUB
    INTERVAL_BYTES: gl.constexpr = 0 if intervals is None else BLOCKS * intervals.block_type.nbytes
    LIFT_BYTES: gl.constexpr = 0 if lifts is None else BLOCKS * lifts.block_type.nbytes
    BIAS_BYTES: gl.constexpr = 0 if bias is None else BLOCKS * CONSUMERS * bias.block_type.nbytes
    turn = 0  # tiles so far
    visited = visits_of(gl.program_id(0), rules, lengths, CONSUMERS * BLOCK_M)
    for number in range(gl.program_id(0), lengths.works, gl.num_programs(0)):
        seq, row = work_of(number, rules, lengths, CONSUMERS * BLOCK_M)
        walk = tile_range(visited, rules, seq, row, CONSUMERS * BLOCK_M, BLOCK_N, SUB)
        visited = visits_of(number + gl.num_programs(0), rules, lengths, CONSUMERS * BLOCK_M)
        mbarrier.wait(q_free.index(0), (number // gl.num_programs(0) & 1) ^ 1)
        mbarrier.expect(q_full.index(0), CONSUMERS * q.block_type.nbytes)
        for i in gl.static_range(CONSUMERS):
            copy(q, [seq.batch, seq.head, row + i * BLOCK_M, 0], q_full.index(0), q_tiles.index(i))
        kv_head = seq.head // groups
        for step in range(walk.begin, walk.full_end, BLOCK_N):
            starts = listed_keys(rules, seq, row, step_of(rules, walk, step, BLOCK_N), walk, CONSUMERS * BLOCK_M, BLOCK_N, SUB)
            stage, phase = stage_of(turn, STAGES)
            full = k_full.index(stage)
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(full, TILE_BYTES + INTERVAL_BYTES + LIFT_BYTES + BIAS_BYTES)
            copy_blocks(k, seq.batch, kv_head, starts, full, k_tiles, stage)
            copy_described(intervals, lifts, rules, seq, starts, full, interval_tiles, lift_tiles, stage, BLOCKS, SUB)
            if bias is not None:
                entry = gl.where(rules.bias.batch == 0, 0, seq.batch)
                head = seq.head // rules.bias.group
                bias_chunks = bias_tiles._reinterpret(bias.dtype, [STAGES * CONSUMERS * BLOCKS, 1, 1, BLOCK_M, SUB], bias.layout)
                for block in gl.static_range(BLOCKS):
                    for i in gl.static_range(CONSUMERS):
                        chunk = bias_chunks.index((CONSUMERS * stage + i) * BLOCKS + block)
                        copy(bias, [entry, head, row + i * BLOCK_M, starts[block]], full, chunk)
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), TILE_BYTES)
            copy_blocks(v, seq.batch, kv_head, starts, v_full.index(stage), v_tiles, stage)
            turn += 1


@gluon.jit
def _consume(
    tiles, ready, rules, lengths, out, lse,
    which: gl.constexpr, VALUE_DIM: gl.constexpr, SUB: gl.constexpr, IN_TURN: gl.constexpr, EVEN_N: gl.constexpr, BIAS_FIRST: gl.constexpr,
):  # fmt: skip
    """Out and lse of BLOCK_M queries of each of the program's blocks, in place `which`."""
    q_tiles, _, v_tiles, _, _, _, _ = tiles
    STAGES: gl.constexpr = v_tiles.shape[0]
    BLOCK_N: gl.constexpr = v_tiles.shape[3]
    DIM: gl.constexpr = v_tiles.shape[4]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    q_full, q_free, _, _, v_full, v_free, _, _ = ready
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    WINDOW: gl.constexpr = rules.left is not None or rules.right is not None
    BACKWARDS: gl.constexpr = rules.bias_rows is None or rules.bias_cols is None  # as `step_of` has it
    FIRST_HIDES: gl.constexpr = WINDOW or not EVEN_N or rules.mask is not None or rules.first is not None
    HIDES_BEFORE: gl.constexpr = (rules.right if BACKWARDS else rules.left) is not None
    HIDES_AFTER: gl.constexpr = rules.left is not None if BACKWARDS else (rules.right is not None or not EVEN_N)
    turn = 0  # tiles so far
    visited = visits_of(gl.program_id(0), rules, lengths, CONSUMERS * BLOCK_M)
    for number in range(gl.program_id(0), lengths.works, gl.num_programs(0)):
        seq, row = work_of(number, rules, lengths, CONSUMERS * BLOCK_M)
        walk = tile_range(visited, rules, seq, row, CONSUMERS * BLOCK_M, BLOCK_N, SUB)
        visited = visits_of(number + gl.num_programs(0), rules, lengths, CONSUMERS * BLOCK_M)
        begin, end, full_end = walk.begin, walk.end, walk.full_end
        fixed = (q_tiles.index(which).reshape([BLOCK_M, DIM]), tiles, ready, rules, seq, row, walk)
        acc = gl.full([BLOCK_M, DIM], 0.0, gl.float32, OUT)
        weights = rounded_pairs(gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS), v_tiles.dtype)
        row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, PAIRS))
        row_sum = lane_sums(gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS))
        sums = (acc, weights, row_max, row_sum, turn)
        mbarrier.wait(q_full.index(0), number // gl.num_programs(0) & 1)  # without keys too: what is copied must arrive
        if BIAS_FIRST:
            _multiply(q_tiles.index(which).reshape([BLOCK_M, DIM]), rules.scale)
        if begin < full_end:
            after = begin + BLOCK_N
            sums = tile(fixed, sums, begin, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT, FIRST_HIDES, True, False)
            if rules.lists is None:
                open_begin, open_end = open_keys(rules, seq, row + which * BLOCK_M, begin, end, BLOCK_M, BLOCK_N)
                if BACKWARDS:
                    open_begin, open_end = (
                        step_of(rules, walk, open_end, BLOCK_N) + BLOCK_N,
                        step_of(rules, walk, open_begin, BLOCK_N) + BLOCK_N,
                    )
                open_begin = gl.maximum(open_begin, after)
                open_end = gl.maximum(open_end, after)
                if HIDES_BEFORE:
                    for step in range(after, open_begin, BLOCK_N):
                        sums = tile(fixed, sums, step, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT, True, False, False)
                sums = tiles_between(fixed, sums, open_begin, open_end, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT)
                if HIDES_AFTER:
                    for step in range(open_end, full_end, BLOCK_N):
                        sums = tile(fixed, sums, step, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT, True, False, False)
            else:
                for step in range(after, end, BLOCK_N):
                    sums = tile(fixed, sums, step, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT, True, False, False)
                sums = tiles_between(fixed, sums, end, full_end, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT)
            acc, weights, row_max, row_sum, turn = sums
            mbarrier.arrive(q_free.index(0), count=1)
            last, phase = stage_of(turn - 1, STAGES)
            mbarrier.wait(v_full.index(last), phase)
            acc = warpgroup_mma(as_factor(weights, v_tiles.dtype, WEIGHTS), v_tiles.index(last).reshape([BLOCK_N, DIM]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(last), count=1)
        else:
            mbarrier.arrive(q_free.index(0), count=1)
        row_sum = sums_of_lanes(row_sum, PAIRS)
        divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc / gl.convert_layout(divisor, gl.SliceLayout(1, OUT))[:, None]
        row += which * BLOCK_M
        rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))
        lse_rows = gl.where(row_sum == 0.0, float("-inf"), (row_max * exponent_factor(rules) + gl.log2(divisor)) / LOG2E)
        gl.store(slice_pointer(lse, seq) + rows.to(gl.int64) * lse.row, lse_rows, mask=rows < seq.len_q)
        store_rows(out, seq, row, seq.len_q, acc, VALUE_DIM)


@gluon.jit
def _multiply(rows, scale):
    """Multiply rows in shared memory by the scale, where they are."""
    LANES: gl.constexpr = rows.shape[1] // 8  # of a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows.store((rows.load(LAYOUT).to(gl.float32) * scale).to(rows.dtype))
    fence_async_shared()
    sync_threads()
