"""dQ on Hopper (sm_90) for head dims from 33 to 128, in Gluon: the same as portable/query_grad.py without a dBias.

A program has three parts that run side by side: two consumers of 64 queries each, and a producer that copies tiles of keys, values and bias
to shared memory ahead of them. A consumer makes dS of one tile while dS K of the tile before is still multiplied. As in hopper/forward.py, a
program may take several blocks of queries.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...problem import Problem
from ..base.bias_columns import COLUMNS
from ..base.launch import launch
from ..base.layout import copied_entry, strided
from ..base.overlap import follow
from ..base.query_terms import STORED_COLUMNS, Incoming, store_terms
from ..base.softmax import divisor2
from ..base.window import open_keys
from .bias_columns import ones_for_columns
from .copies import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PANEL,
    PRODUCER_REGISTERS,
    allocate_barriers,
    copy,
    padded_dim,
    place_of_queries,
    stage_of,
    tiled,
)
from .registers import Hiding, as_factor, bias_vector, exponent_factor, load_vector, mask_of, rounded_pairs, ruled, store_tile, words_of
from .walk import (
    Lengths,
    bias_columns_of,
    blocks_ahead,
    blocks_of,
    copy_blocks,
    copy_described,
    first_blocks,
    intervals_of,
    key_walk,
    listed_key,
    listed_keys,
    programs_of,
    tile_range,
    visits_of,
    work_of,
)

BLOCK_M = gl.constexpr(64)  # queries of a consumer
BLOCK_N = gl.constexpr(64)
STAGES = gl.constexpr(3)  # tiles of keys, values and bias in shared memory


class Config(NamedTuple):
    """Constexprs of a launch, and the layouts in registers that follow from them."""

    HEAD_DIM: Any
    DIM: Any  # padded
    SUB: Any  # keys of a block that a tile is made of
    EVEN_N: Any
    PAIRS: Any  # of [BLOCK_M, BLOCK_N]
    SUMS: Any  # of [BLOCK_M, DIM]


class Sources(NamedTuple):
    """Tensor descriptors of tensors that the producer copies, with their blocks; None where a problem has no such tensor."""

    q: Any  # [1, 1, BLOCK_M, DIM]
    k: Any  # [1, 1, SUB, PANEL]
    v: Any  # [1, 1, SUB, PANEL]
    bias: Any  # [1, 1, BLOCK_M, SUB], of pairs
    intervals: Any  # [1, 1, 1, 2 SUB]
    bias_columns: Any  # [1, 1, SUB, COLUMNS]
    d_out: Any  # [1, 1, BLOCK_M, DIM]
    out: Any  # [1, 1, BLOCK_M, DIM]


class Tiles(NamedTuple):
    """Tiles in shared memory; None where a problem has none of the kind."""

    q: Any  # [2, 1, 1, BLOCK_M, DIM]
    d_out: Any  # [2, 1, 1, BLOCK_M, DIM]
    k: Any  # [STAGES, 1, 1, BLOCK_N, DIM]
    v: Any  # [STAGES, 1, 1, BLOCK_N, DIM]
    bias: Any  # [2 STAGES, 1, 1, BLOCK_M, BLOCK_N], of pairs
    intervals: Any  # [STAGES BLOCK_N / SUB, 1, 1, 1, 2 SUB]
    bias_columns: Any  # [STAGES BLOCK_N / SUB, 1, 1, SUB, COLUMNS]
    ones: Any  # [BLOCK_M, COLUMNS], which bias columns meet in products


class Barriers(NamedTuple):
    """Barriers: full when a copy has come, free when both consumers have used it."""

    q_full: Any  # [1, 1], of queries and dO
    q_free: Any  # [1, 1]
    k_full: Any  # [STAGES, 1], of keys, bias, intervals and bias columns
    v_full: Any  # [STAGES, 1]
    free: Any  # [STAGES, 1], of all that comes with keys, and of values


class Vectors(NamedTuple):
    """Vectors by query in memory (`layout.Strided`): two that are read, and two for the terms."""

    lse: Any
    d_lse: Any  # may be None
    terms: Any
    term_columns: Any  # may be None


class Context(NamedTuple):
    """Everything that tiles of keys of a block of queries share."""

    tiles: Any
    barriers: Any
    rules: Any
    seq: Any
    row: Any  # the first query of both consumers
    walk: Any
    q_tile: Any  # [BLOCK_M, DIM], as the next in shared memory, of one consumer
    d_out_tile: Any  # [BLOCK_M, DIM]
    divisor_rows: Any  # [BLOCK_M], as the next float32
    delta_rows: Any  # [BLOCK_M]


class Sums(NamedTuple):
    """State of a consumer between tiles."""

    dq: Any  # [BLOCK_M, DIM] float32, without the last tile
    ds: Any  # [BLOCK_M, BLOCK_N / 2] int32, dS of the last tile (`rounded_pairs`)
    turn: Any  # tiles so far, of all blocks of queries


def query_gradients(problem: Problem, incoming: Incoming, out: Tensor, d_lse: Tensor | None, d_query: Tensor) -> None:
    """As in portable/query_grad.py without a dBias.

    And `incoming.terms` are filled, as a program has what makes them at hand.
    """
    heads, len_q, head_dim = problem.query.shape[1:]
    kv_heads, len_k = problem.key.shape[1:3]
    block_m, block_n, dim = BLOCK_M.value, BLOCK_N.value, padded_dim(problem)
    rules, intervals, bias_columns, sub = key_walk(problem, 2 * block_m, block_n)
    works, programs, turns = programs_of(problem, rules, 2 * block_m)
    terms, term_columns = incoming.stored(heads)
    launch(
        _query_gradients_kernel,
        programs,
        q=tiled(problem.query, block_m, dim),
        k=tiled(problem.key, sub, PANEL.value),
        v=tiled(problem.value, sub, PANEL.value),
        bias=tiled(problem.pair_bias, block_m, sub),
        intervals=intervals,
        bias_columns=bias_columns,
        d_out=tiled(incoming.d_out, block_m, dim),
        out=tiled(out, block_m, dim),
        rules=rules,
        turns=turns,
        lse=strided(incoming.lse, heads),
        d_lse=strided(d_lse, heads),
        terms=terms,
        term_columns=term_columns,
        d_q=strided(d_query, heads),
        heads=heads,
        groups=heads // kv_heads,
        works=works,
        len_q=len_q,
        len_k=len_k,
        HEAD_DIM=head_dim,
        DIM=dim,
        EVEN_N=problem.ends_q is None and len_k % block_n == 0,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[2],
    )


@gluon.jit
def _query_gradients_kernel(
    q, k, v, bias, intervals, bias_columns, d_out, out, rules, turns, lse, d_lse, terms, term_columns, d_q, heads, groups, works, len_q, len_k,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """One program: dQ and terms of some of the `works`, 2 BLOCK_M queries of one (batch, head) each, from a grid of one axis.

    q, k, v, d_out, out, bias (of pairs), intervals, bias_columns are tensor descriptors, as in hopper/forward.py, or else None. The terms go
    to `terms` and `term_columns`, which may be None (`query_terms.Incoming`).
    """
    follow()
    SUB: gl.constexpr = k.block_shape[2]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    config: gl.constexpr = Config(HEAD_DIM, DIM, SUB, EVEN_N, PAIRS, SUMS)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [2, 1, 1, BLOCK_M, DIM], d_out.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles, interval_tiles, column_tiles, ones = None, None, None, None
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES * 2, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    if intervals is not None:
        interval_tiles = gl.allocate_shared_memory(intervals.dtype, [STAGES * (BLOCK_N // SUB), 1, 1, 1, 2 * SUB], intervals.layout)
    if bias_columns is not None:
        column_tiles = gl.allocate_shared_memory(bias_columns.dtype, [STAGES * (BLOCK_N // SUB), 1, 1, SUB, COLUMNS], bias_columns.layout)
        ones = ones_for_columns(BLOCK_M)
    tiles = Tiles(q_tiles, d_out_tiles, k_tiles, v_tiles, bias_tiles, interval_tiles, column_tiles, ones)
    barriers = Barriers(
        q_full=allocate_barriers(1, 1),
        q_free=allocate_barriers(1, 2),
        k_full=allocate_barriers(STAGES, 1),
        v_full=allocate_barriers(STAGES, 1),
        free=allocate_barriers(STAGES, 2),
    )
    fence_async_shared()
    lengths = Lengths(works, heads, len_q, len_k, turns)
    sources = Sources(q, k, v, bias, intervals, bias_columns, d_out, out)
    vectors = Vectors(lse, d_lse, terms, term_columns)
    gl.warp_specialize(
        [
            (_consume, (tiles, barriers, rules, lengths, vectors, d_q, 0, config)),
            (_consume, (tiles, barriers, rules, lengths, vectors, d_q, 1, config)),
            (_produce, (sources, tiles, barriers, rules, lengths, groups, config)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(sources, tiles, barriers, rules, lengths, groups, config: gl.constexpr):
    """Copy queries, dO and O, and tiles of keys, values, bias, intervals and bias columns to shared memory, as far ahead as stages are free.

    O comes as if it were the first tile: that of one consumer in the place of keys, that of the other in the place of values.
    """
    SUB: gl.constexpr = config.SUB
    BLOCKS: gl.constexpr = BLOCK_N // SUB
    OUT_BYTES: gl.constexpr = sources.out.block_type.nbytes
    QUERY_BYTES: gl.constexpr = 2 * sources.q.block_type.nbytes + 2 * sources.d_out.block_type.nbytes
    TILE_BYTES: gl.constexpr = 2 * BLOCK_N * config.DIM
    INTERVAL_BYTES: gl.constexpr = 0 if sources.intervals is None else BLOCKS * sources.intervals.block_type.nbytes
    COLUMN_BYTES: gl.constexpr = 0 if sources.bias_columns is None else BLOCKS * sources.bias_columns.block_type.nbytes
    BIAS_BYTES: gl.constexpr = 0 if sources.bias is None else 2 * sources.bias.block_type.nbytes
    q_full = barriers.q_full.index(0)
    turn = 0  # tiles so far
    ahead = first_blocks(lengths)
    visited = visits_of(blocks_of(gl.program_id(0), ahead, lengths)[0], rules, lengths, 2 * BLOCK_M)
    for number in range(gl.program_id(0), lengths.works, gl.num_programs(0)):
        block, after = blocks_of(number, ahead, lengths)
        seq, row = work_of(block, rules, lengths, 2 * BLOCK_M)
        walk = tile_range(visited, rules, seq, row, 2 * BLOCK_M, BLOCK_N, SUB)
        visited = visits_of(after, rules, lengths, 2 * BLOCK_M)
        ahead = blocks_ahead(number, ahead, lengths)
        stage, phase = stage_of(turn, STAGES)
        mbarrier.wait(barriers.free.index(stage), phase ^ 1)
        mbarrier.expect(barriers.k_full.index(stage), OUT_BYTES)
        entry, first = place_of_queries(seq, row)
        copy(sources.out, [entry, seq.head, first, 0], barriers.k_full.index(stage), tiles.k.index(stage))
        mbarrier.expect(barriers.v_full.index(stage), OUT_BYTES)
        copy(sources.out, [entry, seq.head, first + BLOCK_M, 0], barriers.v_full.index(stage), tiles.v.index(stage))
        turn += 1
        mbarrier.wait(barriers.q_free.index(0), (number // gl.num_programs(0) & 1) ^ 1)
        mbarrier.expect(q_full, QUERY_BYTES)
        for i in gl.static_range(2):
            copy(sources.q, [entry, seq.head, first + i * BLOCK_M, 0], q_full, tiles.q.index(i))
            copy(sources.d_out, [entry, seq.head, first + i * BLOCK_M, 0], q_full, tiles.d_out.index(i))
        kv_head = seq.head // groups
        for step in range(walk.begin, walk.full_end, BLOCK_N):
            starts = listed_keys(rules, seq, row, step, walk, 2 * BLOCK_M, BLOCK_N, SUB)
            stage, phase = stage_of(turn, STAGES)
            k_full = barriers.k_full.index(stage)
            mbarrier.wait(barriers.free.index(stage), phase ^ 1)
            mbarrier.expect(k_full, TILE_BYTES + INTERVAL_BYTES + COLUMN_BYTES + BIAS_BYTES)
            copy_blocks(sources.k, seq, kv_head, starts, k_full, tiles.k, stage)
            copy_described(sources, tiles, rules, seq, starts, k_full, stage, BLOCKS, SUB)
            if sources.bias is not None:  # whose columns are one block
                entry = copied_entry(rules.bias, seq.batch)
                head = seq.head // rules.bias.group
                for i in gl.static_range(2):
                    copy(sources.bias, [entry, head, row + i * BLOCK_M, starts[0]], k_full, tiles.bias.index(2 * stage + i))
            mbarrier.expect(barriers.v_full.index(stage), TILE_BYTES)
            copy_blocks(sources.v, seq, kv_head, starts, barriers.v_full.index(stage), tiles.v, stage)
            turn += 1


@gluon.jit
def _consume(tiles, barriers, rules, lengths, vectors, d_q, which: gl.constexpr, config: gl.constexpr):
    """dQ and terms of BLOCK_M queries of each of the program's blocks, the first or the second."""
    DIM: gl.constexpr = config.DIM
    turn = 0  # tiles so far
    ahead = first_blocks(lengths)
    visited = visits_of(blocks_of(gl.program_id(0), ahead, lengths)[0], rules, lengths, 2 * BLOCK_M)
    for number in range(gl.program_id(0), lengths.works, gl.num_programs(0)):
        block, after = blocks_of(number, ahead, lengths)
        seq, row = work_of(block, rules, lengths, 2 * BLOCK_M)
        walk = tile_range(visited, rules, seq, row, 2 * BLOCK_M, BLOCK_N, config.SUB)
        visited = visits_of(after, rules, lengths, 2 * BLOCK_M)
        ahead = blocks_ahead(number, ahead, lengths)
        own_row = row + which * BLOCK_M
        d_out_tile = tiles.d_out.index(which).reshape([BLOCK_M, DIM])
        mbarrier.wait(barriers.q_full.index(0), number // gl.num_programs(0) & 1)
        stage, phase = stage_of(turn, STAGES)
        mbarrier.wait(barriers.k_full.index(stage), phase)
        mbarrier.wait(barriers.v_full.index(stage), phase)
        out_tile = (tiles.k if which == 0 else tiles.v).index(stage).reshape([BLOCK_M, DIM])
        divisor_rows, delta_rows = _terms(vectors, rules.scale, out_tile, d_out_tile, seq, own_row, config)  # [BLOCK_M] each
        mbarrier.arrive(barriers.free.index(stage), count=1)
        turn += 1
        q_tile = tiles.q.index(which).reshape([BLOCK_M, DIM])
        context = Context(tiles, barriers, rules, seq, row, walk, q_tile, d_out_tile, divisor_rows, delta_rows)
        dq = gl.full([BLOCK_M, DIM], 0.0, gl.float32, config.SUMS)
        ds = rounded_pairs(gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, config.PAIRS), tiles.k.dtype)  # [BLOCK_M, BLOCK_N / 2]
        sums = Sums(dq, ds, turn)
        if walk.begin < walk.full_end:
            after = walk.begin + BLOCK_N
            sums = _add_tile(context, sums, walk.begin, which, config, EDGE=True, FIRST=True)
            if rules.lists is None:
                open_begin, open_end = open_keys(rules.left, rules.right, seq, own_row, after, walk.end, BLOCK_M, BLOCK_N)
                if rules.left is not None:
                    for step in range(after, open_begin, BLOCK_N):
                        sums = _add_tile(context, sums, step, which, config, EDGE=True, FIRST=False)
                for step in range(open_begin, open_end, BLOCK_N):
                    sums = _add_tile(context, sums, step, which, config, EDGE=False, FIRST=False)
                if rules.right is not None or not config.EVEN_N:
                    for step in range(open_end, walk.end, BLOCK_N):
                        sums = _add_tile(context, sums, step, which, config, EDGE=True, FIRST=False)
            else:
                for step in range(after, walk.end, BLOCK_N):
                    sums = _add_tile(context, sums, step, which, config, EDGE=True, FIRST=False)
                for step in range(walk.end, walk.full_end, BLOCK_N):
                    sums = _add_tile(context, sums, step, which, config, EDGE=False, FIRST=False)
            turn = sums.turn
            mbarrier.arrive(barriers.q_free.index(0), count=1)
            last = (turn - 1) % STAGES
            dq = _added(sums, tiles, last, config)
            dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(barriers.free.index(last), count=1)
        else:
            mbarrier.arrive(barriers.q_free.index(0), count=1)
        store_tile(d_q, seq, own_row, seq.len_q, dq * rules.scale, config.HEAD_DIM)


