"""The forward pass on Hopper (sm_90) of narrow heads with few keys, many of which share a bias, in Gluon: the bias stays on chip.

A program has a block of queries of one slice of the bias, and walks the members that share it. Its consumers, of 64 queries each, keep the bias
in shared memory; a producer copies the members' queries, keys and values ahead of them. The loop over tiles is kept small: unrolled, its
code no longer fits the instruction cache.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .hopper import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    consumers_of,
    copy,
    stage_of,
    tiled,
)
from .hopper_registers import as_factor, lane_sums, rounded_pairs, sums_of_lanes
from .hopper_resident import DIM, KEYS, admits, allocate_bias, bias_of, keep_bias, part_of, parts_of, store_sums
from .launch import launch
from .layout import Sequence, slice_pointer, strided
from .overlap import follow
from .scores import LOG2E, rules_of
from .sequence import member_of
from .softmax import weights_of

BLOCK_M = gl.constexpr(64)  # queries of a consumer
CHUNK = gl.constexpr(32)  # of the keys, whose bias is loaded at once
STAGES = gl.constexpr(3)  # tiles of KEYS keys and values in shared memory, no fewer than a member has


def takes(problem: Any, out: Tensor) -> bool:
    """Whether `forward` takes a problem."""
    return admits(problem, BLOCK_M.value * consumers_of(problem.query.shape[2], DIM), out)


def forward(problem: Any, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq) of a problem that it takes."""
    heads, len_q = problem.query.shape[1:3]
    kv_heads, len_k = problem.value.shape[1:3]
    consumers = consumers_of(len_q, DIM)
    programs, parts = parts_of(problem, triton.cdiv(len_q, consumers * BLOCK_M.value))
    launch(
        _resident_forward_kernel,
        programs,
        q=tiled(problem.query, BLOCK_M.value, DIM),
        k=tiled(problem.key, KEYS.value, DIM),
        v=tiled(problem.value, KEYS.value, DIM),
        bias=tiled(problem.bias, BLOCK_M.value, CHUNK.value),
        rules=rules_of(problem),
        out=tiled(out, BLOCK_M.value, DIM),
        lse=strided(lse, heads),
        **parts,
        groups=heads // kv_heads,
        len_q=len_q,
        len_k=len_k,
        TILES=triton.cdiv(len_k, KEYS.value),
        CONSUMERS=consumers,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[consumers],
    )


