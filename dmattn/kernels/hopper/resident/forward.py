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
from ..copies import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    allocate_barriers,
    consumers_of,
    copy,
    stage_of,
    tiled,
)
from ..registers import as_factor, lane_sums, rounded_pairs, sums_of_lanes
from .bias import DIM, KEYS, Part, allocate_bias, bias_of, keep_bias, part_of, parts_of, sequence_of, slice_of, store_sums
from .mask import first_tile, has_any, kept_keys, states_of, tiles_of, without_hidden, without_tile

BLOCK_M = gl.constexpr(64)  # queries of a consumer
CHUNK = gl.constexpr(32)  # of the keys, whose bias is loaded at once
PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))  # the layout of a tile of the scores
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


class Context(NamedTuple):
    """The same for all tiles of a member."""

    tiles: Any
    barriers: Any
    rules: Any
    kept: Any  # the bias, as `bias_of` takes it
    seq: Any
    factor: Any  # of the scores, to be exponents of 2


class Sums(NamedTuple):
    """Results of a consumer after some tiles of keys."""

    acc: Any  # [BLOCK_M, DIM]
    row_max: Any  # [BLOCK_M]
    row_sum: Any  # [BLOCK_M, 4]: by lane (`lane_sums`)
    bias: Any  # [BLOCK_M, KEYS]: of the next tile
    turn: Any  # how many tiles there were, those of members before included


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
        bias=tiled(problem.bias, BLOCK_M.value, CHUNK.value),
        rules=rules_of(problem, states=None if problem.mask is None else problem.states),
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
        bias=allocate_bias(bias, CONSUMERS, TILES * (KEYS // CHUNK), WIDE=False),
    )
    barriers = _make_barriers(CONSUMERS)
    fence_async_shared()
    entry, bias_head = slice_of(number, entries)
    part = Part(entry, bias_head, sharing_heads, spread, block * (CONSUMERS * BLOCK_M), first, members, splits, len_q, len_k)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (tiles, barriers, bias, rules, part, out, lse, 0, config)),
                (_consume, (tiles, barriers, bias, rules, part, out, lse, 1, config)),
                (_produce, (q, k, v, tiles, barriers, rules, part, groups, config)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tiles, barriers, bias, rules, part, out, lse, 0, config)),
                (_consume, (tiles, barriers, bias, rules, part, out, lse, 1, config)),
                (_consume, (tiles, barriers, bias, rules, part, out, lse, 2, config)),
                (_produce, (q, k, v, tiles, barriers, rules, part, groups, config)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )


@gluon.jit
def _make_barriers(CONSUMERS: gl.constexpr):
    """:class:`Barriers` in their first phase."""
    return Barriers(
        bias_full=allocate_barriers(CONSUMERS, 1),
        q_full=allocate_barriers(1, 1),
        kv_full=allocate_barriers(STAGES, 1),
        kv_free=allocate_barriers(STAGES, CONSUMERS),
    )


@gluon.jit
def _produce(q, k, v, tiles, barriers, rules, part, groups, config: gl.constexpr):
    """Copy each member's queries, keys and values to shared memory, as far ahead as there are free stages; of a mask the tiles that have a key.

    A member without such a tile has no queries either.
    """
    gl.static_assert(config.TILES <= STAGES)
    turn = 0
    before = config.TILES  # of the last member with a tile; at first all stages are free
    ahead = states_of(rules, part, part.first, WARPS=1)
    for member in range(part.first, part.members, part.splits):
        seq = sequence_of(part, member)
        if rules.mask is None:
            _copy_queries(q, tiles, barriers, part, seq, turn + (STAGES - config.TILES), config)
            for col in range(0, seq.len_k, KEYS):
                _copy_keys(k, v, tiles, barriers, seq, groups, col, turn)
                turn += 1
        else:
            left, _hiding = tiles_of(ahead)
            ahead = states_of(rules, part, member + part.splits, WARPS=1)
            if left != 0:
                _copy_queries(q, tiles, barriers, part, seq, turn + (STAGES - before), config)
                before = 0
                while left != 0:
                    tile = first_tile(left)
                    left = without_tile(left, tile)
                    _copy_keys(k, v, tiles, barriers, seq, groups, tile * KEYS, turn)
                    turn += 1
                    before += 1


