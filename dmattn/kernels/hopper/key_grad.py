"""dK and dV on Hopper (sm_90) for head dims from 33 to 128, with the dBias that is made beside them: as portable/key_grad.py, in Gluon.

The parts of a program run side by side: two or three consumers of 64 keys each, and a producer that copies tiles of queries, dO and bias to
shared memory ahead of them. While one consumer makes probabilities, the others multiply. Within one consumer no product outlives a tile,
because ptxas would serialise all products here.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from ...problem import Problem
from ..base.key_sums import by_group, vectors_of
from ..base.launch import launch
from ..base.layout import Sequence, Span, slice_pointer, strided
from ..base.overlap import follow
from ..base.place import place_keys
from ..base.query_terms import Incoming
from ..base.rules import rules_of
from ..base.window import open_queries
from ..visits.walk import query_lists, query_range, query_step
from .bias_columns import allocate_columns, ones_for_columns, ones_in_registers, store_bias_columns
from .copies import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    allocate_barriers,
    consumers_of,
    copy,
    padded_dim,
    stage_of,
    tiled,
    tiled_mask,
)
from .distances import with_spread_table
from .key_tile import (
    BLOCK_M,
    BLOCK_N,
    PAIRS,
    Barriers,
    Context,
    Keys,
    Ones,
    Results,
    Sources,
    Sums,
    Tiles,
    add_tile,
    allocate_terms,
    are_columns,
    copy_pairs,
    copy_terms,
    no_lane_sums,
    no_sums,
    store_d_bias,
    tiled_terms,
    turn_of,
    uniform_bias_of,
)
from .registers import store_tile, sums_of_lanes

STAGES = gl.constexpr(2)  # tiles of queries, dO and bias in shared memory


class Config(NamedTuple):
    """Options of a launch, the kernel's constexprs."""

    HEAD_DIM: Any
    VALUE_DIM: Any
    DIM: Any  # both padded
    CONSUMERS: Any
    EVEN_N: Any  # no program has keys past the end
    BY_GROUP: Any  # sums over queries are summed over the heads of a group too


