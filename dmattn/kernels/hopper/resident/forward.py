"""The forward pass on Hopper (sm_90) of narrow heads with few keys, many of which share a bias, in Gluon: the bias stays on chip.

A program has a block of queries of one slice of the bias, and walks the members that share it. Its consumers, of 64 queries each, keep the bias
in shared memory; a producer copies the members' queries, keys and values ahead of them. The loop over tiles is kept small: unrolled, its
code no longer fits the instruction cache.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....problem import Problem
from ...base.launch import launch
from ...base.layout import slice_pointer, strided
from ...base.overlap import follow
from ...base.rules import LOG2E, rules_of
from ...base.softmax import join_sink, sink2_of, weights_of
from ..addressing import copyable
from ..copies import (
    PRODUCER_REGISTERS,
    allocate_barriers,
    consumer_registers,
    consumers_of,
    copy,
    launch_registers,
    product_layout,
    stage_of,
    tiled,
)
from ..registers import as_factor, lane_sums, rounded_pairs, sums_of_lanes
from .bias import DIM, KEYS, Part, allocate_bias, bias_of, keep_bias, part_of, parts_of, sequence_of, slice_of, store_sums

BLOCK_M = gl.constexpr(64)  # queries of a consumer
CHUNK = gl.constexpr(32)  # of the keys, whose bias is loaded at once
STAGES = gl.constexpr(3)  # tiles of KEYS keys and values in shared memory, no fewer than a member has


class Config(NamedTuple):
    """Options of a launch, all constexprs."""

    CONSUMERS: Any
    TILES: Any  # of a member's keys
    DIM: Any


class Tiles(NamedTuple):
    """Tiles in shared memory, `bias` by consumer."""

    q: Any  # [CONSUMERS, 1, 1, BLOCK_M, DIM]
    k: Any  # [STAGES, 1, 1, KEYS, DIM]
    v: Any  # [STAGES, 1, 1, KEYS, DIM]
    out: Any  # [CONSUMERS, 1, 1, BLOCK_M, DIM]
    bias: Any  # [TILES * KEYS / CHUNK, 1, 1, BLOCK_M, CHUNK] each


class Barriers(NamedTuple):
    """Barriers in shared memory: `full` when copies have arrived, `free` when all consumers have multiplied a stage."""

    bias_full: Any  # [CONSUMERS]
    q_full: Any  # [1]
    kv_full: Any  # [STAGES]
    kv_free: Any  # [STAGES]


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq)."""
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
        bias=tiled(copyable("bias", problem.bias), BLOCK_M.value, CHUNK.value),
        rules=rules_of(problem, by_words=True),
        out=tiled(out, BLOCK_M.value, DIM),
        lse=strided(lse, heads),
        **parts,
        groups=heads // kv_heads,
        len_q=len_q,
        len_k=len_k,
        TILES=triton.cdiv(len_k, KEYS.value),
        CONSUMERS=consumers,
        num_warps=4,
        maxnreg=launch_registers(consumers),
    )