@gluon.jit
def _copy_queries(q, tiles, barriers, part, seq, turn, config: gl.constexpr):
    """Copy a member's queries in the place of the last member's, whose first tile's stage is to be used again in a turn.

    They may once that is free, for then it was multiplied. A consumer cannot tell it itself when it has only asked for its queries: an arrival
    overtakes loads that wait behind stores, and the copy is there before they have read.
    """
    first, parity = stage_of(turn, STAGES)
    mbarrier.wait(barriers.kv_free.index(first), parity ^ 1)
    q_full = barriers.q_full.index(0)
    mbarrier.expect(q_full, config.CONSUMERS * q.block_type.nbytes)
    for i in gl.static_range(config.CONSUMERS):
        copy(q, [seq.batch, seq.head, part.start + i * BLOCK_M, 0], q_full, tiles.q.index(i))


@gluon.jit
def _copy_keys(k, v, tiles, barriers, seq, groups, col, turn):
    """Copy the keys and values of a tile to the stage of a turn."""
    stage, parity = stage_of(turn, STAGES)
    mbarrier.wait(barriers.kv_free.index(stage), parity ^ 1)
    kv_full = barriers.kv_full.index(stage)
    mbarrier.expect(kv_full, k.block_type.nbytes + v.block_type.nbytes)
    copy(k, [seq.batch, seq.head // groups, col, 0], kv_full, tiles.k.index(stage))
    copy(v, [seq.batch, seq.head // groups, col, 0], kv_full, tiles.v.index(stage))


@gluon.jit
def _consume(tiles, barriers, bias, rules, part, out, lse, which: gl.constexpr, config: gl.constexpr):
    """Out and lse of BLOCK_M queries of every member, in place `which`."""
    DIM: gl.constexpr = config.DIM
    OF_BIAS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    row = part.start + which * BLOCK_M
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))  # [BLOCK_M]
    bias_full = barriers.bias_full.index(which)
    seq = sequence_of(part, 0)
    kept = keep_bias(tiles.bias[which], bias, bias_full, 0, rules, seq, row, 0, COLS=KEYS, PAIRS=OF_BIAS, KEYS_DOWN=False, WIDE=False)
    factor = rules.scale * LOG2E
    phase = 0
    turn = 0
    next_bias = bias_of(kept, 0, rules, PAIRS)  # [BLOCK_M, KEYS]
    ahead = states_of(rules, part, part.first, WARPS=4)
    for member in range(part.first, part.members, part.splits):
        seq = sequence_of(part, member)
        context = Context(tiles, barriers, rules, kept, seq, factor)
        left, hiding = 1, 0
        if rules.mask is not None:
            left, hiding = tiles_of(ahead)
            ahead = states_of(rules, part, member + part.splits, WARPS=4)
        sums = Sums(
            acc=gl.full([BLOCK_M, DIM], 0.0, gl.float32, OUT),
            row_max=gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, PAIRS)),
            row_sum=lane_sums(gl.full([BLOCK_M, KEYS], 0.0, gl.float32, PAIRS)),
            bias=next_bias,
            turn=turn,
        )
        if rules.mask is None:
            q_tile = _queries(context, phase, which, config)
            for i in range(config.TILES):
                sums = _add_tile(context, q_tile, sums, i, gl.where(i + 1 < config.TILES, i + 1, 0), hiding)
        elif left != 0:
            q_tile = _queries(context, phase, which, config)
            sums = _add_visible_tiles(context, q_tile, sums, left, hiding)
        next_bias = sums.bias
        turn = sums.turn
        total = sums_of_lanes(sums.row_sum, PAIRS)  # [BLOCK_M]
        row_max = sums.row_max * factor
        alpha = 1.0
        if rules.sinks is not None:
            alpha, row_max, total = join_sink(sink2_of(rules.sinks, seq), row_max, total)
        divisor = gl.where(total == 0.0, 1.0, total)
        lse_rows = gl.where(total == 0.0, float("-inf"), (row_max + gl.log2(divisor)) / LOG2E)
        gl.store(slice_pointer(lse, seq) + rows.to(gl.int64) * lse.row, lse_rows, mask=rows < seq.len_q)
        acc = sums.acc * gl.convert_layout(alpha / divisor, gl.SliceLayout(1, OUT))[:, None]
        store_sums(out, tiles.out.index(which), seq, row, acc)
        if rules.mask is None:
            phase ^= 1
        else:
            phase ^= gl.where(left != 0, 1, 0)
    tma.store_wait(0)


