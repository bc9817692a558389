"""dK and dV on Hopper (sm_90) where each key has an interval of queries, in Gluon: as in hopper/key_grad.py, but for how work is divided.

A program has one block of keys, as blocks of one consumer's size hold fewer pairs that no interval contains. It has one consumer where there is
no bias of keys, there are many programs, and two have room on a processor. Under a dynamic mask, which has such a bias, the longest-lived keys
have many times the queries of others, and a consumer that walks them all would outlast the rest. There two consumers take the tiles of queries
in turn, and at the end the second gives its sums to the first. With head dims over 128 both take every tile, as in hopper/key_grad.py.

Barriers and tiles are allocated where somebody uses them: the compiler gives the memory of a barrier that nobody waits for to tiles, and the
barrier may be made after a tile is stored there.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...problem import Problem
from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Sequence, Strided, slice_pointer, strided
from ..base.leading import vectors_of
from ..base.overlap import follow
from ..base.place import place_keys
from ..base.query_terms import Incoming
from ..base.rules import rules_of
from ..base.window import next_step
from ..portable.group_parts import GroupParts, numbers_of, part_of_group, under_part
from ..visits.intervals import block_bounds
from .attending_queries import BLOCK_M, PAIRS, attending_of, describe_block, is_dead
from .backward_sizes import interval_key_sizes
from .bias_columns import allocate_columns, ones_for_columns
from .copies import (
    PRODUCER_REGISTERS,
    allocate_barriers,
    allocate_tiles,
    backward_dims,
    consumer_registers,
    copied_dims,
    copy_tile,
    launch_registers,
    padded_dims,
    pieces,
    product_layout,
    stage_of,
    tiled,
    whole_of,
)
from .distances import with_spread_table
from .key_results import store_gradients
from .key_tile import (
    BLOCK_N,
    PROBABILITIES,
    Barriers,
    Context,
    Extents,
    Ones,
    Results,
    Sources,
    Sums,
    Tiles,
    Work,
    add_tile,
    copy_keys,
    copy_pairs,
    no_lane_sums,
    no_sums,
    turn_of,
)
from .registers import store_tile, store_vector, sums_of_lanes
from .term_tiles import allocate_terms, are_columns, copy_terms, tiled_terms


class Config(NamedTuple):
    """Options of a launch, the kernel's constexprs."""

    HEAD_DIM: Any
    VALUE_DIM: Any
    DIM: Any  # as they are summed over (`backward_dims`)
    DIM_V: Any
    CONSUMERS: Any
    STAGES: Any  # tiles of queries, dO and bias in shared memory
    SPLIT: Any  # each of two consumers makes some sums of every tile
    IN_TURNS: Any  # each of two consumers makes all sums of every second tile
    ALIKE: Any  # the heads of a group have the same intervals and bias of keys
    BY_GROUP: Any  # sums over queries are summed over the heads of a group too


class Exchange(NamedTuple):
    """A second consumer gives its sums to the first: one barrier of two says that there is room for them, the other that they are there."""

    gradients: Any  # [2, 1] barriers for dK and dV, whose room is that of the tiles of queries
    key_sums: Any  # [2, 1] barriers for the sums over queries; None, as the next, where nobody asked for these
    room: Any  # [BLOCK_N] float32 in shared memory, for the sums over queries