@gluon.jit
def _resident_forward_kernel(
    q, k, v, bias, rules, out, lse, sharing_heads, members, splits, groups, len_q, len_k,
    TILES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """One program: out and lse of a block of queries of every `splits`-th of the members that share a slice of the bias.

    Grid of one axis as `part_of` has it.
    """
    follow()
    DIM: gl.constexpr = q.block_shape[3]
    block, bias_head, begin = part_of(gl.cdiv(len_q, CONSUMERS * BLOCK_M), splits)
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, BLOCK_M, DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, KEYS, DIM], v.layout)
    out_tiles = gl.allocate_shared_memory(out.dtype, [CONSUMERS, 1, 1, BLOCK_M, DIM], out.layout)
    kept = ()
    for _ in gl.static_range(CONSUMERS):
        kept += (allocate_bias(bias, TILES * (KEYS // CHUNK), False),)
    bias_full = barriers(CONSUMERS, 1)
    q_full = barriers(1, 1)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, CONSUMERS)
    fence_async_shared()
    tiles = (q_tiles, k_tiles, v_tiles, out_tiles)
    ready = (q_full, full, free, bias_full)
    where = (bias_head, sharing_heads, block * (CONSUMERS * BLOCK_M), begin, members, splits, len_q, len_k)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (tiles, kept[0], ready, bias, rules, where, out, lse, 0)),
                (_consume, (tiles, kept[1], ready, bias, rules, where, out, lse, 1)),
                (_produce, (q, k, v, tiles, ready, where, groups, TILES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tiles, kept[0], ready, bias, rules, where, out, lse, 0)),
                (_consume, (tiles, kept[1], ready, bias, rules, where, out, lse, 1)),
                (_consume, (tiles, kept[2], ready, bias, rules, where, out, lse, 2)),
                (_produce, (q, k, v, tiles, ready, where, groups, TILES)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )


@gluon.jit
def _produce(q, k, v, tiles, ready, where, groups, TILES: gl.constexpr):
    """Copy each member's queries, keys and values to shared memory, as far ahead as there are free stages.

    Queries take the place of the last member's once its first tile is free, for then that was multiplied. A consumer cannot tell it itself when
    it has only asked for its queries: an arrival overtakes loads that wait behind stores, and the copy is there before they have read.
    """
    q_tiles, k_tiles, v_tiles, _ = tiles
    q_full, full, free, _ = ready
    bias_head, sharing_heads, row, begin, members, splits, len_q, len_k = where
    gl.static_assert(TILES <= STAGES)
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    turn = 0
    for member in range(begin, members, splits):
        this = member_of(Sequence(0, bias_head, len_q, len_k), member, sharing_heads)
        first, parity = stage_of(turn + (STAGES - TILES), STAGES)
        mbarrier.wait(free.index(first), parity ^ 1)
        mbarrier.expect(q_full.index(0), CONSUMERS * q.block_type.nbytes)
        for i in gl.static_range(CONSUMERS):
            copy(q, [this.batch, this.head, row + i * BLOCK_M, 0], q_full.index(0), q_tiles.index(i))
        for start in range(0, len_k, KEYS):
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(free.index(stage), parity ^ 1)
            mbarrier.expect(full.index(stage), k.block_type.nbytes + v.block_type.nbytes)
            copy(k, [this.batch, this.head // groups, start, 0], full.index(stage), k_tiles.index(stage))
            copy(v, [this.batch, this.head // groups, start, 0], full.index(stage), v_tiles.index(stage))
            turn += 1


@gluon.jit
def _consume(tiles, memory, ready, bias, rules, where, out, lse, which: gl.constexpr):
    """Out and lse of BLOCK_M queries of every member, in place `which`."""
    q_tiles, k_tiles, v_tiles, out_tiles = tiles
    DIM: gl.constexpr = k_tiles.shape[4]
    TILES: gl.constexpr = memory.shape[0] // (KEYS // CHUNK)
    DTYPE: gl.constexpr = v_tiles.dtype
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OF_BIAS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q_full, full, free, bias_full = ready
    bias_head, sharing_heads, row, begin, members, splits, len_q, len_k = where
    row += which * BLOCK_M
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))
    seq = Sequence(0, bias_head * sharing_heads, len_q, len_k)
    kept = keep_bias(memory, bias, bias_full.index(which), 0, rules, seq, row, 0, KEYS, OF_BIAS, False, False)
    factor = rules.scale * LOG2E
    phase = 0
    turn = 0
    next_bias = bias_of(kept, 0, rules, PAIRS)
    for member in range(begin, members, splits):
        seq = member_of(Sequence(0, bias_head, len_q, len_k), member, sharing_heads)
        mbarrier.wait(q_full.index(0), phase)
        q_tile = q_tiles.index(which).reshape([BLOCK_M, DIM]).load(gl.DotOperandLayout(0, PAIRS, 2))
        acc = gl.full([BLOCK_M, DIM], 0.0, gl.float32, OUT)
        row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, PAIRS))
        row_sum = lane_sums(gl.full([BLOCK_M, KEYS], 0.0, gl.float32, PAIRS))
        for i in range(TILES):
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(full.index(stage), parity)
            s = warpgroup_mma(q_tile, k_tiles.index(stage).reshape([KEYS, DIM]).permute((1, 0)), next_bias, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            new_max = gl.maximum(row_max, gl.max(s, 1))
            p, alpha = weights_of(s, row_max, new_max, factor, True)
            row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None] + lane_sums(p)
            row_max = new_max
            acc *= gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
            weights = as_factor(rounded_pairs(p, DTYPE), DTYPE, gl.DotOperandLayout(0, OUT, 2))
            acc = warpgroup_mma(weights, v_tiles.index(stage).reshape([KEYS, DIM]), acc, is_async=True)
            next_bias = bias_of(kept, gl.where(i + 1 < TILES, i + 1, 0), rules, PAIRS)  # of the next tile, beside the product
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(free.index(stage), count=1)
            turn += 1
        total = sums_of_lanes(row_sum, PAIRS)
        divisor = gl.where(total == 0.0, 1.0, total)
        lse_rows = gl.where(total == 0.0, float("-inf"), (row_max * factor + gl.log2(divisor)) / LOG2E)
        gl.store(slice_pointer(lse, seq) + rows.to(gl.int64) * lse.row, lse_rows, mask=rows < len_q)
        acc *= gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT))[:, None]
        store_sums(out, out_tiles.index(which), seq, row, acc)
        phase ^= 1
    tma.store_wait(0)
