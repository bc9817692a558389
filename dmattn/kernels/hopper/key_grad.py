"""dK and dV on Hopper (sm_90) for head dims to 256, with the dBias that is made beside them: as portable/key_grad.py, in Gluon.

The parts of a program run side by side: one to three consumers of 64 keys each, and a producer that copies tiles of queries, dO and bias to
shared memory ahead of them. While one consumer makes probabilities, the others multiply, or that of another program on the processor. Within
one consumer no product outlives a tile, because ptxas would serialise all products here.

Of head dims over 128 a program has registers for 64 keys: one consumer makes scores and dV, the other dP, dS and dK. Probabilities pass from
one to the other by shared memory, so that each product is made once.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...problem import Problem
from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Span, sequence, strided, under_head
from ..base.leading import vectors_of
from ..base.overlap import follow
from ..base.packed_blocks import count_blocks, packed_blocks
from ..base.place import place_keys, wave_of
from ..base.query_terms import Incoming
from ..base.rules import rules_of
from ..portable.group_parts import GroupParts, heads_of_part, numbers_of, part_of_group, under_part
from ..visits.walk import query_lists, query_range
from .addressing import copyable
from .backward_sizes import key_sizes
from .bias_columns import allocate_columns, ones_for_columns, ones_in_registers, store_bias_columns
from .copies import (
    PRODUCER_REGISTERS,
    allocate_barriers,
    allocate_pairs,
    allocate_tiles,
    backward_dims,
    consumer_registers,
    is_descriptor,
    launch_registers,
    pieces,
    product_layout,
    tiled,
    tiled_mask,
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
    Keys,
    Ones,
    Results,
    Sources,
    Sums,
    Tiles,
    Work,
    copy_keys,
    no_lane_sums,
    no_sums,
    store_d_bias,
    uniform_bias_of,
)
from .key_walk import Config, add_queries, copy_queries
from .registers import store_vector, sums_of_lanes
from .term_tiles import allocate_terms, are_columns, tiled_terms

REGISTERS_WITH_ONES = gl.constexpr(200)  # of a consumer that has room for the ones that term columns meet


def key_gradients(
    problem: Problem,
    incoming: Incoming,
    table: Any,
    d_key: Tensor | None,
    d_value: Tensor | None,
    key_sums: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """As in portable/key_grad.py, without intervals; `table` is the `spread_table` of the problem.

    A bias of pairs that the copy engine cannot address is loaded by the consumers, and such a dBias stored by them.
    """
    heads, len_q, head_dim = problem.query.shape[1:]
    kv_heads, len_k, value_dim = problem.value.shape[1:]
    block_n, (dim, dim_v) = BLOCK_N.value, backward_dims(problem)
    consumers, block_m, stages, programs_each = key_sizes(problem, d_bias)
    blocks = blocks_of(consumers, dim, dim_v)
    packed = packed_blocks(problem, blocks * block_n, by_key=True)
    lists = query_lists(problem, block_m, blocks * block_n, packed)
    bias = copyable("bias", problem.pair_bias)
    if d_bias is not None and (lists is not None or problem.ends_q is not None):
        d_bias.zero_()  # what no list names, and what lies beyond the lengths of packed sequences
    programs, places = fill_of(problem, d_bias)
    parts = GroupParts(problem, programs, places, (d_key, d_value, key_sums))
    launch(
        _key_gradients_kernel,
        count_blocks(problem, packed, blocks * block_n, by_key=True) * kv_heads * parts.count,
        q=tiled(problem.query, block_m, whole_of(dim)),
        k=tiled(problem.key, block_n, whole_of(dim)),
        v=tiled(problem.value, block_n, whole_of(dim_v)),
        bias=tiled(bias, block_m, block_n),
        mask=tiled_mask(copyable("mask", problem.pair_mask), block_m, block_n),
        d_out=tiled(incoming.d_out, block_m, whole_of(dim_v)),
        d_bias=tiled(d_bias, block_m, block_n) if copyable("d_bias", d_bias) is not None else strided(d_bias, heads),
        rules=with_spread_table(rules_of(problem, lists, packed_blocks=packed), table, heads),
        terms=tiled_terms(incoming, block_m),
        d_k=strided(parts.d_key, heads),
        d_v=strided(parts.d_value, heads),
        key_sums=strided(vectors_of(parts.key_sums), heads),
        extents=Extents(heads, heads // kv_heads, len_q, len_k, parts.dealt, wave_of(problem, programs * parts.count, places, parts.count)),
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        DIM=dim,
        DIM_V=dim_v,
        CONSUMERS=consumers,
        BLOCK_M=block_m,
        STAGES=stages,
        EVEN_N=problem.ends_q is None and len_k % (blocks * block_n) == 0,
        BY_GROUP=parts.by_group,
        REGISTERS=consumer_registers(consumers, programs_each),
        num_warps=4,
        maxnreg=launch_registers(consumers, programs_each),
    )
    parts.add()


def fill_of(problem: Problem, d_bias: Tensor | None) -> tuple[int, int]:
    """(programs that would have whole groups of heads, how many run at once)."""
    batch, kv_heads, len_k = problem.key.shape[:3]
    sizes = key_sizes(problem, d_bias)
    programs = triton.cdiv(len_k, blocks_of(sizes.consumers, *backward_dims(problem)) * BLOCK_N.value) * kv_heads * batch
    return programs, sizes.programs * processors(problem.query.device)


@gluon.constexpr_function
def blocks_of(consumers, dim, dim_v):
    """Blocks of BLOCK_N keys of a program: one for each consumer, or for both of wide heads."""
    return consumers if max(dim, dim_v) <= 128 else 1


@gluon.jit
def _key_gradients_kernel(
    q, k, v, bias, mask, d_out, d_bias, rules, terms, d_k, d_v, key_sums, extents,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, EVEN_N: gl.constexpr, BY_GROUP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: `blocks_of` BLOCK_N keys of one (batch, key-value head), from a grid of one axis. Walks the group's heads and their queries,
    or those that are dealt to it.

    q, k, v, d_out, bias and mask (of pairs), terms (`tiled_terms`) and d_bias are tensor descriptors, but d_bias is Strided where the copy
    engine cannot address it; any other bias or mask is read from rules. `extents` are :class:`key_tile.Extents`.
    """
    follow()
    BLOCKS: gl.constexpr = blocks_of(CONSUMERS, DIM, DIM_V)
    config: gl.constexpr = Config(HEAD_DIM, VALUE_DIM, DIM, DIM_V, CONSUMERS, BLOCK_M, BLOCKS, STAGES, EVEN_N, BY_GROUP)
    numbers = numbers_of(extents.heads, extents.group, extents.dealt)
    walked = gl.cdiv(extents.len_q, 64) * heads_of_part(extents.group, extents.dealt) * (HEAD_DIM + VALUE_DIM)
    block, number, batch = place_keys(rules, extents.len_k, numbers, BLOCKS * BLOCK_N, extents.wave, walked)
    kv_head, head, heads = part_of_group(number, extents.group, extents.dealt)
    seq = sequence(rules.ends, batch, head, extents.len_q, extents.len_k)
    work = Work(seq, heads, extents.dealt, block * (BLOCKS * BLOCK_N))
    tiles = Tiles(  # made in place, as the next: up to Triton 3.6 a helper cannot return a None
        k=allocate_tiles(k, BLOCKS, BLOCK_N, DIM),
        v=allocate_tiles(v, BLOCKS, BLOCK_N, DIM_V),
        q=allocate_tiles(q, STAGES, BLOCK_M, DIM),
        d_out=allocate_tiles(d_out, STAGES, BLOCK_M, DIM_V),
        terms=allocate_terms(terms, STAGES, BLOCK_M),
        bias=None if bias is None else allocate_tiles(bias, STAGES * BLOCKS, BLOCK_M, BLOCK_N),
        mask=None if mask is None else allocate_tiles(mask, STAGES * BLOCKS, BLOCK_M, BLOCK_N),
        d_bias=None if d_bias is None else _allocate_d_bias(d_bias, BLOCKS, BLOCK_M),
        p=None if BLOCKS == CONSUMERS else gl.allocate_shared_memory(q.dtype, [BLOCK_N, BLOCK_M], PROBABILITIES),
        bias_columns=None if rules.bias_by_key is None else allocate_columns(BLOCK_N, 3),
    )
    p_barriers = None if BLOCKS == CONSUMERS else allocate_barriers(2, 1)
    COLUMNS: gl.constexpr = are_columns(terms.dtype) and REGISTERS < REGISTERS_WITH_ONES  # else there are registers for their ones
    ones = Ones(
        keys=None if rules.bias_by_key is None else ones_for_columns(BLOCK_M),
        scores=ones_for_columns(BLOCK_N) if COLUMNS else None,
        d_p=ones_for_columns(BLOCK_N, FIRST=3) if COLUMNS else None,
    )
    barriers = Barriers(
        kv_full=allocate_barriers(1, 1),
        q_full=allocate_barriers(STAGES, 1),
        d_out_full=allocate_barriers(STAGES, 1),
        free=allocate_barriers(STAGES, CONSUMERS),
        p=p_barriers,
    )
    fence_async_shared()
    copy_keys(k, v, work, kv_head, barriers.kv_full.index(0), tiles, config, BLOCKS)
    sources = Sources(q, terms, d_out, bias=bias, mask=mask)
    gl.warp_specialize(
        [  # up to Triton 3.6, d_k and d_v would be stored by two bytes if they arrived inside a tuple
            (_consume, (tiles, ones, barriers, rules, d_k, d_v, key_sums, d_bias, work, which, config))
            if which < CONSUMERS
            else (_produce, (sources, tiles, barriers, rules, work, config))
            for which in (0, 1, 2, 3)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [REGISTERS] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )


@gluon.jit
def _allocate_d_bias(d_bias, BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Tiles by way of which dBias is stored, one for each block of keys."""
    if is_descriptor(d_bias.type):
        return allocate_tiles(d_bias, BLOCKS, BLOCK_M, BLOCK_N)
    else:
        return allocate_pairs(d_bias, BLOCKS, BLOCK_M, BLOCK_N)


@gluon.jit
def _produce(sources, tiles, barriers, rules, work, config: gl.constexpr):
    """Copy tiles of queries, bias, mask and dO to shared memory, as far ahead as there are free stages."""
    step = 0
    for head in range(work.seq.head, work.seq.head + work.heads):
        step = copy_queries(sources, tiles, barriers, rules, under_head(work.seq, head), work.col, step, config)


@gluon.jit
def _consume(tiles, ones, barriers, rules, d_k, d_v, key_sums, d_bias, work, which: gl.constexpr, config: gl.constexpr):
    """The gradients of BLOCK_N of the program's keys, in place `which`; of one block for two the first makes dV, the second all else."""
    BLOCK_M: gl.constexpr = config.BLOCK_M
    BLOCKS: gl.constexpr = config.BLOCKS
    OF_SCORES: gl.constexpr = BLOCKS == config.CONSUMERS or which == 0
    OF_D_SCORES: gl.constexpr = BLOCKS == config.CONSUMERS or which == 1
    own: gl.constexpr = which if BLOCKS == config.CONSUMERS else 0
    if not OF_SCORES:
        d_v = None
    if not OF_D_SCORES:
        d_k, key_sums, d_bias = None, None, None
    results = Results(d_k, d_v, key_sums, d_bias)
    owner, col = Span(work.col, 0, None), work.col + own * BLOCK_N
    k_pieces, v_pieces = pieces(tiles.k, own, config.DIM), pieces(tiles.v, own, config.DIM_V)
    if ones.scores is None and are_columns(tiles.terms.dtype):
        FACTOR: gl.constexpr = gl.DotOperandLayout(0, product_layout(config.BLOCK_M), 2)
        ones = Ones(ones.keys, ones_in_registers(BLOCK_N, 0, FACTOR), ones_in_registers(BLOCK_N, 3, FACTOR))
    bias_columns = None if tiles.bias_columns is None else tiles.bias_columns[own]
    context = Context(k_pieces, v_pieces, bias_columns, ones, tiles, barriers, rules, results, col, own)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    sums = no_sums(config.DIM, config.DIM_V, config.BLOCK_M, OF_KEYS=OF_D_SCORES, OF_VALUES=OF_SCORES)
    step = 0
    for head in range(work.seq.head, work.seq.head + work.heads):
        this = under_head(work.seq, head)
        if not config.BY_GROUP:
            sums = Sums(sums.dk, sums.dv, no_lane_sums(BLOCK_M))
        keys = Keys(uniform_bias_of(rules, this))
        if OF_SCORES and rules.bias_by_key is not None:
            store_bias_columns(context.bias_columns, rules, this, col)
        begin, end, full_end = query_range(rules, this, owner, BLOCK_M, BLOCKS * BLOCK_N)
        sums, step = add_queries(context, this, keys, sums, step, owner, begin, end, full_end, config)
        if results.d_bias is not None and rules.lists is None and rules.ends is None:
            zeros = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, product_layout(BLOCK_M))
            for start in range(0, begin, BLOCK_M):
                store_d_bias(context, this, start, zeros)
            for start in range(begin + gl.cdiv(end - begin, BLOCK_M) * BLOCK_M, work.seq.len_q, BLOCK_M):
                store_d_bias(context, this, start, zeros)
        if results.key_sums is not None and not config.BY_GROUP:
            store_vector(results.key_sums, this, col, work.seq.len_k, sums_of_lanes(sums.lanes, product_layout(BLOCK_M)))
    if results.key_sums is not None and config.BY_GROUP:
        place = under_part(results.key_sums, work.seq, work.dealt)
        store_vector(results.key_sums, place, col, work.seq.len_k, sums_of_lanes(sums.lanes, product_layout(BLOCK_M)))
    store_gradients(results, None, sums, rules, work, col, config)