def key_gradients(
    problem: Problem,
    incoming: Incoming,
    table: Any,
    d_key: Tensor | None,
    d_value: Tensor | None,
    key_sums: Tensor | None,
    d_bias: Tensor | None,
    order: Tensor | None,
) -> None:
    """As in portable/key_grad.py, with intervals; `table` is the `spread_table` of the problem."""
    _batch, heads, len_q, head_dim = problem.query.shape
    kv_heads, len_k, value_dim = problem.value.shape[1:]
    consumers, block_m, stages, programs_each = interval_key_sizes(problem, d_bias)
    block_n, (dim, dim_v) = BLOCK_N.value, backward_dims(problem)
    if consumers == 2 and max(dim, dim_v) <= 128:
        dim, dim_v = padded_dims(problem)  # in turns consumers exchange whole columns
    if d_bias is not None:
        d_bias.zero_()  # what lies outside the intervals
    programs, places = fill_of(problem, d_bias)
    parts = GroupParts(problem, programs, places, (d_key, d_value, key_sums), order)
    alike = all(x is None or x.shape[1] <= kv_heads for x in (problem.first, problem.last, problem.bias))
    launch(
        _key_gradients_kernel,
        programs * parts.count,
        q=tiled(problem.query, block_m, whole_of(dim)),
        k=tiled(problem.key, block_n, whole_of(dim)),
        v=tiled(problem.value, block_n, whole_of(dim_v)),
        bias=tiled(problem.pair_bias, block_m, block_n),
        d_out=tiled(incoming.d_out, block_m, whole_of(dim_v)),
        d_bias=tiled(d_bias, block_m, block_n),
        rules=with_spread_table(rules_of(problem), table, heads),
        bounds=strided(block_bounds(problem, block_n), heads),
        terms=tiled_terms(incoming, block_m),
        d_k=strided(parts.d_key, heads),
        d_v=strided(parts.d_value, heads),
        key_sums=strided(vectors_of(parts.key_sums), heads),
        order=strided(order, heads),
        extents=Extents(heads, heads // kv_heads, len_q, len_k, parts.dealt),
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        DIM=dim,
        DIM_V=dim_v,
        CONSUMERS=consumers,
        STAGES=stages,
        ALIKE=alike,
        BY_GROUP=parts.by_group,
        REGISTERS=consumer_registers(consumers, programs_each),
        num_warps=4,
        maxnreg=launch_registers(consumers, programs_each),
    )
    parts.add()


def fill_of(problem: Problem, d_bias: Tensor | None) -> tuple[int, int]:
    """(programs that would have whole groups of heads, how many run at once)."""
    batch, kv_heads, len_k = problem.key.shape[:3]
    sizes = interval_key_sizes(problem, d_bias)
    return triton.cdiv(len_k, BLOCK_N.value) * kv_heads * batch, sizes.programs * processors(problem.query.device)


@gluon.jit
def _key_gradients_kernel(
    q, k, v, bias, d_out, d_bias, rules, bounds, terms, d_k, d_v, key_sums, order, extents,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, ALIKE: gl.constexpr, BY_GROUP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one (batch, key-value head), from a grid of one axis. Walks the group's heads and their queries, or those
    that are dealt to it.

    q, k, v, d_out, bias (of pairs), d_bias and terms (`tiled_terms`) are tensor descriptors; any other bias is read from rules. What is
    stored for each key is stored where `order` says, if there is one. `extents` are :class:`key_tile.Extents`. ALIKE: the heads of a group
    have the same intervals and bias of keys.
    """
    follow()
    SPLIT: gl.constexpr = max(DIM, DIM_V) > 128
    IN_TURNS: gl.constexpr = CONSUMERS == 2 and not SPLIT
    config: gl.constexpr = Config(HEAD_DIM, VALUE_DIM, DIM, DIM_V, CONSUMERS, STAGES, SPLIT, IN_TURNS, ALIKE, BY_GROUP)
    numbers = numbers_of(extents.heads, extents.group, extents.dealt)
    block, number, batch = place_keys(rules, extents.len_k, numbers, BLOCK_N)
    kv_head, head, heads = part_of_group(number, extents.group, extents.dealt)
    work = Work(Sequence(batch, head, extents.len_q, extents.len_k), heads, extents.dealt, block * BLOCK_N)
    if order is not None:
        order = _slice(order, work.seq)
    tiles = Tiles(
        k=allocate_tiles(k, 1, BLOCK_N, DIM),
        v=allocate_tiles(v, 1, BLOCK_N, DIM_V),
        q=allocate_tiles(q, STAGES, BLOCK_M, DIM),
        d_out=allocate_tiles(d_out, STAGES, BLOCK_M, DIM_V),
        terms=allocate_terms(terms, STAGES, BLOCK_M),
        bias=None if bias is None else allocate_tiles(bias, STAGES, BLOCK_M, BLOCK_N),
        d_bias=None if d_bias is None else allocate_tiles(d_bias, 1 if SPLIT else CONSUMERS, BLOCK_M, BLOCK_N),
        p=gl.allocate_shared_memory(q.dtype, [BLOCK_N, BLOCK_M], PROBABILITIES) if SPLIT else None,
        bias_columns=None if rules.bias_by_key is None else allocate_columns(BLOCK_N, 2),
    )
    if is_dead(rules, bounds, work):
        _store_zeros(Results(d_k, d_v, key_sums, d_bias), order, work, config)
    else:
        barriers = Barriers(
            p=allocate_barriers(2, 1) if SPLIT else None,
            kv_full=allocate_barriers(1, 1),
            q_full=allocate_barriers(STAGES, 1),
            d_out_full=allocate_barriers(STAGES, 1),
            free=allocate_barriers(STAGES, 2 if SPLIT else 1),
        )
        GIVES_SUMS: gl.constexpr = IN_TURNS and key_sums is not None
        exchange = Exchange(
            gradients=allocate_barriers(2, 1) if IN_TURNS else None,
            key_sums=allocate_barriers(2, 1) if GIVES_SUMS else None,
            room=gl.allocate_shared_memory(gl.float32, [BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])) if GIVES_SUMS else None,
        )
        ones = Ones(
            keys=None if rules.bias_by_key is None else ones_for_columns(BLOCK_M),
            scores=ones_for_columns(BLOCK_N) if are_columns(terms.dtype) else None,
            d_p=ones_for_columns(BLOCK_N, FIRST=3) if are_columns(terms.dtype) else None,
        )
        fence_async_shared()
        copy_keys(k, v, work, kv_head, barriers.kv_full.index(0), tiles, config)
        sources = Sources(q, terms, d_out, bias=bias)
        gl.warp_specialize(
            [  # d_k and d_v outside tuples, as in key_grad.py
                (_consume, (tiles, ones, barriers, exchange, rules, bounds, d_k, d_v, key_sums, d_bias, order, work, which, config))
                if which < CONSUMERS
                else (_produce, (sources, tiles, barriers, rules, bounds, work, config))
                for which in (0, 1, 2)[: CONSUMERS + 1]
            ],
            [4] * (CONSUMERS - 1) + [1],
            [REGISTERS] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
        )


@gluon.jit
def _slice(t, seq):
    """The slice of one sequence as a tensor that has no other: an address for consumers to keep, where they would keep strides too."""
    return Strided(slice_pointer(t, seq), 0, 0, t.row, t.col, 1, t.whole)


@gluon.jit
def _store_zeros(results, order, work, config: gl.constexpr):
    """The gradients of a block of keys that no query attends."""
    WIDTH: gl.constexpr = 256 if config.SPLIT else copied_dims(config.DIM)
    SUMS: gl.constexpr = product_layout(WIDTH)
    seq, col = work.seq, work.col
    zeros = gl.full([BLOCK_N, WIDTH], 0.0, gl.float32, SUMS)
    if results.d_k is not None:
        store_tile(results.d_k, under_part(results.d_k, seq, work.dealt), col, seq.len_k, zeros, config.HEAD_DIM, order)
    if results.d_v is not None:
        store_tile(results.d_v, under_part(results.d_v, seq, work.dealt), col, seq.len_k, zeros, config.VALUE_DIM, order)
    if results.key_sums is not None:
        no_key_sums = gl.full([BLOCK_N], 0.0, gl.float32, gl.SliceLayout(1, SUMS))
        if config.BY_GROUP:
            store_vector(results.key_sums, under_part(results.key_sums, seq, work.dealt), col, seq.len_k, no_key_sums, order)
        else:
            for head in range(seq.head, seq.head + work.heads):
                store_vector(results.key_sums, Sequence(seq.batch, head, seq.len_q, seq.len_k), col, seq.len_k, no_key_sums, order)


@gluon.jit
def _store_all_sums(key_sums, order, seq, col, sums, exchange, turn, which: gl.constexpr):
    """The sums over the queries of all consumers: of two in turns the second gives its own to the first, the `turn`-th time."""
    if exchange.key_sums is None:
        store_vector(key_sums, seq, col, seq.len_k, sums, order)
    elif which == 0:
        mbarrier.wait(exchange.key_sums.index(1), turn & 1)
        sums += exchange.room.load(gl.SliceLayout(1, PAIRS))
        mbarrier.arrive(exchange.key_sums.index(0), count=1)
        store_vector(key_sums, seq, col, seq.len_k, sums, order)
    else:
        mbarrier.wait(exchange.key_sums.index(0), (turn & 1) ^ 1)
        exchange.room.store(sums)
        mbarrier.arrive(exchange.key_sums.index(1), count=1)


@gluon.jit
def _produce(sources, tiles, barriers, rules, bounds, work, config: gl.constexpr):
    """Copy tiles of queries, bias and dO to shared memory, as far ahead as there are free stages."""
    BIAS_BYTES: gl.constexpr = 0 if sources.bias is None else sources.bias.block_type.nbytes
    Q_BYTES: gl.constexpr = 2 * BLOCK_M * copied_dims(config.DIM) + sources.terms.block_type.nbytes + BIAS_BYTES
    seq, col = work.seq, work.col
    step = 0
    for head in range(seq.head, seq.head + work.heads):
        this = Sequence(seq.batch, head, seq.len_q, seq.len_k)
        attending = attending_of(rules, bounds, this, col)
        for start in range(attending.begin, attending.end, BLOCK_M):
            stage, phase = stage_of(step, config.STAGES)
            mbarrier.wait(barriers.free.index(stage), phase ^ 1)
            q_full = barriers.q_full.index(stage)
            mbarrier.expect(q_full, Q_BYTES)
            copy_tile(sources.q, seq.batch, head, start, q_full, tiles.q, stage, config.DIM)
            copy_terms(sources.terms, seq, head, start, q_full, tiles.terms.index(stage))
            if sources.bias is not None:
                copy_pairs(sources.bias, rules.bias, this, start, col, q_full, tiles.bias, stage)
            d_out_full = barriers.d_out_full.index(stage)
            mbarrier.expect(d_out_full, 2 * BLOCK_M * copied_dims(config.DIM_V))
            copy_tile(sources.d_out, seq.batch, head, start, d_out_full, tiles.d_out, stage, config.DIM_V)
            step += 1


@gluon.jit
def _consume(
    tiles, ones, barriers, exchange, rules, bounds, d_k, d_v, key_sums, d_bias, order, work, which: gl.constexpr, config: gl.constexpr
):  # fmt: skip
    """Gradients of the program's keys. Of two consumers in turns each has every second tile of queries; the first stores the sum of both."""
    SPLIT: gl.constexpr = config.SPLIT
    own: gl.constexpr = which if config.IN_TURNS else 0
    if SPLIT:
        if which == 0:
            d_k, key_sums, d_bias = None, None, None
        else:
            d_v = None
    results = Results(d_k, d_v, key_sums, d_bias)
    seq, col = work.seq, work.col
    k_pieces, v_pieces = pieces(tiles.k, 0, config.DIM), pieces(tiles.v, 0, config.DIM_V)
    bias_columns = None if tiles.bias_columns is None else tiles.bias_columns[which]
    context = Context(k_pieces, v_pieces, bias_columns, ones, tiles, barriers, rules, results, col, own)
    of_group = 0
    if config.ALIKE:
        of_group = describe_block(context, bounds, seq)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    sums = no_sums(config.DIM, config.DIM_V, BLOCK_M, OF_KEYS=not SPLIT or which == 1, OF_VALUES=not SPLIT or which == 0)
    before = 0  # steps of the heads before
    for head in range(seq.head, seq.head + work.heads):
        this = Sequence(seq.batch, head, seq.len_q, seq.len_k)
        if not config.BY_GROUP:
            sums = Sums(sums.dk, sums.dv, no_lane_sums(BLOCK_M))
        keys, steps = of_group if config.ALIKE else describe_block(context, bounds, this)
        sums = _add_head(context, this, keys, steps, sums, before, which, config)
        before += gl.cdiv(steps.end - steps.begin, BLOCK_M)
        if results.key_sums is not None and not config.BY_GROUP:
            _store_all_sums(results.key_sums, order, this, col, sums_of_lanes(sums.lanes, PAIRS), exchange, head - seq.head, which)
    if results.key_sums is not None and config.BY_GROUP:
        place = under_part(results.key_sums, seq, work.dealt)
        _store_all_sums(results.key_sums, order, place, col, sums_of_lanes(sums.lanes, PAIRS), exchange, 0, which)
    if config.IN_TURNS:
        _store_both_gradients(results, order, sums, rules, work, tiles, exchange, which, config)
    else:
        store_gradients(results, order, sums, rules, work, col, config)


@gluon.jit
def _add_head(context, seq, keys, steps, sums, before, which: gl.constexpr, config: gl.constexpr):
    """`sums` and a consumer's tiles of one head, after so many `before` of other heads."""
    IN_TURNS: gl.constexpr = config.IN_TURNS
    STAGES: gl.constexpr = config.STAGES
    STEP: gl.constexpr = 2 * BLOCK_M if IN_TURNS else BLOCK_M
    begin, end = steps.begin, steps.end
    mine = begin
    if IN_TURNS:
        mine = begin + ((before + which) % 2) * BLOCK_M
    open_begin = next_step(mine, steps.open_begin, STEP)
    open_end = gl.maximum(next_step(mine, steps.open_end, STEP), open_begin)
    bounds = (mine, open_begin, open_end, end)
    for part in gl.static_range(3):  # those that hide no pair lie between others
        for start in range(bounds[part], gl.minimum(bounds[part + 1], end), STEP):
            turn = turn_of(before + (start - begin) // BLOCK_M, STAGES)
            sums = add_tile(context, seq, keys, sums, turn, start, config, EDGE=part != 1)
    return sums


@gluon.jit
def _store_both_gradients(results, order, sums, rules, work, tiles, exchange, which: gl.constexpr, config: gl.constexpr):
    """`store_gradients` of two consumers in turns: the second gives its sums to the first."""
    SUMS: gl.constexpr = product_layout(copied_dims(config.DIM_V))
    seq, col = work.seq, work.col
    if results.d_bias is not None:
        tma.store_wait(0)
    of_keys, of_values = under_part(results.d_k, seq, work.dealt), under_part(results.d_v, seq, work.dealt)
    given = _room_for_gradients(tiles, config.DIM)
    if which == 0:
        mbarrier.arrive(exchange.gradients.index(0), count=1)  # its tiles of queries are read: their memory takes the sums of the other
        mbarrier.wait(exchange.gradients.index(1), 0)
        if results.d_k is not None:
            store_tile(results.d_k, of_keys, col, seq.len_k, (sums.dk[0] + given.index(0).load(SUMS)) * rules.scale, config.HEAD_DIM, order)
        if results.d_v is not None:
            store_tile(results.d_v, of_values, col, seq.len_k, sums.dv[0] + given.index(1).load(SUMS), config.VALUE_DIM, order)
    else:
        mbarrier.wait(exchange.gradients.index(0), 0)
        if results.d_k is not None:
            given.index(0).store(sums.dk[0])
        if results.d_v is not None:
            given.index(1).store(sums.dv[0])
        mbarrier.arrive(exchange.gradients.index(1), count=1)


@gluon.jit
def _room_for_gradients(tiles, DIM: gl.constexpr):
    """The memory of the tiles of queries as two float32 tiles of sums, [2, BLOCK_N, columns]."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return tiles.q._reinterpret(gl.float32, [2, BLOCK_N, copied_dims(DIM)], LAYOUT)
