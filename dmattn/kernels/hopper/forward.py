"""The forward pass on Hopper (sm_90) for head dims to 256, in Gluon: copies, matrix products and softmax overlap.

The parts of a program run side by side: one to three consumers of 64 queries each, and a producer that copies tiles of keys, values and bias to
shared memory ahead of them. A consumer (its tiles: hopper/forward_tile.py) issues Q K^T of one tile beside P V of the tile before. During its
softmax the others multiply, or those of other programs on the processor. Three consumers do so in turn (as FlashAttention-3 does: Shah et al.,
2024, https://arxiv.org/abs/2407.08608), and two that might stay in step with each other (`are_in_turn`).

Where there are more blocks of queries than programs have room, there are as many programs as have room. A producer begins the next block while
the consumers end theirs. Where blocks are so few that they would leave processors idle, and keys enough, each block's keys are split over
programs, whose results are merged as in portable/merge.py. Rules on pairs are those of base/rules.py, spelled for Gluon.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...problem import Problem
from ..base.bias_columns import COLUMNS
from ..base.launch import launch
from ..base.layout import copied_entry, slice_pointer, strided
from ..base.overlap import follow
from ..base.rules import LOG2E
from ..base.softmax import join_sink, sink2_of
from ..portable.merge import Parts, merge_splits
from .addressing import copyable
from .bias_columns import ones_for_columns
from .copies import (
    PANEL,
    PRODUCER_REGISTERS,
    allocate_barriers,
    allocate_tiles,
    consumer_registers,
    copied_dims,
    copy,
    copy_tile,
    forward_dims,
    launch_registers,
    panel_of,
    pieces,
    place_of_queries,
    product_layout,
    stage_of,
    sync_threads,
    tiled,
    whole_of,
)
from .distances import end_numbers, spread_table, with_spread_table
from .forward_sizes import are_in_turn, sizes_of
from .forward_steps import BLOCK_M, first_turn, own_steps, step_of
from .forward_tile import (
    Barriers,
    Config,
    Context,
    Sums,
    Tiles,
    add_last_values,
    add_tiles,
    by_row,
    leave_out,
)
from .loaded_pairs import are_words, prefetch_bias
from .next_block import allocate_numbers, draw, draws_at, next_number, tell, tell_end, told
from .registers import exponent_factor, lane_sums, logarithm2, reciprocal, rounded_pairs, store_tile, sums_of_lanes
from .walk import (
    OF_OUT,
    copy_blocks,
    copy_described,
    key_walk,
    lengths_of,
    listed_keys,
    results_of,
    tile_range,
    visits_of,
    work_of,
)


class Sources(NamedTuple):
    """Tensor descriptors of tensors that the producer copies, with their blocks; None where a problem has no such tensor."""

    q: Any  # [1, 1, BLOCK_M, DIM], or a PANEL of it
    k: Any  # [1, 1, SUB, PANEL], or fewer columns where there are no more; as the next
    v: Any  # [1, 1, SUB, PANEL]
    bias: Any  # [1, 1, BLOCK_M, SUB], of pairs; None too where consumers load it
    intervals: Any  # [1, 1, 1, 2 * SUB]
    bias_columns: Any  # [1, 1, SUB, COLUMNS]


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq).

    A bias of pairs that the copy engine cannot address is loaded by the consumers.
    """
    heads = problem.query.shape[1]
    len_k, value_dim = problem.value.shape[2:]
    block_m, (dim, dim_v) = BLOCK_M.value, forward_dims(problem)
    pairs = problem.pair_bias is not None
    bias = copyable("bias", problem.pair_bias)
    loaded = pairs and bias is None
    consumers, keys, stages, programs_each = sizes_of(problem, dim, dim_v, loaded)
    rules, intervals, bias_columns, sub = key_walk(problem, consumers * block_m, keys)
    rules = with_spread_table(rules, spread_table(problem), heads)
    lengths, programs = lengths_of(problem, consumers * block_m, rules, out, programs_each, OF_OUT)
    parts = None
    if lengths.parts is not None:
        parts = Parts.empty(lengths.parts, out)
        rules = rules._replace(sinks=None)  # which join the sum of all parts
    launch(
        _forward_kernel,
        programs,
        q=tiled(problem.query, block_m, whole_of(dim)),
        k=tiled(problem.key, sub, panel_of(dim)),
        v=tiled(problem.value, sub, panel_of(dim_v)),
        bias=tiled(bias, block_m, sub),
        intervals=intervals,
        bias_columns=bias_columns,
        rules=rules,
        lengths=lengths,
        out=strided(out if parts is None else parts.acc[0], heads),
        lse=strided(lse if parts is None else parts.sums[0], heads),
        VALUE_DIM=value_dim,
        BLOCK_N=keys,
        STAGES=stages,
        DIM=dim,
        DIM_V=dim_v,
        CONSUMERS=consumers,
        IN_TURN=are_in_turn(problem, consumers, lengths.works == programs),
        EVEN_N=problem.ends_q is None and len_k % keys == 0,
        Q_IN_REGISTERS=fit_in_registers(dim, consumers, programs_each, of_pairs=pairs, lists=rules.lists is not None),
        BIAS_FIRST=pairs and not 128 < dim <= 192 and problem.softcap is None and scales_exactly(problem),
        REGISTERS=consumer_registers(consumers, programs_each),
        num_warps=4,
        maxnreg=launch_registers(consumers, programs_each),
    )
    if parts is not None:
        merge_splits(problem, parts, problem.sinks, out, lse)