@gluon.jit
def _terms(vectors, scale, out_tile, d_out_tile, seq, row, config: gl.constexpr):
    """The terms of a consumer's queries (`query_terms.Incoming`), which are stored, too."""
    ROWS: gl.constexpr = gl.SliceLayout(1, config.PAIRS)
    lse_rows = load_vector(vectors.lse, vectors.lse.row, seq, row, seq.len_q, float("-inf"), BLOCK_M, ROWS, EVEN=False)
    delta_rows = gl.sum(out_tile.load(config.SUMS).to(gl.float32) * d_out_tile.load(config.SUMS).to(gl.float32), 1)
    delta_rows = gl.convert_layout(delta_rows, ROWS)  # [BLOCK_M]
    if vectors.d_lse is not None:
        of_lse = load_vector(vectors.d_lse, vectors.d_lse.row, seq, row, seq.len_q, 0.0, BLOCK_M, ROWS, EVEN=False)
        delta_rows = gl.where(lse_rows == float("-inf"), 0.0, delta_rows - of_lse)
    if row < seq.len_q:
        places = (vectors.terms, vectors.term_columns, scale)
        columns = gl.arange(0, STORED_COLUMNS, gl.SliceLayout(0, config.PAIRS))
        store_terms(places, seq, row, gl.arange(0, BLOCK_M, ROWS), columns, lse_rows, delta_rows)
    return divisor2(lse_rows), delta_rows