def key_gradients(
    problem: Problem,
    incoming: Incoming,
    d_key: Tensor | None,
    d_value: Tensor | None,
    key_sums: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """As in portable/key_grad.py, without intervals."""
    batch, heads, len_q, head_dim = problem.query.shape
    kv_heads, len_k, value_dim = problem.value.shape[1:]
    block_m, block_n, dim = BLOCK_M.value, BLOCK_N.value, padded_dim(problem)
    open_walk = not problem.is_masked and problem.left is None and problem.right is None
    consumers = consumers_of(len_k, dim) if problem.bias is None and open_walk else 2
    lists = query_lists(problem, block_m, consumers * block_n)
    if d_bias is not None and lists is not None:
        d_bias.zero_()  # what no list names
    launch(
        _key_gradients_kernel,
        triton.cdiv(len_k, consumers * block_n) * kv_heads * batch,
        q=tiled(problem.query, block_m, dim),
        k=tiled(problem.key, block_n, dim),
        v=tiled(problem.value, block_n, dim),
        bias=tiled(problem.pair_bias, block_m, block_n),
        mask=None if problem.pair_mask is None else tiled_mask(problem.pair_mask, block_m, block_n),
        d_out=tiled(incoming.d_out, block_m, dim),
        d_bias=tiled(d_bias, block_m, block_n),
        rules=with_spread_table(problem, rules_of(problem, lists)),
        terms=tiled_terms(incoming),
        d_k=strided(d_key, heads),
        d_v=strided(d_value, heads),
        key_sums=strided(vectors_of(key_sums), heads),
        heads=heads,
        groups=heads // kv_heads,
        len_q=len_q,
        len_k=len_k,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        DIM=dim,
        CONSUMERS=consumers,
        EVEN_N=len_k % (consumers * block_n) == 0,
        BY_GROUP=by_group(problem, key_sums),
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[consumers],
    )


@gluon.jit
def _key_gradients_kernel(
    q, k, v, bias, mask, d_out, d_bias, rules, terms, d_k, d_v, key_sums, heads, groups, len_q, len_k,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, DIM: gl.constexpr, CONSUMERS: gl.constexpr, EVEN_N: gl.constexpr,
    BY_GROUP: gl.constexpr,
):  # fmt: skip
    """One program: CONSUMERS times BLOCK_N keys of one (batch, key-value head), from a grid of one axis. Walks the group's heads and queries.

    q, k, v, d_out, bias and mask (of pairs), d_bias and terms (`tiled_terms`) are tensor descriptors; any other bias or mask is read
    from rules.
    """
    follow()
    block, kv_head, batch = place_keys(rules, len_k, heads // groups, CONSUMERS * BLOCK_N)
    seq = Sequence(batch, kv_head * groups, len_q, len_k)
    col = block * (CONSUMERS * BLOCK_N)
    config: gl.constexpr = Config(HEAD_DIM, VALUE_DIM, DIM, CONSUMERS, EVEN_N, BY_GROUP)
    k_tiles = gl.allocate_shared_memory(k.dtype, [CONSUMERS, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [CONSUMERS, 1, 1, BLOCK_N, DIM], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [STAGES, 1, 1, BLOCK_M, DIM], d_out.layout)
    terms_tiles = allocate_terms(terms, STAGES)
    bias_tiles, mask_tiles, d_bias_tiles = None, None, None
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    if mask is not None:
        mask_tiles = gl.allocate_shared_memory(mask.dtype, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], mask.layout)
    if d_bias is not None:
        d_bias_tiles = gl.allocate_shared_memory(d_bias.dtype, [CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], d_bias.layout)
    bias_columns, key_ones = (None, None, None), None
    if rules.bias_by_key is not None:
        bias_columns = (allocate_columns(BLOCK_N), allocate_columns(BLOCK_N), allocate_columns(BLOCK_N))
        key_ones = ones_for_columns(BLOCK_M)
    score_ones, d_p_ones = None, None
    if CONSUMERS == 3 and are_columns(terms.dtype):  # two have registers for these ones
        score_ones = ones_for_columns(BLOCK_N)
        d_p_ones = ones_for_columns(BLOCK_N, FIRST=3)
    barriers = Barriers(
        kv_full=allocate_barriers(1, 1),
        q_full=allocate_barriers(STAGES, 1),
        d_out_full=allocate_barriers(STAGES, 1),
        free=allocate_barriers(STAGES, CONSUMERS),
    )
    fence_async_shared()
    kv_full = barriers.kv_full.index(0)
    mbarrier.expect(kv_full, CONSUMERS * k.block_type.nbytes + CONSUMERS * v.block_type.nbytes)
    for i in gl.static_range(CONSUMERS):
        copy(k, [batch, kv_head, col + i * BLOCK_N, 0], kv_full, k_tiles.index(i))
        copy(v, [batch, kv_head, col + i * BLOCK_N, 0], kv_full, v_tiles.index(i))
    sources = Sources(q, terms, d_out, bias=bias, mask=mask)
    tiles = Tiles(k_tiles, v_tiles, bias_columns, q_tiles, terms_tiles, d_out_tiles, bias=bias_tiles, mask=mask_tiles, d_bias=d_bias_tiles)
    ones = Ones(key_ones, score_ones, d_p_ones)
    REGISTERS: gl.constexpr = CONSUMER_REGISTERS if CONSUMERS == 2 else CONSUMER_REGISTERS_OF_THREE
    gl.warp_specialize(
        [  # up to Triton 3.6, d_k and d_v would be stored by two bytes if they arrived inside a tuple
            (_consume, (tiles, ones, barriers, rules, d_k, d_v, key_sums, d_bias, seq, groups, col, which, config))
            if which < CONSUMERS
            else (_produce, (sources, tiles, barriers, rules, seq, groups, col, config))
            for which in (0, 1, 2, 3)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [REGISTERS] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(sources, tiles, barriers, rules, seq, groups, col, config: gl.constexpr):
    """Copy tiles of queries, bias, mask and dO to shared memory, as far ahead as there are free stages."""
    CONSUMERS: gl.constexpr = config.CONSUMERS
    BIAS_BYTES: gl.constexpr = 0 if sources.bias is None else CONSUMERS * sources.bias.block_type.nbytes
    Q_BYTES: gl.constexpr = sources.q.block_type.nbytes + sources.terms.block_type.nbytes + BIAS_BYTES
    D_OUT_BYTES: gl.constexpr = sources.d_out.block_type.nbytes
    step = 0
    for head in range(seq.head, seq.head + groups):
        this = Sequence(seq.batch, head, seq.len_q, seq.len_k)
        begin, end, full_end = query_range(rules, this, Span(col, 0, None), BLOCK_M, CONSUMERS * BLOCK_N)
        for position in range(begin, full_end, BLOCK_M):
            start = query_step(rules, this, Span(col, 0, None), position, end, full_end, BLOCK_M, CONSUMERS * BLOCK_N)
            stage, phase = stage_of(step, STAGES)
            mbarrier.wait(barriers.free.index(stage), phase ^ 1)
            q_full = barriers.q_full.index(stage)
            mbarrier.expect(q_full, Q_BYTES)
            copy(sources.q, [seq.batch, head, start, 0], q_full, tiles.q.index(stage))
            copy_terms(sources.terms, seq.batch, head, start, q_full, tiles.terms.index(stage))
            if sources.bias is not None:
                copy_pairs(sources.bias, rules.bias, this, start, col, q_full, tiles.bias, stage, CONSUMERS)
            if sources.mask is None:
                mbarrier.expect(barriers.d_out_full.index(stage), D_OUT_BYTES)
            elif position < end:
                mbarrier.expect(barriers.d_out_full.index(stage), D_OUT_BYTES + CONSUMERS * sources.mask.block_type.nbytes)
                copy_pairs(sources.mask, rules.mask, this, start, col, barriers.d_out_full.index(stage), tiles.mask, stage, CONSUMERS)
            else:
                mbarrier.expect(barriers.d_out_full.index(stage), D_OUT_BYTES)
            copy(sources.d_out, [seq.batch, head, start, 0], barriers.d_out_full.index(stage), tiles.d_out.index(stage))
            step += 1


@gluon.jit
def _consume(
    tiles, ones, barriers, rules, d_k, d_v, key_sums, d_bias, seq, groups, col, which: gl.constexpr, config: gl.constexpr
):  # fmt: skip
    """The gradients of BLOCK_N of the program's keys, in place `which`."""
    CONSUMERS: gl.constexpr = config.CONSUMERS
    results = Results(d_k, d_v, key_sums, d_bias)
    owner = Span(col, 0, None)
    col += which * BLOCK_N
    k_tile = tiles.k.index(which).reshape([BLOCK_N, config.DIM])
    v_tile = tiles.v.index(which).reshape([BLOCK_N, config.DIM])
    if CONSUMERS == 2 and are_columns(tiles.terms.dtype):
        FACTOR: gl.constexpr = gl.DotOperandLayout(0, PAIRS, 2)
        ones = Ones(ones.keys, ones_in_registers(BLOCK_N, 0, FACTOR), ones_in_registers(BLOCK_N, 3, FACTOR))
    context = Context(k_tile, v_tile, tiles.bias_columns[which], ones, tiles, barriers, rules, results, col, which)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    sums = no_sums(config.DIM)
    step = 0
    for head in range(seq.head, seq.head + groups):
        this = Sequence(seq.batch, head, seq.len_q, seq.len_k)
        if not config.BY_GROUP:
            sums = Sums(sums.dk, sums.dv, no_lane_sums())
        keys = Keys(uniform_bias_of(rules, this))
        if rules.bias_by_key is not None:
            store_bias_columns(context.bias_columns, rules, this, col)
        begin, end, full_end = query_range(rules, this, owner, BLOCK_M, CONSUMERS * BLOCK_N)
        if rules.lists is None:
            open_begin, open_end = open_queries(rules.left, rules.right, this, col, begin, end, BLOCK_M, BLOCK_N)
            if rules.right is not None or not config.EVEN_N:
                for start in range(begin, open_begin, BLOCK_M):
                    sums = add_tile(context, this, keys, sums, turn_of(step, STAGES, which, CONSUMERS), start, EDGE=True)
                    step += 1
            for start in range(open_begin, open_end, BLOCK_M):
                sums = add_tile(context, this, keys, sums, turn_of(step, STAGES, which, CONSUMERS), start, EDGE=False)
                step += 1
            if rules.left is not None:
                for start in range(open_end, end, BLOCK_M):
                    sums = add_tile(context, this, keys, sums, turn_of(step, STAGES, which, CONSUMERS), start, EDGE=True)
                    step += 1
        else:
            for position in range(begin, end, BLOCK_M):
                start = query_step(rules, this, owner, position, end, full_end, BLOCK_M, CONSUMERS * BLOCK_N)
                sums = add_tile(context, this, keys, sums, turn_of(step, STAGES, which, CONSUMERS), start, EDGE=True)
                step += 1
            for position in range(end, full_end, BLOCK_M):
                start = query_step(rules, this, owner, position, end, full_end, BLOCK_M, CONSUMERS * BLOCK_N)
                sums = add_tile(context, this, keys, sums, turn_of(step, STAGES, which, CONSUMERS), start, EDGE=False)
                step += 1
        if d_bias is not None and rules.lists is None:
            zeros = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS)
            for start in range(0, begin, BLOCK_M):
                store_d_bias(context, this, start, zeros)
            for start in range(begin + gl.cdiv(end - begin, BLOCK_M) * BLOCK_M, seq.len_q, BLOCK_M):
                store_d_bias(context, this, start, zeros)
        if key_sums is not None and not config.BY_GROUP:
            _store_sums(key_sums, this, col, sums_of_lanes(sums.lanes, PAIRS))
    if key_sums is not None and config.BY_GROUP:
        _store_sums(key_sums, seq, col, sums_of_lanes(sums.lanes, PAIRS))
    if d_bias is not None:
        tma.store_wait(0)
    if d_k is not None:
        store_tile(d_k, seq, col, seq.len_k, sums.dk * rules.scale, config.HEAD_DIM)
    if d_v is not None:
        store_tile(d_v, seq, col, seq.len_k, sums.dv, config.VALUE_DIM)


@gluon.jit
def _store_sums(key_sums, seq, col, sums):
    """The sums over the queries for a block of keys."""
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))
    gl.store(slice_pointer(key_sums, seq) + cols.to(gl.int64) * key_sums.row, sums.to(key_sums.ptr.dtype.element_ty), mask=cols < seq.len_k)