@gluon.jit
def _queries(context, phase, which: gl.constexpr, config: gl.constexpr):
    """A consumer's queries of a member, once they are there."""
    mbarrier.wait(context.barriers.q_full.index(0), phase)
    return context.tiles.q.index(which).reshape([BLOCK_M, config.DIM]).load(gl.DotOperandLayout(0, PAIRS, 2))


@gluon.jit
def _add_visible_tiles(context, q_tile, sums, left, hiding):
    """Sums with the tiles that have one of the granules `left`, which has some, of which those `hiding` have hidden keys.

    The bias is at hand of the first tile of all, which the most members begin with.
    """
    tile = first_tile(left)
    if tile != 0:
        bias = bias_of(context.kept, tile, context.rules, PAIRS)
        sums = Sums(sums.acc, sums.row_max, sums.row_sum, bias, sums.turn)
    while left != 0:
        tile = first_tile(left)
        left = without_tile(left, tile)
        sums = _add_tile(context, q_tile, sums, tile, first_tile(left), hiding)
    return sums


@gluon.jit
def _add_tile(context, q_tile, sums, tile, following, hiding):
    """Sums with one tile of keys; the bias is that of the tile `following`. Granules `hiding` have hidden keys (`tiles_of`)."""
    OUT: gl.constexpr = sums.acc.type.layout
    tiles, barriers, rules = context.tiles, context.barriers, context.rules
    DTYPE: gl.constexpr = tiles.v.dtype
    DIM: gl.constexpr = sums.acc.shape[1]
    stage, parity = stage_of(sums.turn, STAGES)
    if rules.mask is not None:
        kept = kept_keys(rules, context.seq, tile, WARPS=4)  # asked for ahead of the wait
    mbarrier.wait(barriers.kv_full.index(stage), parity)
    k_tile = tiles.k.index(stage).reshape([KEYS, DIM])
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), sums.bias, is_async=True)  # [BLOCK_M, KEYS]
    s = warpgroup_mma_wait(0, [s])
    if rules.mask is not None:
        s = without_hidden(s, kept, has_any(hiding, tile))
    new_max = gl.maximum(sums.row_max, gl.max(s, 1))
    p, alpha = weights_of(s, sums.row_max, new_max, context.factor, FAR=True)  # [BLOCK_M, KEYS], [BLOCK_M]
    row_sum = sums.row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, sums.row_sum.type.layout))[:, None] + lane_sums(p)
    acc = sums.acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    weights = as_factor(rounded_pairs(p, DTYPE), DTYPE, gl.DotOperandLayout(0, OUT, 2))  # [BLOCK_M, KEYS]
    acc = warpgroup_mma(weights, tiles.v.index(stage).reshape([KEYS, DIM]), acc, is_async=True)
    next_bias = bias_of(context.kept, following, rules, PAIRS)  # of the next tile, beside the product
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(barriers.kv_free.index(stage), count=1)
    return Sums(acc, new_max, row_sum, next_bias, sums.turn + 1)
