"""dQ, dK and dV of rows that fit on chip, by one kernel for Hopper (sm_90): a program has all pairs of a (batch, head).

Other kernels make scores and dP twice, once for dQ and once for dK and dV. Here consumers of 64 keys walk the queries as in key_grad.py, for
one block of keys after the other. Each leaves dS in shared memory. A further part of the program, the collector, adds dS K to dQ, which stays
on chip in float32: five products in place of seven and half of the exponents. No two programs add to the same sums, and the collector adds in
the order of the walk, so the bits repeat.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ...problem import Problem
from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Sequence, Span, strided
from ..base.overlap import follow
from ..base.query_terms import Incoming
from ..base.rules import rules_of
from ..visits.walk import query_lists, query_range, walk_step
from .addressing import copyable
from .backward_sizes import one_pass_sizes
from .bias_columns import ones_for_columns, ones_in_registers
from .copies import (
    PRODUCER_REGISTERS,
    allocate_barriers,
    allocate_tiles,
    backward_dims,
    column_pieces,
    launch_registers,
    no_sums_of_rows,
    pieces,
    product_layout,
    stage_of,
    store,
    tiled,
    tiled_mask,
    whole_of,
)
from .key_grad import REGISTERS_WITH_ONES
from .key_results import store_gradients
from .key_tile import BLOCK_N, Barriers, Context, Keys, Ones, Results, Sources, Tiles, Work, copy_keys, no_sums
from .key_walk import Config, add_queries, copy_queries
from .registers import by_rows, by_threads, order_of, store_tile
from .term_tiles import allocate_terms, are_columns, tiled_terms

BLOCK_M = gl.constexpr(64)  # queries of a tile
# Under a mask over more keys than this (batch, head) differ in work, and each has a program of its own. Else programs take several: NVIDIA
# H200, 2026-11-28, (128, 12, 197^2, 64) 0.177 to 0.145 ms.
KEYS_OF_ONE_WORK = 256
D_SCORES_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))  # as dBias is copied


class Extents(NamedTuple):
    """How much there is."""

    sequences: Any  # (batch, head)
    heads: Any
    len_q: Any
    len_k: Any


def all_gradients(
    problem: Problem, incoming: Incoming, d_query: Tensor, d_key: Tensor, d_value: Tensor, d_bias: Tensor | None
) -> None:  # fmt: skip
    """Fill the gradients of a problem without groups of heads; `d_bias` is that of an own bias of pairs, in the queries' dtype."""
    heads, len_q, head_dim = problem.query.shape[1:]
    len_k, value_dim = problem.value.shape[2:]
    dim, dim_v = backward_dims(problem)
    hides = problem.is_masked or problem.left is not None or problem.right is not None
    sizes = one_pass_sizes(
        whole_of(max(dim, dim_v)),
        len_q,
        len_k,
        biased=problem.pair_bias is not None,
        masked=problem.pair_mask is not None,
        hides=hides,
        stores=d_bias is not None,
    )
    assert sizes is not None
    block_m, block_n, keys = BLOCK_M.value, BLOCK_N.value, sizes.consumers * BLOCK_N.value
    sequences, places = problem.query.shape[0] * heads, processors(problem.query.device)
    launch(
        _one_pass_kernel,
        sequences if problem.is_masked and len_k > KEYS_OF_ONE_WORK else min(sequences, places),
        q=tiled(problem.query, block_m, whole_of(dim)),
        k=tiled(problem.key, block_n, whole_of(dim)),
        v=tiled(problem.value, block_n, whole_of(dim_v)),
        bias=tiled(copyable("bias", problem.pair_bias), block_m, block_n),
        mask=tiled_mask(copyable("mask", problem.pair_mask), block_m, block_n),
        d_out=tiled(incoming.d_out, block_m, whole_of(dim_v)),
        rules=rules_of(problem, query_lists(problem, block_m, keys)),
        terms=tiled_terms(incoming, block_m),
        d_q=strided(d_query, heads),
        d_k=strided(d_key, heads),
        d_v=strided(d_value, heads),
        d_bias=tiled(d_bias, block_m, block_n),
        extents=Extents(sequences, heads, len_q, len_k),
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        DIM=dim,
        DIM_V=dim_v,
        CONSUMERS=sizes.consumers,
        STAGES=sizes.stages,
        KEY_STAGES=sizes.key_stages,
        D_SCORES=sizes.d_scores,
        ROOMS=sizes.rooms,
        EVEN_N=len_k % keys == 0,
        HIDES=hides,
        num_warps=4,
        maxnreg=launch_registers(sizes.consumers + 1),
    )