@gluon.jit
def _added(sums, tiles, stage, config: gl.constexpr):
    """dQ with the last tile, whose keys are in a stage, under way."""
    ds = as_factor(sums.ds, tiles.k.dtype, gl.DotOperandLayout(0, config.SUMS, 2))
    return warpgroup_mma(ds, tiles.k.index(stage).reshape([BLOCK_N, config.DIM]), sums.dq, is_async=True)


@gluon.jit
def _add_tile(context, sums, step, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr, FIRST: gl.constexpr):
    """The :class:`Sums` after one tile of keys: its dS is made while the tile before, if it is not the FIRST, is added to dQ with its own."""
    tiles, barriers, rules, seq = context.tiles, context.barriers, context.rules, context.seq
    DIM: gl.constexpr = config.DIM
    PAIRS: gl.constexpr = config.PAIRS
    start = 0  # where there are intervals, nothing needs it
    if rules.first is None:
        start = listed_key(rules, seq, context.row, step, 0, context.walk, 2 * BLOCK_M, config.SUB)
    row = context.row + which * BLOCK_M
    stage, phase = stage_of(sums.turn, STAGES)
    before = (sums.turn - 1) % STAGES
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]  # [BLOCK_M, 1]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_N]
    hiding = Hiding()
    if EDGE:
        words = words_of(rules, seq, row, start, BLOCK_N, KEYS_DOWN=False, partial=context.walk.partial)
        hiding = Hiding(mask_of(rules, seq, rows, cols, row, start), words=words)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    mbarrier.wait(barriers.k_full.index(stage), phase)
    k_tile = tiles.k.index(stage).reshape([BLOCK_N, DIM]).permute((1, 0))
    s = warpgroup_mma(context.q_tile, k_tile, zero, use_acc=False, is_async=True)  # [BLOCK_M, BLOCK_N]
    if rules.bias_by_key is not None:
        s = warpgroup_mma(tiles.ones, bias_columns_of(tiles.bias_columns, stage, BLOCK_N).permute((1, 0)), s, is_async=True)
    mbarrier.wait(barriers.v_full.index(stage), phase)
    v_tile = tiles.v.index(stage).reshape([BLOCK_N, DIM]).permute((1, 0))
    d_p = warpgroup_mma(context.d_out_tile, v_tile, zero, use_acc=False, is_async=True)  # [BLOCK_M, BLOCK_N]
    dq = sums.dq
    if not FIRST:
        dq = _added(sums, tiles, before, config)
    if rules.bias_rows is not None and rules.bias_cols is not None:
        bias = tiles.bias.index(2 * stage + which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS)
    else:
        bias = bias_vector(rules, seq, row, BLOCK_M, PAIRS)
    if EDGE and rules.first is not None:
        middle2, length = intervals_of(tiles.intervals, stage, BLOCK_N, config.SUB, PAIRS)  # [1, BLOCK_N] each
        hiding = Hiding(rows2=(2 * (row + rows)).to(gl.float32), middle2=middle2, length=length)
    s = warpgroup_mma_wait(1 if FIRST else 2, [s])
    s = ruled(s, bias, hiding, rules, seq, row + rows, start + cols, EDGE)
    p = gl.exp2(s * exponent_factor(rules) - context.divisor_rows[:, None])
    d_p = warpgroup_mma_wait(0 if FIRST else 1, [d_p])
    d_s = p * (d_p - context.delta_rows[:, None])
    if not FIRST:
        dq = warpgroup_mma_wait(0, [dq])
        mbarrier.arrive(barriers.free.index(before), count=1)
    return Sums(dq, rounded_pairs(d_s, tiles.k.dtype), sums.turn + 1)
