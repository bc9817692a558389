"""dQ on Hopper (sm_90) for head dims to 256, in Gluon: the same as portable/query_grad.py without a dBias.

The parts of a program run side by side: one or two consumers of 64 queries each, and a producer that copies tiles of keys, values and bias to
shared memory ahead of them. Of head dims to 64 there is one consumer, and two or three programs share a processor. A consumer makes dS of one
tile while dS K of the tile before is still multiplied. As in hopper/forward.py, a program may take several blocks of queries, or a part of the
keys of one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...problem import Problem
from ..base.bias_columns import COLUMNS
from ..base.distances import inner_steps, outer_places
from ..base.launch import launch
from ..base.layout import copied_entry, strided
from ..base.overlap import follow
from ..base.parts import sum_parts
from ..base.query_terms import Incoming
from ..base.rules import place_of_first
from ..base.window import open_keys
from .addressing import copyable
from .backward_sizes import query_sizes
from .bias_columns import ones_for_columns
from .copies import (
    PANEL,
    PRODUCER_REGISTERS,
    allocate_barriers,
    allocate_tiles,
    backward_dims,
    consumer_registers,
    copied_dims,
    copy,
    copy_tile,
    launch_registers,
    no_sums_of_rows,
    panel_of,
    pieces,
    place_of_queries,
    product_layout,
    stage_of,
    tiled,
    waited,
    whole_of,
)
from .distances import end_numbers, with_spread_table
from .loaded_pairs import prefetch_bias
from .next_block import allocate_numbers, draw, draws_at, next_number, tell, tell_end, told
from .query_tile import BLOCK_M, Context, Sums, Vectors, add_tile, added, terms_of
from .registers import lane_sums, rounded_pairs, store_tile, store_vector, sums_of_lanes
from .walk import (
    OF_QUERIES,
    copy_blocks,
    copy_described,
    in_first_part,
    key_walk,
    lengths_of,
    listed_keys,
    own_tiles,
    results_of,
    tile_range,
    visits_of,
    work_of,
)


class Config(NamedTuple):
    """Constexprs of a launch, and the layouts in registers that follow from them."""

    HEAD_DIM: Any
    VALUE_DIM: Any
    DIM: Any  # as they are multiplied (`backward_dims`)
    DIM_V: Any
    CONSUMERS: Any  # of BLOCK_M queries each
    BLOCK_N: Any  # keys of a tile
    STAGES: Any  # tiles of keys, values and bias in shared memory
    SUB: Any  # keys of a block that a tile is made of
    EVEN_N: Any
    BY_COPY: Any  # O is copied as if it were the first tile
    PAIRS: Any  # of [BLOCK_M, BLOCK_N]


class Sources(NamedTuple):
    """Tensor descriptors of tensors that the producer copies, with their blocks; None where a problem has no such tensor."""

    q: Any  # [1, 1, BLOCK_M, DIM]
    k: Any  # [1, 1, SUB, PANEL], or fewer columns where there are no more; as the next
    v: Any  # [1, 1, SUB, PANEL]
    bias: Any  # [1, 1, BLOCK_M, SUB], of pairs
    intervals: Any  # [1, 1, 1, 2 SUB]
    bias_columns: Any  # [1, 1, SUB, COLUMNS]
    d_out: Any  # [1, 1, BLOCK_M, DIM_V]
    out: Any  # [1, 1, BLOCK_M, DIM], if it is BY_COPY


class Tiles(NamedTuple):
    """Tiles in shared memory; None where a problem has none of the kind."""

    q: Any  # [CONSUMERS, 1, 1, BLOCK_M, DIM], padded to `copied_dims`, as keys
    d_out: Any  # [CONSUMERS, 1, 1, BLOCK_M, DIM_V]
    k: Any  # [STAGES, 1, 1, BLOCK_N, DIM]
    v: Any  # [STAGES, 1, 1, BLOCK_N, DIM_V]
    bias: Any  # [CONSUMERS STAGES, 1, 1, BLOCK_M, BLOCK_N], of pairs, unless consumers load it
    intervals: Any  # [STAGES BLOCK_N / SUB, 1, 1, 1, 2 SUB]
    bias_columns: Any  # [STAGES BLOCK_N / SUB, 1, 1, SUB, COLUMNS]
    ones: Any  # [BLOCK_M, COLUMNS], which bias columns meet in products


class Barriers(NamedTuple):
    """Barriers: full when a copy has come, free when it has been used: a consumer's queries by that one, all else by each. And what the
    producer tells the consumers.
    """

    q_full: Any  # [CONSUMERS, 1], of queries and dO
    q_free: Any  # [CONSUMERS, 1]
    k_full: Any  # [STAGES, 1], of keys, bias, intervals and bias columns
    v_full: Any  # [STAGES, 1]
    free: Any  # [STAGES, 1], of all that comes with keys, and of values
    numbers: Any  # [2, 8 or 16], int32 (`next_block.tell`)


def query_gradients(
    problem: Problem, incoming: Incoming, table: Any, out: Tensor, d_lse: Tensor | None, d_query: Tensor, end_sums: Tensor | None = None
) -> None:
    """As in portable/query_grad.py without a dBias; `table` is the `spread_table` of the problem.

    And the forms of terms that `incoming` has are filled, as a program has what makes them at hand. A bias of pairs that the copy engine
    cannot address is loaded by the consumers.
    """
    heads, head_dim, len_k = problem.query.shape[1], problem.query.shape[3], problem.key.shape[2]
    block_m, (dim, dim_v) = BLOCK_M.value, backward_dims(problem)
    consumers, block_n, stages, programs_each = query_sizes(problem)
    rules, intervals, bias_columns, sub = key_walk(problem, consumers * block_m, block_n)
    rules = with_spread_table(rules, table, heads)
    lengths, programs = lengths_of(problem, consumers * block_m, rules, d_query, programs_each, OF_QUERIES)
    parts, d_q = lengths.parts, d_query
    if parts is not None:
        d_q = torch.empty((parts, *d_query.shape), dtype=torch.float32, device=d_query.device)
    launch(
        _query_gradients_kernel,
        programs,
        q=tiled(problem.query, block_m, whole_of(dim)),
        k=tiled(problem.key, sub, panel_of(dim)),
        v=tiled(problem.value, sub, panel_of(dim_v)),
        bias=tiled(copyable("bias", problem.pair_bias), block_m, sub),
        intervals=intervals,
        bias_columns=bias_columns,
        d_out=tiled(incoming.d_out, block_m, whole_of(dim_v)),
        out=tiled(out, block_m, whole_of(dim_v)) if max(dim, dim_v) <= 128 else strided(out, heads),
        rules=rules,
        lengths=lengths,
        lse=strided(incoming.lse, heads),
        d_lse=strided(d_lse, heads),
        stored=incoming.stored(problem),
        d_q=strided(d_q if parts is None else d_q[0], heads),
        end_sums=None if end_sums is None else (strided(end_sums[0], heads), strided(end_sums[1], heads)),
        HEAD_DIM=head_dim,
        VALUE_DIM=problem.value.shape[3],
        DIM=dim,
        DIM_V=dim_v,
        BLOCK_N=block_n,
        STAGES=stages,
        EVEN_N=problem.ends_q is None and len_k % block_n == 0,
        CONSUMERS=consumers,
        REGISTERS=consumer_registers(consumers, programs_each),
        num_warps=4,
        maxnreg=launch_registers(consumers, programs_each),
    )
    if parts is not None:
        sum_parts(d_q.flatten(0, 1), d_query)


@gluon.jit
def _query_gradients_kernel(
    q, k, v, bias, intervals, bias_columns, d_out, out, rules, lengths, lse, d_lse, stored, d_q, end_sums,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, EVEN_N: gl.constexpr, CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: dQ and terms of some of the works, CONSUMERS times BLOCK_M queries of one (batch, head) each, from a grid of one axis.

    Of a table of distances it writes the sums at its ends, too, if they are wanted.

    q, k, v, d_out, out, bias (of pairs), intervals, bias_columns are tensor descriptors, as in hopper/forward.py, or else None; but out, of
    wide heads, is read by pointers. `lengths` are :class:`walk.Lengths`. The terms go where `stored` says (`query_terms.Stored`).
    """
    follow()
    SUB: gl.constexpr = k.block_shape[2]
    PAIRS: gl.constexpr = product_layout(BLOCK_N)
    config: gl.constexpr = Config(
        HEAD_DIM, VALUE_DIM, DIM, DIM_V, CONSUMERS, BLOCK_N, STAGES, SUB, EVEN_N, BY_COPY=max(DIM, DIM_V) <= 128, PAIRS=PAIRS
    )
    tiles = Tiles(
        q=allocate_tiles(q, CONSUMERS, BLOCK_M, DIM),
        d_out=allocate_tiles(d_out, CONSUMERS, BLOCK_M, DIM_V),
        k=allocate_tiles(k, STAGES, BLOCK_N, DIM),
        v=allocate_tiles(v, STAGES, BLOCK_N, DIM_V),
        bias=None if bias is None else allocate_tiles(bias, STAGES * CONSUMERS, BLOCK_M, BLOCK_N),
        intervals=None if intervals is None else allocate_tiles(intervals, STAGES * (BLOCK_N // SUB), 1, 2 * SUB),
        bias_columns=None if bias_columns is None else allocate_tiles(bias_columns, STAGES * (BLOCK_N // SUB), SUB, COLUMNS),
        ones=None if bias_columns is None else ones_for_columns(BLOCK_M),
    )
    barriers = Barriers(
        q_full=allocate_barriers(CONSUMERS, 1),
        q_free=allocate_barriers(CONSUMERS, 1),
        k_full=allocate_barriers(STAGES, 1),
        v_full=allocate_barriers(STAGES, 1),
        free=allocate_barriers(STAGES, CONSUMERS),
        numbers=allocate_numbers(rules),
    )
    fence_async_shared()
    sources = Sources(q, k, v, bias, intervals, bias_columns, d_out, out if config.BY_COPY else None)
    vectors = Vectors(None if config.BY_COPY else out, lse, d_lse, stored)
    gl.warp_specialize(
        [
            (_consume, (tiles, barriers, rules, lengths, vectors, d_q, end_sums, which, config))
            if which < CONSUMERS
            else (_produce, (sources, tiles, barriers, rules, lengths, config))
            for which in (0, 1, 2)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [REGISTERS] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(sources, tiles, barriers, rules, lengths, config: gl.constexpr):
    """Copy queries, dO and O, and tiles of keys, values, bias, intervals and bias columns to shared memory, as far ahead as stages are free.

    O comes, BY_COPY, as if it were the first tile: that of one consumer in the place of keys, that of another in the place of values.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    SUB: gl.constexpr = config.SUB
    BLOCKS: gl.constexpr = BLOCK_N // SUB
    OUT_BYTES: gl.constexpr = 2 * BLOCK_M * copied_dims(config.DIM_V)
    QUERY_BYTES: gl.constexpr = 2 * BLOCK_M * copied_dims(config.DIM) + OUT_BYTES
    KEY_BYTES: gl.constexpr = 2 * BLOCK_N * copied_dims(config.DIM)
    VALUE_BYTES: gl.constexpr = 2 * BLOCK_N * copied_dims(config.DIM_V)
    INTERVAL_BYTES: gl.constexpr = 0 if sources.intervals is None else BLOCKS * sources.intervals.block_type.nbytes
    COLUMN_BYTES: gl.constexpr = 0 if sources.bias_columns is None else BLOCKS * sources.bias_columns.block_type.nbytes
    BIAS_BYTES: gl.constexpr = 0 if sources.bias is None else config.CONSUMERS * sources.bias.block_type.nbytes
    LOOKS_AHEAD: gl.constexpr = rules.lists is not None and BLOCKS <= 2  # a producer has registers for no more
    turn = 0  # tiles so far
    number, count, under_way = gl.program_id(0), 0, 0
    while number < lengths.works:
        seq, row = work_of(number, rules, lengths, config.CONSUMERS * BLOCK_M)
        visited = visits_of(rules, seq, row, config.CONSUMERS * BLOCK_M)
        walk = tile_range(visited, rules, seq, row, number, lengths, config.CONSUMERS * BLOCK_M, BLOCK_N, SUB)
        if LOOKS_AHEAD:  # keys are asked for before the waits that come before they are copied
            following = listed_keys(rules, seq, row, walk.begin, walk, config.CONSUMERS * BLOCK_M, BLOCK_N, SUB)
        entry, first = place_of_queries(seq, row)
        if config.BY_COPY:
            stage, phase = stage_of(turn, STAGES)
            mbarrier.wait(barriers.free.index(stage), phase ^ 1)
            mbarrier.expect(barriers.k_full.index(stage), OUT_BYTES)
            copy_tile(sources.out, entry, seq.head, first, barriers.k_full.index(stage), tiles.k, stage, config.DIM_V)
            mbarrier.expect(barriers.v_full.index(stage), (config.CONSUMERS - 1) * OUT_BYTES)
            if config.CONSUMERS == 2:
                copy_tile(sources.out, entry, seq.head, first + BLOCK_M, barriers.v_full.index(stage), tiles.v, stage, config.DIM_V)
            turn += 1
        tell(number, seq, row, visited, count, barriers.numbers)
        for i in gl.static_range(config.CONSUMERS):  # a consumer may still read its queries of the block before
            q_full = barriers.q_full.index(i)
            mbarrier.wait(barriers.q_free.index(i), (count & 1) ^ 1)
            mbarrier.expect(q_full, QUERY_BYTES)
            copy_tile(sources.q, entry, seq.head, first + i * BLOCK_M, q_full, tiles.q, i, config.DIM)
            copy_tile(sources.d_out, entry, seq.head, first + i * BLOCK_M, q_full, tiles.d_out, i, config.DIM_V)
        kv_head = seq.head // lengths.group
        for step in range(walk.begin, walk.full_end, BLOCK_N):
            if not LOOKS_AHEAD:
                starts = listed_keys(rules, seq, row, step, walk, config.CONSUMERS * BLOCK_M, BLOCK_N, SUB)
            else:
                starts = following
            under_way = draw(under_way, step == draws_at(walk, BLOCK_N), lengths)
            stage, phase = stage_of(turn, STAGES)
            k_full = barriers.k_full.index(stage)
            mbarrier.wait(barriers.free.index(stage), phase ^ 1)
            mbarrier.expect(k_full, KEY_BYTES + INTERVAL_BYTES + COLUMN_BYTES + BIAS_BYTES)
            copy_blocks(sources.k, seq, kv_head, starts, k_full, tiles.k, stage, config.DIM)
            copy_described(sources, tiles, rules, seq, starts, k_full, stage, BLOCKS, SUB)
            if sources.bias is not None:  # whose columns are one block
                entry = copied_entry(rules.bias, seq.batch)
                head = seq.head // rules.bias.group
                for i in gl.static_range(config.CONSUMERS):
                    copy(sources.bias, [entry, head, row + i * BLOCK_M, starts[0]], k_full, tiles.bias.index(config.CONSUMERS * stage + i))
            prefetch_bias(sources.bias, rules, seq, row, starts[0], config.CONSUMERS * BLOCK_M, BLOCK_N)
            if LOOKS_AHEAD:
                following = listed_keys(rules, seq, row, step + BLOCK_N, walk, config.CONSUMERS * BLOCK_M, BLOCK_N, SUB)
            mbarrier.expect(barriers.v_full.index(stage), VALUE_BYTES)
            copy_blocks(sources.v, seq, kv_head, starts, barriers.v_full.index(stage), tiles.v, stage, config.DIM_V)
            turn += 1
        under_way = draw(under_way, walk.begin >= walk.full_end, lengths)
        number, count = next_number(number, under_way, lengths), count + 1
    tell_end(number, count, barriers)


@gluon.jit
def _consume(tiles, barriers, rules, lengths, vectors, d_q, end_sums, which: gl.constexpr, config: gl.constexpr):
    """dQ and terms of BLOCK_M queries of each of the program's blocks, in place `which`."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    turn, count = 0, 0  # tiles and blocks so far
    number, seq, row, visited = told(count, barriers, rules, lengths, which)
    while number < lengths.works:
        walk = tile_range(visited, rules, seq, row, number, lengths, config.CONSUMERS * BLOCK_M, BLOCK_N, config.SUB)
        own_row = row + which * BLOCK_M
        q_pieces, d_out_pieces = pieces(tiles.q, which, config.DIM), pieces(tiles.d_out, which, config.DIM_V)
        out_pieces = None
        stage, phase = stage_of(turn, STAGES)
        if config.BY_COPY:
            mbarrier.wait(barriers.k_full.index(stage), phase)
            mbarrier.wait(barriers.v_full.index(stage), phase)
            out_pieces = pieces(tiles.k if which == 0 else tiles.v, stage, config.DIM_V)
        divisor_rows, delta_rows = terms_of(
            vectors, out_pieces, d_out_pieces, seq, own_row, in_first_part(number, lengths), config
        )  # [BLOCK_M] each
        if config.BY_COPY:
            mbarrier.arrive(barriers.free.index(stage), count=1)
            turn += 1
        context = Context(tiles, barriers, rules, seq, row, walk, q_pieces, d_out_pieces, divisor_rows, delta_rows)
        dq = no_sums_of_rows(config.DIM)
        ds = rounded_pairs(gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, config.PAIRS), tiles.k.dtype)  # [BLOCK_M, BLOCK_N / 2]
        no_lanes = lane_sums(gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, config.PAIRS))  # [BLOCK_M, 4]
        begin, end = own_tiles(rules, seq, own_row, walk, BLOCK_M, BLOCK_N)
        turn = _leave_out(barriers, turn, walk.begin, begin, config)
        sums = Sums(dq, ds, turn, ends=() if end_sums is None else (no_lanes, no_lanes))
        if begin < end:
            after = begin + BLOCK_N
            sums = add_tile(context, sums, begin, which, config, EDGE=True, FIRST=True)
            if rules.lists is None:
                open_begin, open_end = open_keys(rules.left, rules.right, seq, own_row, after, walk.end, BLOCK_M, BLOCK_N)
                open_begin, open_end = gl.minimum(open_begin, end), gl.minimum(open_end, end)
                if rules.left is not None:
                    for step in range(after, open_begin, BLOCK_N):
                        sums = add_tile(context, sums, step, which, config, EDGE=True, FIRST=False)
                if rules.table is None:
                    for step in range(open_begin, open_end, BLOCK_N):
                        sums = add_tile(context, sums, step, which, config, EDGE=False, FIRST=False)
                else:
                    sums = _add_open_tiles_of_table(context, sums, open_begin, open_end, which, config)
                if rules.right is not None or not config.EVEN_N:
                    for step in range(open_end, end, BLOCK_N):
                        sums = add_tile(context, sums, step, which, config, EDGE=True, FIRST=False)
            else:
                for step in range(after, walk.end, BLOCK_N):
                    sums = add_tile(context, sums, step, which, config, EDGE=True, FIRST=False)
                for step in range(walk.end, walk.full_end, BLOCK_N):
                    sums = add_tile(context, sums, step, which, config, EDGE=False, FIRST=False)
            turn = sums.turn
            mbarrier.arrive(barriers.q_free.index(which), count=1)
            last = (turn - 1) % STAGES
            dq = waited(added(sums, tiles, last, config))
            mbarrier.arrive(barriers.free.index(last), count=1)
        else:
            mbarrier.arrive(barriers.q_free.index(which), count=1)
        result = results_of(d_q, number, lengths, config.CONSUMERS * BLOCK_M, config.HEAD_DIM)
        for i in gl.static_range(len(dq)):
            store_tile(result, seq, own_row, seq.len_q, dq[i] * rules.scale, config.HEAD_DIM, FIRST=i * PANEL)
        if end_sums is not None:
            for place in gl.static_range(2):
                store_vector(end_sums[place], seq, own_row, seq.len_q, sums_of_lanes(sums.ends[place], config.PAIRS))
        turn = _leave_out(barriers, turn, end, walk.full_end, config)
        count += 1
        number, seq, row, visited = told(count, barriers, rules, lengths, which)


@gluon.jit
def _leave_out(barriers, turn, begin, end, config: gl.constexpr):
    """The turn after tiles of which the consumer has no pair: it gives back what comes."""
    for _ in range(begin, end, config.BLOCK_N):
        stage, phase = stage_of(turn, config.STAGES)
        mbarrier.wait(barriers.k_full.index(stage), phase)
        mbarrier.wait(barriers.v_full.index(stage), phase)
        mbarrier.arrive(barriers.free.index(stage), count=1)
        turn += 1
    return turn


@gluon.jit
def _add_open_tiles_of_table(context, sums, begin, end, which: gl.constexpr, config: gl.constexpr):
    """Sums with the tiles of some steps beside a table: outer ones of keys before the queries, inner ones, then outer ones of keys after."""
    rules, seq = context.rules, context.seq
    first, last = end_numbers(rules, seq)
    low, high = outer_places(rules.distances, first, last, BLOCK_M, config.BLOCK_N)
    place = place_of_first(rules, seq, context.row + which * BLOCK_M, 0)  # that of a key is higher by its number
    inner_begin, inner_end = inner_steps(begin, end, low + 1 - place, high - place, config.BLOCK_N)
    number, outer_end = first, inner_begin
    for after in range(2):
        for step in range(begin, outer_end, config.BLOCK_N):
            sums = add_tile(context, sums, step, which, config, EDGE=False, FIRST=False, number=number, at_first=after == 0)
        for step in range(outer_end, inner_end, config.BLOCK_N):
            sums = add_tile(context, sums, step, which, config, EDGE=False, FIRST=False)
        number, begin, outer_end = last, inner_end, end
    return sums