@gluon.constexpr_function
def collector_registers(consumers):
    """Those of a thread of the collector. It holds a tile of dQ, three consumers' keys have 32 dims."""
    return 48 if consumers == 3 else 72


@gluon.constexpr_function
def registers_of(consumers):
    """Those of a consumer's thread beside the collector and the producer."""
    given = (consumers + 2) * launch_registers(consumers + 1) - collector_registers(consumers) - PRODUCER_REGISTERS.value
    return min(240, given // consumers // 8 * 8)


@gluon.jit
def _one_pass_kernel(
    q, k, v, bias, mask, d_out, rules, terms, d_q, d_k, d_v, d_bias, extents,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    KEY_STAGES: gl.constexpr, D_SCORES: gl.constexpr, ROOMS: gl.constexpr, EVEN_N: gl.constexpr, HIDES: gl.constexpr,
):  # fmt: skip
    """One program: all queries and keys of one (batch, head), or of every so many-th, from a grid of one axis.

    q, k, v, d_out, d_bias, bias and mask (of pairs) and terms (`tiled_terms`) are tensor descriptors; a bias or mask that the copy engine
    cannot address is read from rules. ROOMS tiles of queries hold all of them.
    """
    follow()
    REGISTERS: gl.constexpr = registers_of(CONSUMERS)
    LOADED: gl.constexpr = REGISTERS >= REGISTERS_WITH_ONES
    config: gl.constexpr = Config(
        HEAD_DIM,
        VALUE_DIM,
        DIM,
        DIM_V,
        CONSUMERS,
        BLOCK_M,
        CONSUMERS,
        STAGES,
        EVEN_N,
        BY_GROUP=False,
        KEY_STAGES=KEY_STAGES,
        D_SCORES=D_SCORES,
        KEYS_IN_REGISTERS=LOADED,
    )
    tiles = Tiles(
        k=allocate_tiles(k, KEY_STAGES * CONSUMERS, BLOCK_N, DIM),
        v=allocate_tiles(v, KEY_STAGES * CONSUMERS, BLOCK_N, DIM_V),
        q=allocate_tiles(q, STAGES, BLOCK_M, DIM),
        d_out=allocate_tiles(d_out, STAGES, BLOCK_M, DIM_V),
        terms=allocate_terms(terms, STAGES, BLOCK_M),
        bias=None if bias is None else allocate_tiles(bias, STAGES * CONSUMERS, BLOCK_M, BLOCK_N),
        mask=None if mask is None else allocate_tiles(mask, STAGES * CONSUMERS, BLOCK_M, BLOCK_N),
        bias_columns=None,
        d_bias=allocate_tiles(d_bias, 1, BLOCK_M, BLOCK_N) if d_bias is not None and HIDES else None,
        ds=gl.allocate_shared_memory(q.dtype, [D_SCORES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], D_SCORES_LAYOUT),
    )
    rooms = gl.allocate_shared_memory(gl.float32, [ROOMS, whole_of(DIM) // 8, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    COLUMNS: gl.constexpr = are_columns(terms.dtype) and REGISTERS < REGISTERS_WITH_ONES  # else there are registers for their ones
    ones = Ones(
        keys=None,
        scores=ones_for_columns(BLOCK_N) if COLUMNS else None,
        d_p=ones_for_columns(BLOCK_N, FIRST=3) if COLUMNS else None,
    )
    barriers = Barriers(
        kv_full=allocate_barriers(KEY_STAGES, 1),
        q_full=allocate_barriers(STAGES, 1),
        d_out_full=allocate_barriers(STAGES, 1),
        free=allocate_barriers(STAGES, CONSUMERS),
        kv_free=allocate_barriers(KEY_STAGES, CONSUMERS + 1),
        ds_full=allocate_barriers(D_SCORES, CONSUMERS),
        ds_free=allocate_barriers(D_SCORES, 1),
    )
    fence_async_shared()
    sources = Sources(q, terms, d_out, bias=bias, mask=mask)
    gl.warp_specialize(
        [  # up to Triton 3.6, d_k and d_v would be stored by two bytes if they arrived inside a tuple
            (_consume, (tiles, ones, barriers, rules, d_k, d_v, extents, which, config))
            if which < CONSUMERS
            else (_collect, (tiles, rooms, barriers, rules, d_q, d_bias, extents, config))
            if which == CONSUMERS
            else (_produce, (k, v, sources, tiles, barriers, rules, extents, config))
            for which in (0, 1, 2, 3, 4)[: CONSUMERS + 2]
        ],
        [4] * CONSUMERS + [1],
        [REGISTERS] * (CONSUMERS - 1) + [collector_registers(CONSUMERS), PRODUCER_REGISTERS],
    )


@gluon.jit
def _sequence_of(number, extents):
    """A (batch, head) by its number."""
    return Sequence(number // extents.heads, number % extents.heads, extents.len_q, extents.len_k)


@gluon.jit
def _produce(k, v, sources, tiles, barriers, rules, extents, config: gl.constexpr):
    """Copy blocks of keys and values, and for each the tiles of queries that it visits, as far ahead as there are free stages."""
    KEYS: gl.constexpr = config.BLOCKS * BLOCK_N
    step, turn = 0, 0
    for number in range(gl.program_id(0), extents.sequences, gl.num_programs(0)):
        seq = _sequence_of(number, extents)
        for col in range(0, seq.len_k, KEYS):
            stage, phase = stage_of(turn, config.KEY_STAGES)
            mbarrier.wait(barriers.kv_free.index(stage), phase ^ 1)
            copy_keys(k, v, Work(seq, 1, None, col), seq.head, barriers.kv_full.index(stage), tiles, config, config.BLOCKS, stage)
            step = copy_queries(sources, tiles, barriers, rules, seq, col, step, config)
            turn += 1


@gluon.jit
def _consume(tiles, ones, barriers, rules, d_k, d_v, extents, which: gl.constexpr, config: gl.constexpr):
    """dK and dV of BLOCK_N keys of each block, those in place `which`; dS of each tile goes to the collector."""
    KEYS: gl.constexpr = config.BLOCKS * BLOCK_N
    results = Results(d_k, d_v, None, None)
    if ones.scores is None and are_columns(tiles.terms.dtype):
        FACTOR: gl.constexpr = gl.DotOperandLayout(0, product_layout(config.BLOCK_M), 2)
        ones = Ones(None, ones_in_registers(BLOCK_N, 0, FACTOR), ones_in_registers(BLOCK_N, 3, FACTOR))
    step, turn = 0, 0
    for number in range(gl.program_id(0), extents.sequences, gl.num_programs(0)):
        seq = _sequence_of(number, extents)
        keys = Keys(0.0)
        for first in range(0, seq.len_k, KEYS):
            stage, phase = stage_of(turn, config.KEY_STAGES)
            owner, col = Span(first, 0, None), first + which * BLOCK_N
            own = stage * config.BLOCKS + which
            mbarrier.wait(barriers.kv_full.index(stage), phase)
            k_pieces, v_pieces = pieces(tiles.k, own, config.DIM), pieces(tiles.v, own, config.DIM_V)
            if config.KEYS_IN_REGISTERS:
                k_pieces, v_pieces = _in_registers(k_pieces), _in_registers(v_pieces)
            context = Context(k_pieces, v_pieces, None, ones, tiles, barriers, rules, results, col, which)
            sums = no_sums(config.DIM, config.DIM_V, config.BLOCK_M)
            begin, end, full_end = query_range(rules, seq, owner, config.BLOCK_M, KEYS)
            sums, step = add_queries(context, seq, keys, sums, step, owner, begin, end, full_end, config)
            mbarrier.arrive(barriers.kv_free.index(stage), count=1)
            store_gradients(results, None, sums, rules, Work(seq, 1, None, first), col, config)
            turn += 1


@gluon.jit
def _in_registers(tiles):
    """Pieces of keys or values as left factors, which products would read from shared memory at each tile of queries."""
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, product_layout(BLOCK_M), 2)
    loaded = ()
    for i in gl.static_range(len(tiles)):
        loaded += (tiles[i].load(FACTOR),)
    return loaded


@gluon.jit
def _collect(tiles, rooms, barriers, rules, d_q, d_bias, extents, config: gl.constexpr):
    """dQ: the sums of dS K over all keys, which stay in `rooms` in the order of the registers of threads, each a tile of queries.

    Where dBias is wanted, dS is stored as it, too, and zeros where a block of keys does not visit a tile of queries.
    """
    KEYS: gl.constexpr = config.BLOCKS * BLOCK_N
    ROWS: gl.constexpr = product_layout(whole_of(config.DIM))
    THREADS: gl.constexpr = order_of(rooms.shape[1])
    step, turn = 0, 0
    if tiles.d_bias is not None:
        zeros = tiles.d_bias.index(0)
        zeros.reshape([config.BLOCK_M, BLOCK_N]).store(gl.full([config.BLOCK_M, BLOCK_N], 0.0, tiles.d_bias.dtype, product_layout(BLOCK_N)))
        fence_async_shared()
    for number in range(gl.program_id(0), extents.sequences, gl.num_programs(0)):
        seq = _sequence_of(number, extents)
        none = by_threads(no_sums_of_rows(config.DIM)[0])
        for start in range(0, seq.len_q, config.BLOCK_M):
            rooms.index(start // config.BLOCK_M).store(none)
        for col in range(0, seq.len_k, KEYS):
            key_stage, key_phase = stage_of(turn, config.KEY_STAGES)
            mbarrier.wait(barriers.kv_full.index(key_stage), key_phase)
            owner = Span(col, 0, None)
            begin, end, full_end = query_range(rules, seq, owner, config.BLOCK_M, KEYS)
            visited = 0
            for position in range(begin, full_end, config.BLOCK_M):
                start = walk_step(rules, seq, owner, seq.len_q, position, end, full_end, KEYS, config.BLOCK_M)
                visited |= 1 << start // config.BLOCK_M
                stage, phase = stage_of(step, config.D_SCORES)
                room = rooms.index(start // config.BLOCK_M)
                dq = by_rows(room.load(THREADS), ROWS)
                mbarrier.wait(barriers.ds_full.index(stage), phase)
                for i in gl.static_range(config.BLOCKS):
                    ds = tiles.ds.index(stage * config.BLOCKS + i)
                    if d_bias is not None:
                        store(d_bias, [seq.batch, seq.head, start, col + i * BLOCK_N], ds)
                    k_tile = column_pieces(tiles.k, key_stage * config.BLOCKS + i, config.DIM)[0]
                    dq = warpgroup_mma(ds.reshape([config.BLOCK_M, BLOCK_N]), k_tile, dq, is_async=True)
                dq = warpgroup_mma_wait(0, [dq])
                if d_bias is not None:
                    tma.store_wait(0)  # the copy engine has read dS
                mbarrier.arrive(barriers.ds_free.index(stage), count=1)
                room.store(by_threads(dq))
                step += 1
            mbarrier.arrive(barriers.kv_free.index(key_stage), count=1)
            turn += 1
            if tiles.d_bias is not None:
                for start in range(0, seq.len_q, config.BLOCK_M):
                    if (visited >> start // config.BLOCK_M) & 1 == 0:
                        for i in gl.static_range(config.BLOCKS):
                            store(d_bias, [seq.batch, seq.head, start, col + i * BLOCK_N], zeros)
        for start in range(0, seq.len_q, config.BLOCK_M):
            dq = by_rows(rooms.index(start // config.BLOCK_M).load(THREADS), ROWS)
            store_tile(d_q, seq, start, seq.len_q, dq * rules.scale, config.HEAD_DIM)
    if tiles.d_bias is not None:
        tma.store_wait(0)