@gluon.jit
def _resident_forward_kernel(
    q, k, v, bias, rules, out, lse, entries, sharing_heads, spread, members, splits, groups, len_q, len_k,
    TILES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """One program: out and lse of a block of queries of every `splits`-th of the members that share a slice of the bias.

    Grid of one axis as `part_of` has it.
    """
    follow()
    config: gl.constexpr = Config(CONSUMERS, TILES, DIM=q.block_shape[3])
    block, number, first = part_of(gl.cdiv(len_q, CONSUMERS * BLOCK_M), splits)
    tiles = Tiles(
        q=gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, BLOCK_M, config.DIM], q.layout),
        k=gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, config.DIM], k.layout),
        v=gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, KEYS, config.DIM], v.layout),
        out=gl.allocate_shared_memory(out.dtype, [CONSUMERS, 1, 1, BLOCK_M, config.DIM], out.layout),
        bias=allocate_bias(rules, CONSUMERS, TILES * (KEYS // CHUNK), BLOCK_M, CHUNK, WIDE=False),
    )
    barriers = Barriers(
        bias_full=None if bias is None else allocate_barriers(CONSUMERS, 1),
        q_full=allocate_barriers(1, 1),
        kv_full=allocate_barriers(STAGES, 1),
        kv_free=allocate_barriers(STAGES, CONSUMERS),
    )
    fence_async_shared()
    entry, bias_head = slice_of(number, entries)
    part = Part(entry, bias_head, sharing_heads, spread, block * (CONSUMERS * BLOCK_M), first, members, splits, len_q, len_k)
    gl.warp_specialize(
        [
            (_consume, (tiles, barriers, bias, rules, part, out, lse, which, config))
            if which < CONSUMERS
            else (_produce, (q, k, v, tiles, barriers, part, groups, config))
            for which in (0, 1, 2, 3)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [consumer_registers(CONSUMERS)] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(q, k, v, tiles, barriers, part, groups, config: gl.constexpr):
    """Copy each member's queries, keys and values to shared memory, as far ahead as there are free stages.

    Queries take the place of the last member's once its first tile is free, for then that was multiplied. A consumer cannot tell it itself when
    it has only asked for its queries: an arrival overtakes loads that wait behind stores, and the copy is there before they have read.
    """
    gl.static_assert(config.TILES <= STAGES)
    turn = 0
    for member in range(part.first, part.members, part.splits):
        seq = sequence_of(part, member)
        first, parity = stage_of(turn + (STAGES - config.TILES), STAGES)
        mbarrier.wait(barriers.kv_free.index(first), parity ^ 1)
        q_full = barriers.q_full.index(0)
        mbarrier.expect(q_full, config.CONSUMERS * q.block_type.nbytes)
        for i in gl.static_range(config.CONSUMERS):
            copy(q, [seq.batch, seq.head, part.start + i * BLOCK_M, 0], q_full, tiles.q.index(i))
        for col in range(0, seq.len_k, KEYS):
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(barriers.kv_free.index(stage), parity ^ 1)
            kv_full = barriers.kv_full.index(stage)
            mbarrier.expect(kv_full, k.block_type.nbytes + v.block_type.nbytes)
            copy(k, [seq.batch, seq.head // groups, col, 0], kv_full, tiles.k.index(stage))
            copy(v, [seq.batch, seq.head // groups, col, 0], kv_full, tiles.v.index(stage))
            turn += 1


@gluon.jit
def _consume(tiles, barriers, bias, rules, part, out, lse, which: gl.constexpr, config: gl.constexpr):
    """Out and lse of BLOCK_M queries of every member, in place `which`."""
    DIM: gl.constexpr = config.DIM
    DTYPE: gl.constexpr = tiles.v.dtype
    PAIRS: gl.constexpr = product_layout(KEYS)
    OF_BIAS: gl.constexpr = product_layout(CHUNK)
    OUT: gl.constexpr = product_layout(DIM)
    row = part.start + which * BLOCK_M
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))  # [BLOCK_M]
    bias_full = None if bias is None else barriers.bias_full.index(which)
    seq = sequence_of(part, 0)
    kept = keep_bias(tiles.bias[which], bias, bias_full, 0, rules, seq, row, 0, COLS=KEYS, PAIRS=OF_BIAS, KEYS_DOWN=False, WIDE=False)
    factor = rules.scale * LOG2E
    phase = 0
    turn = 0
    next_bias = bias_of(kept, 0, rules, PAIRS)  # [BLOCK_M, KEYS]
    for member in range(part.first, part.members, part.splits):
        seq = sequence_of(part, member)
        mbarrier.wait(barriers.q_full.index(0), phase)
        q_tile = tiles.q.index(which).reshape([BLOCK_M, DIM]).load(gl.DotOperandLayout(0, PAIRS, 2))
        acc = gl.full([BLOCK_M, DIM], 0.0, gl.float32, OUT)
        row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, PAIRS))
        row_sum = lane_sums(gl.full([BLOCK_M, KEYS], 0.0, gl.float32, PAIRS))  # [BLOCK_M, 4]
        for i in range(config.TILES):
            following = gl.where(i + 1 < config.TILES, i + 1, 0)
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(barriers.kv_full.index(stage), parity)
            k_tile = tiles.k.index(stage).reshape([KEYS, DIM])
            s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), next_bias, is_async=True)  # [BLOCK_M, KEYS]
            s = warpgroup_mma_wait(0, [s])
            new_max = gl.maximum(row_max, gl.max(s, 1))
            p, alpha = weights_of(s, row_max, new_max, factor, FAR=True)  # [BLOCK_M, KEYS], [BLOCK_M]
            row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None] + lane_sums(p)
            row_max = new_max
            acc *= gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
            weights = as_factor(rounded_pairs(p, DTYPE), DTYPE, gl.DotOperandLayout(0, OUT, 2))  # [BLOCK_M, KEYS]
            acc = warpgroup_mma(weights, tiles.v.index(stage).reshape([KEYS, DIM]), acc, is_async=True)
            next_bias = bias_of(kept, following, rules, PAIRS)  # of the next tile, beside the product
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(barriers.kv_free.index(stage), count=1)
            turn += 1
        total = sums_of_lanes(row_sum, PAIRS)  # [BLOCK_M]
        row_max *= factor
        alpha = 1.0
        if rules.sinks is not None:
            alpha, row_max, total = join_sink(sink2_of(rules.sinks, seq), row_max, total)
        divisor = gl.where(total == 0.0, 1.0, total)
        lse_rows = gl.where(total == 0.0, float("-inf"), (row_max + gl.log2(divisor)) / LOG2E)
        gl.store(slice_pointer(lse, seq) + rows.to(gl.int64) * lse.row, lse_rows, mask=rows < seq.len_q)
        acc *= gl.convert_layout(alpha / divisor, gl.SliceLayout(1, OUT))[:, None]
        store_sums(out, tiles.out.index(which), seq, row, acc)
        phase ^= 1
    tma.store_wait(0)