def fit_in_registers(dim: int, consumers: int, programs_each: int, of_pairs: bool, lists: bool) -> bool:
    """Whether a consumer has registers for its queries, too: to 32 dims, but not beside a bias of pairs and lists of a mask.

    They are read from shared memory once then, and the next block's are copied while the consumer works on the tiles of this one. Queries of 64
    dims fit where each of three programs has one consumer, of 136 registers a thread, and would spill in 104.
    """
    return not (of_pairs and lists) and dim <= (64 if (consumers, programs_each) == (1, 3) else 32)


def scales_exactly(problem: Problem) -> bool:
    """Whether queries times the scale have no other digits: it is 1, or they are bfloat16 and it is a smaller power of 2.

    The bias is then what products are added to, and the tensor cores round it with each 16 dims: beside a bias far from 0, lse is off by about
    2e-7 of it.
    """
    return problem.scale == 1 or (problem.query.dtype == torch.bfloat16 and problem.scale < 1 and math.frexp(problem.scale)[0] == 0.5)


@gluon.jit
def _forward_kernel(
    q, k, v, bias, intervals, bias_columns, rules, lengths, out, lse,
    VALUE_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr,
    CONSUMERS: gl.constexpr, IN_TURN: gl.constexpr, EVEN_N: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
    BIAS_FIRST: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: out and lse of some of the works, CONSUMERS times BLOCK_M queries of one (batch, head) each, from a grid of one axis.

    q, k, v, bias (of pairs), intervals, bias_columns (`key_walk`) are tensor descriptors; a bias that does not depend on the key is read from
    rules. `lengths` are :class:`walk.Lengths`: where they name parts, out and lse are those of `merge.Parts`. A tile of BLOCK_N keys is
    copied by blocks. Other options are those of :class:`Config`.
    """
    follow()
    SUB: gl.constexpr = k.block_shape[2]
    OF_WORDS: gl.constexpr = are_words(rules.bias.whole) if rules.bias is not None else False
    OF_PAIRS: gl.constexpr = rules.bias_rows is not None and rules.bias_cols is not None
    config: gl.constexpr = Config(
        CONSUMERS=CONSUMERS,
        QUERIES=CONSUMERS * BLOCK_M,
        BLOCK_N=BLOCK_N,
        SUB=SUB,
        BLOCKS=BLOCK_N // SUB,
        STAGES=STAGES,
        DIM=DIM,
        DIM_V=DIM_V,
        VALUE_DIM=VALUE_DIM,
        IN_TURN=IN_TURN,
        EVEN_N=EVEN_N,
        OF_PAIRS=OF_PAIRS,
        AHEAD=OF_PAIRS and OF_WORDS and bias is None and rules.lists is None,
        BIAS_FIRST=BIAS_FIRST,
        Q_IN_REGISTERS=Q_IN_REGISTERS,
        BACKWARDS=rules.lists is None and (rules.bias_rows is None or rules.bias_cols is None),
        PAIRS=product_layout(BLOCK_N),
    )
    tiles = Tiles(
        q=allocate_tiles(q, CONSUMERS, BLOCK_M, DIM),
        k=allocate_tiles(k, STAGES, BLOCK_N, DIM),
        v=allocate_tiles(v, STAGES, BLOCK_N, DIM_V),
        bias=None if bias is None else allocate_tiles(bias, STAGES * CONSUMERS, BLOCK_M, BLOCK_N),
        intervals=None if intervals is None else allocate_tiles(intervals, STAGES * config.BLOCKS, 1, 2 * SUB),
        bias_columns=None if bias_columns is None else allocate_tiles(bias_columns, STAGES * config.BLOCKS, SUB, COLUMNS),
        ones=None if bias_columns is None else ones_for_columns(BLOCK_M),
    )
    barriers = Barriers(  # made in place: up to Triton 3.6 a helper cannot return a None
        q_full=allocate_barriers(CONSUMERS, 1),
        q_free=allocate_barriers(CONSUMERS, 1),
        k_full=allocate_barriers(STAGES, 1),
        k_free=allocate_barriers(STAGES, CONSUMERS),
        v_full=allocate_barriers(STAGES, 1),
        v_free=allocate_barriers(STAGES, CONSUMERS),
        turns=allocate_barriers(CONSUMERS, 1) if IN_TURN else None,
        numbers=allocate_numbers(rules),
        votes=gl.allocate_shared_memory(gl.int8, [CONSUMERS, 128], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    fence_async_shared()
    sources = Sources(q, k, v, bias, intervals, bias_columns)
    gl.warp_specialize(  # one list for all numbers of consumers: lists cannot be added where a None is among the arguments
        [
            (_consume, (tiles, barriers, rules, lengths, out, lse, which, config))
            if which < CONSUMERS
            else (_produce, (sources, tiles, barriers, rules, lengths, config))
            for which in (0, 1, 2, 3)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [REGISTERS] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(sources, tiles, barriers, rules, lengths, config: gl.constexpr):
    """Copy queries, and tiles of keys, values, bias, intervals and bias columns to shared memory, as far ahead as there are free stages."""
    BLOCKS: gl.constexpr = config.BLOCKS
    QUERY_BYTES: gl.constexpr = 2 * BLOCK_M * copied_dims(config.DIM)
    KEY_BYTES: gl.constexpr = 2 * config.BLOCK_N * copied_dims(config.DIM)
    VALUE_BYTES: gl.constexpr = 2 * config.BLOCK_N * config.DIM_V
    INTERVAL_BYTES: gl.constexpr = 0 if sources.intervals is None else BLOCKS * sources.intervals.block_type.nbytes
    COLUMN_BYTES: gl.constexpr = 0 if sources.bias_columns is None else BLOCKS * sources.bias_columns.block_type.nbytes
    BIAS_BYTES: gl.constexpr = 0 if sources.bias is None else BLOCKS * config.CONSUMERS * sources.bias.block_type.nbytes
    LOOKS_AHEAD: gl.constexpr = rules.lists is not None and BLOCKS <= 2  # a producer has registers for no more
    turn = 0  # tiles so far
    number, count, under_way = gl.program_id(0), 0, 0
    while number < lengths.works:
        seq, row = work_of(number, rules, lengths, config.QUERIES)
        visited = visits_of(rules, seq, row, config.QUERIES)
        walk = tile_range(visited, rules, seq, row, number, lengths, config.QUERIES, config.BLOCK_N, config.SUB)
        if LOOKS_AHEAD:  # keys are asked for before the waits that come before they are copied
            following = listed_keys(rules, seq, row, walk.begin, walk, config.QUERIES, config.BLOCK_N, config.SUB)
        tell(number, seq, row, visited, count, barriers.numbers)
        entry, first = place_of_queries(seq, row)
        for i in gl.static_range(config.CONSUMERS):  # a consumer may still read its queries of the block before
            full = barriers.q_full.index(i)
            mbarrier.wait(barriers.q_free.index(i), (count & 1) ^ 1)
            mbarrier.expect(full, QUERY_BYTES)
            copy_tile(sources.q, entry, seq.head, first + i * BLOCK_M, full, tiles.q, i, config.DIM)
        kv_head = seq.head // lengths.group
        for step in range(walk.begin, walk.full_end, config.BLOCK_N):
            if not LOOKS_AHEAD:
                starts = listed_keys(rules, seq, row, step_of(walk, step, config), walk, config.QUERIES, config.BLOCK_N, config.SUB)
            else:
                starts = following
            under_way = draw(under_way, step == draws_at(walk, config.BLOCK_N), lengths)
            stage, phase = stage_of(turn, config.STAGES)
            full = barriers.k_full.index(stage)
            mbarrier.wait(barriers.k_free.index(stage), phase ^ 1)
            mbarrier.expect(full, KEY_BYTES + INTERVAL_BYTES + COLUMN_BYTES + BIAS_BYTES)
            copy_blocks(sources.k, seq, kv_head, starts, full, tiles.k, stage, config.DIM)
            copy_described(sources, tiles, rules, seq, starts, full, stage, BLOCKS, config.SUB)
            if sources.bias is not None:
                _copy_bias(sources.bias, rules, seq, row, starts, full, tiles.bias, stage, config)
            if not config.AHEAD or config.DIM > PANEL:  # else consumers ask early enough (docs/history.md)
                for block in gl.static_range(BLOCKS):
                    prefetch_bias(sources.bias, rules, seq, row, starts[block], config.QUERIES, config.SUB)
            if LOOKS_AHEAD:
                following = listed_keys(rules, seq, row, step + config.BLOCK_N, walk, config.QUERIES, config.BLOCK_N, config.SUB)
            mbarrier.wait(barriers.v_free.index(stage), phase ^ 1)
            mbarrier.expect(barriers.v_full.index(stage), VALUE_BYTES)
            copy_blocks(sources.v, seq, kv_head, starts, barriers.v_full.index(stage), tiles.v, stage, config.DIM_V)
            turn += 1
        under_way = draw(under_way, walk.begin >= walk.full_end, lengths)
        number, count = next_number(number, under_way, lengths), count + 1
    tell_end(number, count, barriers)


@gluon.jit
def _copy_bias(bias, rules, seq, row, starts, full, bias_tiles, stage, config: gl.constexpr):
    """Copy the bias of pairs of a tile, whose blocks begin at `starts`, for each consumer, and tell the barrier."""
    BLOCKS: gl.constexpr = config.BLOCKS
    entry = copied_entry(rules.bias, seq.batch)
    head = seq.head // rules.bias.group
    chunks = bias_tiles._reinterpret(bias.dtype, [config.STAGES * config.CONSUMERS * BLOCKS, 1, 1, BLOCK_M, config.SUB], bias.layout)
    for block in gl.static_range(BLOCKS):
        for i in gl.static_range(config.CONSUMERS):
            chunk = chunks.index((config.CONSUMERS * stage + i) * BLOCKS + block)  # [1, 1, BLOCK_M, SUB]
            copy(bias, [entry, head, row + i * BLOCK_M, starts[block]], full, chunk)


@gluon.jit
def _consume(tiles, barriers, rules, lengths, out, lse, which: gl.constexpr, config: gl.constexpr):
    """Out and lse of BLOCK_M queries of each of the program's blocks, in place `which`."""
    turn, count = first_turn(), 0  # and blocks so far
    number, seq, row, visited = told(count, barriers, rules, lengths, which)
    while number < lengths.works:
        walk = tile_range(visited, rules, seq, row, number, lengths, config.QUERIES, config.BLOCK_N, config.SUB)
        ends = None if rules.table is None else end_numbers(rules, seq)
        q_pieces = pieces(tiles.q, which, config.DIM)
        sums = _no_sums(turn, tiles.v.dtype, config)
        if config.BIAS_FIRST:
            for i in gl.static_range(len(q_pieces)):
                _multiply(q_pieces[i], rules.scale)
        if config.Q_IN_REGISTERS:
            q_pieces = _loaded(q_pieces, config)
        context = Context(q_pieces, tiles, barriers, rules, seq, row, walk, ends)
        begin, end = own_steps(context, which, config)
        sums = leave_out(context, sums, walk.begin, begin, which, config)
        if begin < end:
            sums = add_tiles(context, sums, begin, end, which, config)
            if not config.Q_IN_REGISTERS:
                mbarrier.arrive(barriers.q_free.index(which), count=1)
            sums = add_last_values(context, sums, config)
        else:
            mbarrier.arrive(barriers.q_free.index(which), count=1)
        out_of_part = results_of(out, number, lengths, config.QUERIES, config.VALUE_DIM)
        lse_of_part = results_of(lse, number, lengths, config.QUERIES, 2)
        _store(context, sums, out_of_part, lse_of_part, lengths.parts is not None, which, config)
        turn = leave_out(context, sums, end, walk.full_end, which, config).turn
        count += 1
        number, seq, row, visited = told(count, barriers, rules, lengths, which)


@gluon.jit
def _loaded(q_pieces, config: gl.constexpr):
    """Pieces of queries in registers."""
    found = ()
    for i in gl.static_range(len(q_pieces)):
        found += (q_pieces[i].load(gl.DotOperandLayout(0, config.PAIRS, 2)),)
    return found


@gluon.jit
def _no_sums(turn, DTYPE: gl.constexpr, config: gl.constexpr):
    """Sums of no tile of a block of queries, whose first tile has that turn."""
    zeros = gl.full([BLOCK_M, config.BLOCK_N], 0.0, gl.float32, config.PAIRS)  # [BLOCK_M, BLOCK_N]
    return Sums(
        acc=gl.full([BLOCK_M, config.DIM_V], 0.0, gl.float32, product_layout(config.DIM_V)),
        weights=rounded_pairs(zeros, DTYPE),
        row_max=gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, config.PAIRS)),
        row_sum=lane_sums(zeros),
        turn=turn,
        ahead=(),
    )


@gluon.jit
def _store(context, sums, out, lse, IS_PART: gl.constexpr, which: gl.constexpr, config: gl.constexpr):
    """Normalise and store out and lse of a consumer's queries; of a part of their keys, the sums as they are (`merge.Parts`)."""
    rules, seq, acc = context.rules, context.seq, sums.acc
    row_max2, row_sum = sums.row_max * exponent_factor(rules), sums_of_lanes(sums.row_sum, config.PAIRS)  # [BLOCK_M]
    if rules.sinks is not None:
        alpha, row_max2, row_sum = join_sink(sink2_of(rules.sinks, seq), row_max2, row_sum)
        acc = acc * by_row(alpha, acc)
    row = context.row + which * BLOCK_M
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, config.PAIRS))  # [BLOCK_M]
    pointers = slice_pointer(lse, seq) + rows.to(gl.int64) * lse.row
    if IS_PART:
        gl.store(pointers, row_max2, mask=rows < seq.len_q)
        gl.store(pointers + 1, row_sum, mask=rows < seq.len_q)
    else:
        divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc * by_row(reciprocal(divisor), acc)
        gl.store(pointers, gl.where(row_sum == 0.0, float("-inf"), (row_max2 + logarithm2(divisor)) / LOG2E), mask=rows < seq.len_q)
    store_tile(out, seq, row, seq.len_q, acc, config.VALUE_DIM)


@gluon.jit
def _multiply(rows, scale):
    """Multiply rows in shared memory by the scale, where they are."""
    LANES: gl.constexpr = rows.shape[1] // 8  # of a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows.store((rows.load(LAYOUT).to(gl.float32) * scale).to(rows.dtype))
    fence_async_shared()
    sync_threads()
