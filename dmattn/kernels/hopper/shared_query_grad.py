"""dQ together with the dBias of a bias that few (batch, head) share, on Hopper (sm_90), in Gluon.

dBias is a sum over the members that share it. A program here takes some queries of all members. Tile by tile of keys it makes dS of each member
once: a factor of dQ, and a term of the tile of dBias. hopper/query_grad.py and hopper/bias_grad.py make dS twice.

A program has three parts that run side by side: two consumers of 64 queries each, and a producer. The producer copies the members' queries, dO
and terms, which stay, and then tiles of bias and of the members' keys and values, ahead of the consumers.

Consumers share the work by queries as long as one has registers for dQ of all members. Else they share it by members: both have the same
queries, and each has dQ of every other member. The first then gives its part of each tile of dBias to the second, which stores the sum.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ...problem import Problem
from ..base.launch import launch
from ..base.layout import Sequence, Span, strided
from ..base.leading import spread_of
from ..base.overlap import follow
from ..base.place import member_of, place_work
from ..base.query_terms import Incoming
from ..base.rules import rules_of
from ..base.window import open_keys
from ..visits.walk import key_range
from .copies import (
    PRODUCER_REGISTERS,
    allocate_barriers,
    consumer_registers,
    launch_registers,
    padded_dim,
    product_layout,
    stage_of,
    store,
    tiled,
    tiled_vectors,
)
from .registers import Hiding, as_factor, exponent_factor, rounded_pairs, ruled, store_tile
from .shared_members import (
    BLOCK_M,
    Barriers,
    Config,
    Context,
    Given,
    Sharing,
    Sources,
    Tiles,
    member_full,
    member_stage,
    own_count,
    own_member,
    produce,
    store_total,
)

# Programs for each processor and round of programs, by blocks of queries of a program. With fewer the two other kernels are faster, which have
# some for each member; a round that is not full takes as long as a full one.
LEAST_FILL = {1: 0.7, 2: 0.5}
MOST_SUMS = 256  # columns of dQ, of all its members, that a consumer has registers for


class State(NamedTuple):
    """Registers of a consumer between tiles."""

    dqs: Any  # dQ of each of its members so far, [BLOCK_M, DIM] float32
    s: Any  # [BLOCK_M, BLOCK_N] float32, as the next of the first of its members in the tile that comes: Q K^T
    d_p: Any  # [BLOCK_M, BLOCK_N], dP


class Keys(NamedTuple):
    """A tile of keys that a consumer is at, and its bias."""

    turn: Any  # tiles before it
    next_turn: Any  # tiles before the one that follows, or before this one if it is the last
    zeroth: Any  # 0, which the compiler does not know: else it keeps addresses of all members' tiles in registers, of which there are too few
    rows: Any  # [BLOCK_M, 1]
    cols: Any  # [1, BLOCK_N]
    bias_tile: Any  # [1, 1, BLOCK_M, BLOCK_N] in shared memory
    bias: Any  # [BLOCK_M, BLOCK_N] in registers, or None for want of them


class Running(NamedTuple):
    """Registers of a consumer between members of a tile; products of the last one are under way."""

    dqs: Any  # dQ of the members before the last one, [BLOCK_M, DIM] float32
    dq: Any  # [BLOCK_M, DIM], of the last one
    s: Any  # [BLOCK_M, BLOCK_N] float32, as the next of the member that comes: Q K^T
    d_p: Any  # [BLOCK_M, BLOCK_N], dP
    total: Any  # [BLOCK_M, BLOCK_N] float32, dS of all members so far


class Next(NamedTuple):
    """The member whose products come next: where its queries and its keys are, and the barrier and parity of the keys."""

    queries: Any
    keys: Any
    full: Any
    phase: Any


def query_and_bias_gradients(problem: Problem, incoming: Incoming, d_query: Tensor, d_bias: Tensor) -> None:
    """Fill the gradients of query and bias; `incoming` has its terms."""
    batch, heads, len_q, head_dim = problem.query.shape
    bias_batch, bias_heads = d_bias.shape[:2]
    len_k = problem.key.shape[2]
    members, dim = batch // bias_batch * (heads // bias_heads), padded_dim(problem)
    blocks = blocks_of(members, dim)
    block_m, block_n = BLOCK_M.value, 64 if members * dim <= MOST_SUMS // 2 else 32
    launch(
        _query_gradients_kernel,
        triton.cdiv(len_q, blocks * block_m) * bias_batch * bias_heads,
        q=tiled(problem.query, block_m, dim),
        k=tiled(problem.key, block_n, dim),
        v=tiled(problem.value, block_n, dim),
        bias=tiled(problem.bias, block_m, block_n),
        d_out=tiled(incoming.d_out, block_m, dim),
        d_bias=tiled(d_bias, block_m, block_n),
        rules=rules_of(problem),
        terms=tiled_vectors(incoming.vectors, 2, block_m),
        d_q=strided(d_query, heads),
        bias_heads=bias_heads,
        sharing_heads=heads // bias_heads,
        spread=spread_of(problem.bias),
        groups=heads // problem.key.shape[1],
        len_q=len_q,
        len_k=len_k,
        HEAD_DIM=head_dim,
        DIM=dim,
        MEMBERS=members,
        BLOCKS=blocks,
        BLOCK_N=block_n,
        EVEN_N=len_k % block_n == 0,
        num_warps=4,
        maxnreg=launch_registers(2),
    )


def blocks_of(members: int, dim: int) -> int:
    """How many blocks of BLOCK_M queries a program has: one for each consumer, one for both, who share the members then, or 0 if it cannot."""
    if 2 <= members <= MOST_SUMS // dim:
        return 2
    return 1 if 4 <= members <= 2 * (MOST_SUMS // dim) else 0  # by members, three take nearly as long as four


@gluon.jit
def _query_gradients_kernel(
    q, k, v, bias, d_out, d_bias, rules, terms, d_q, bias_heads, sharing_heads, spread, groups, len_q, len_k,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, MEMBERS: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCKS x BLOCK_M queries of all MEMBERS of one slice of the bias, and their dBias, from a grid of one axis.

    q, k, v, bias, d_out, d_bias and terms (`query_terms.Incoming`) are tensor descriptors.

    Consumers share the work by queries where there are two BLOCKS of them, and by members where there is one (hopper/shared_members.py).
    """
    follow()
    GROUP: gl.constexpr = MEMBERS if BLOCKS == 2 else 1
    STAGES: gl.constexpr = 2 if BLOCKS == 2 else min(MEMBERS + 1, 8)
    BIAS_TILES: gl.constexpr = 3 if BLOCKS == 2 else 2
    PAIRS: gl.constexpr = product_layout(BLOCK_N)
    SUMS: gl.constexpr = product_layout(DIM)
    config: gl.constexpr = Config(HEAD_DIM, DIM, MEMBERS, BLOCKS, BLOCK_N, EVEN_N, GROUP, STAGES, BIAS_TILES, PAIRS, SUMS)
    block, bias_head, entry = place_work(gl.program_id(0), gl.num_programs(0), rules, len_q, bias_heads, BLOCKS * BLOCK_M)
    seq = Sequence(entry, bias_head, len_q, len_k)  # of the slice
    row = block * (BLOCKS * BLOCK_M)
    q_tiles = gl.allocate_shared_memory(q.dtype, [MEMBERS * BLOCKS, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [MEMBERS * BLOCKS, 1, 1, BLOCK_M, DIM], d_out.layout)
    terms_tiles = gl.allocate_shared_memory(gl.float32, [MEMBERS * BLOCKS, 1, 1, 2, BLOCK_M], terms.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES * GROUP, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES * GROUP, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles = gl.allocate_shared_memory(bias.dtype, [BIAS_TILES * BLOCKS, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    q_full = allocate_barriers(1, 1)
    full = allocate_barriers(2 * MEMBERS // GROUP, 1)
    free = allocate_barriers(STAGES, BLOCKS)
    bias_full, bias_free, given = None, None, None
    if BLOCKS == 1:
        bias_full, bias_free = allocate_barriers(BIAS_TILES, 1), allocate_barriers(1, 1)
        part = gl.allocate_shared_memory(gl.float32, [BLOCK_N // 8, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
        given = Given(part, allocate_barriers(1, 1), allocate_barriers(1, 1))
    fence_async_shared()
    sharing = Sharing(sharing_heads, spread, groups)
    sources = Sources(q, k, v, bias, d_out, terms)
    tiles = Tiles(q_tiles, d_out_tiles, terms_tiles, k_tiles, v_tiles, bias_tiles)
    barriers = Barriers(q_full, full, free, bias_full, bias_free)
    gl.warp_specialize(
        [
            (_consume, (tiles, barriers, given, rules, seq, sharing, row, d_bias, d_q, 0, config)),
            (_consume, (tiles, barriers, given, rules, seq, sharing, row, d_bias, d_q, 1, config)),
            (produce, (sources, tiles, barriers, rules, seq, sharing, row, config)),
        ],
        [4, 1],
        [consumer_registers(2), PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(tiles, barriers, given, rules, seq, sharing, row, d_bias, d_q, which: gl.constexpr, config: gl.constexpr):
    """One consumer: all members of the first or the second BLOCK_M queries, or every other member of the only ones."""
    BLOCKS: gl.constexpr = config.BLOCKS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    PAIRS: gl.constexpr = config.PAIRS
    FIRST: gl.constexpr = own_member(0, which, BLOCKS)
    OWN: gl.constexpr = own_count(which, config.MEMBERS, BLOCKS)
    begin, end = key_range(rules, seq, Span(row, 0, None), BLOCKS * BLOCK_M, BLOCK_N)[:2]
    if BLOCKS == 2:
        row += which * BLOCK_M
    open_begin, open_end = open_keys(rules.left, rules.right, seq, row, begin, end, BLOCK_M, BLOCK_N)
    context = Context(tiles, barriers, given, rules, seq, row, gl.cdiv(end - begin, BLOCK_N) - 1, d_bias)
    dqs = ()
    for _member in gl.static_range(OWN):
        dqs += (gl.full([BLOCK_M, config.DIM], 0.0, gl.float32, config.SUMS),)
    s = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    d_p = s
    if begin < end:
        mbarrier.wait(barriers.q_full.index(0), 0)
        mbarrier.wait(barriers.full.index(FIRST), 0)
        s = _pairs(tiles.q.index(which), tiles.k.index(FIRST), config)
        d_p = _pairs(tiles.d_out.index(which), tiles.v.index(FIRST), config)
        s, d_p = warpgroup_mma_wait(0, [s, d_p])
    state = State(dqs, s, d_p)
    turn = 0  # tiles so far
    if rules.left is not None:
        for start in range(begin, open_begin, BLOCK_N):
            state = _add_tile(context, state, turn, start, which, config, EDGE=True)
            turn += 1
    for start in range(open_begin, open_end, BLOCK_N):
        state = _add_tile(context, state, turn, start, which, config, EDGE=False)
        turn += 1
    if rules.right is not None or not config.EVEN_N:
        for start in range(open_end, end, BLOCK_N):
            state = _add_tile(context, state, turn, start, which, config, EDGE=True)
            turn += 1
    if BLOCKS == 2 or which == 1:
        tma.store_wait(0)
        if rules.left is not None or rules.right is not None:
            _store_zeros(d_bias, tiles.bias.index(which), seq, row, begin, begin + turn * BLOCK_N, PAIRS)
    for i in gl.static_range(OWN):
        this = member_of(None, seq, own_member(i, which, BLOCKS), sharing.heads, sharing.spread)
        store_tile(d_q, this, row, seq.len_q, state.dqs[i] * rules.scale, config.HEAD_DIM)


@gluon.jit
def _store_zeros(d_bias, buffer, seq, row, begin, end, PAIRS: gl.constexpr):
    """Zeros to the rows of dBias before and behind the tiles that are visited, by way of the memory of a tile."""
    BLOCK_N: gl.constexpr = buffer.shape[3]
    buffer.reshape([BLOCK_M, BLOCK_N]).store(gl.full([BLOCK_M, BLOCK_N], 0.0, d_bias.dtype, PAIRS))
    fence_async_shared()
    for start in range(0, begin, BLOCK_N):
        store(d_bias, [seq.batch, seq.head, row, start], buffer)
    for start in range(end, seq.len_k, BLOCK_N):
        store(d_bias, [seq.batch, seq.head, row, start], buffer)
    tma.store_wait(0)


@gluon.jit
def _add_tile(context, state, turn, start, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr):
    """One tile of keys: the :class:`State` after it, and its tile of dBias stored in the memory of its bias and copied from there."""
    tiles, barriers = context.tiles, context.barriers
    BLOCKS: gl.constexpr = config.BLOCKS
    PAIRS: gl.constexpr = config.PAIRS
    OWN: gl.constexpr = own_count(which, config.MEMBERS, BLOCKS)
    rows = context.row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]  # [BLOCK_M, 1]
    cols = start + gl.arange(0, config.BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_N]
    bias_tile = tiles.bias.index(turn % config.BIAS_TILES * BLOCKS + (which if BLOCKS == 2 else 0))
    zeroth = turn >> 30
    next_turn = gl.minimum(turn + 1, context.last)
    if BLOCKS == 1:
        bias_stage, bias_phase = stage_of(turn, config.BIAS_TILES)
        mbarrier.wait(barriers.bias_full.index(bias_stage), bias_phase)
    bias = None
    if OWN <= 2:
        bias = bias_tile.reshape([BLOCK_M, config.BLOCK_N]).load(PAIRS)
    keys = Keys(turn, next_turn, zeroth, rows, cols, bias_tile, bias)
    running = Running((), state.dqs[0], state.s, state.d_p, gl.full([BLOCK_M, config.BLOCK_N], 0.0, gl.float32, PAIRS))
    for i in gl.static_range(OWN):
        running = _member(context, keys, state.dqs[i], running, i, which, config, EDGE)
    store_total(context, running.total, bias_tile, turn, start, which, config)
    dq, s, d_p = warpgroup_mma_wait(0, [running.dq, running.s, running.d_p])
    if BLOCKS == 2:
        tma.store_wait(1)  # the copy engine has read the tile of dBias before: there is room for the bias of the tile after the next
    mbarrier.arrive(barriers.free.index(member_stage(turn, own_member(OWN - 1, which, BLOCKS), config).number), count=1)
    dqs = running.dqs
    dqs += (dq,)
    return State(dqs, s, d_p)


@gluon.jit
def _member(context, keys, dq, running, i: gl.constexpr, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr):
    """:class:`Running` after a consumer's i-th member, whose dQ so far is given.

    Beside the probabilities of a member, the tensor cores have dS K of the member before, dP, and the next member's Q K^T to do. The last of
    these comes behind the probabilities for tiles of 64 keys, for want of registers, and where a consumer has two members, whose
    next keys are not there earlier. The next of the last member is the first one in the tile that follows, or, where none does, in the
    last tile once more, for nothing.
    """
    tiles, barriers, rules, zeroth = context.tiles, context.barriers, context.rules, keys.zeroth
    BLOCKS: gl.constexpr = config.BLOCKS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    ROWS: gl.constexpr = gl.SliceLayout(1, config.PAIRS)
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, config.SUMS, 2)
    OWN: gl.constexpr = own_count(which, config.MEMBERS, BLOCKS)
    EARLY: gl.constexpr = 1 if BLOCK_N == 32 and (BLOCKS == 2 or OWN > 2) else 0  # products ahead of the probabilities
    WAITS: gl.constexpr = config.GROUP == 1 or i + 1 == OWN  # for the next member's keys, which else are there
    vectors = tiles.terms._reinterpret(gl.float32, [2 * tiles.terms.shape[0], BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    at = 2 * i + which + zeroth  # where the member's queries are
    place = member_stage(keys.turn, own_member(i, which, BLOCKS), config).place
    divisor_rows = vectors.index(2 * at).load(ROWS)  # [BLOCK_M]
    delta_rows = vectors.index(2 * at + 1).load(ROWS)  # [BLOCK_M]
    after = _next_member(barriers, keys, at, i, which, config)
    s, d_p, next_s, dqs, bias = running.s, running.d_p, running.s, running.dqs, keys.bias
    if EARLY:
        next_s = _next_scores(tiles, after, zeroth, config, WAITS)
    if i > 0:
        s = warpgroup_mma_wait(1 + 2 * EARLY, [s])
    if bias is None:
        bias = keys.bias_tile.reshape([BLOCK_M, BLOCK_N]).load(config.PAIRS)
    s = ruled(s, bias, Hiding(), rules, context.seq, keys.rows, keys.cols, EDGE)
    p = gl.exp2(s * exponent_factor(rules) - divisor_rows[:, None])
    if i > 0:
        before_dq, d_p = warpgroup_mma_wait(EARLY, [running.dq, d_p])
        dqs += (before_dq,)
        if config.GROUP == 1:
            mbarrier.arrive(barriers.free.index(member_stage(keys.turn, own_member(i - 1, which, BLOCKS), config).number), count=1)
    elif BLOCKS == 1 and which == 1:
        tma.store_wait(0)  # the copy engine has read the tile of dBias before: there is room for the bias of the next tile
        mbarrier.arrive(barriers.bias_free.index(0), count=1)
    d_s = p * (d_p - delta_rows[:, None])
    total = d_s if i == 0 else running.total + d_s
    ds = as_factor(rounded_pairs(d_s, tiles.k.dtype), tiles.k.dtype, FACTOR)
    dq = warpgroup_mma(ds, tiles.k.index(place + zeroth).reshape([BLOCK_N, config.DIM]), dq, is_async=True)
    if not EARLY:
        next_s = _next_scores(tiles, after, zeroth, config, WAITS)
    d_p = _pairs(tiles.d_out.index(after.queries), tiles.v.index(after.keys + zeroth), config)
    return Running(dqs, dq, next_s, d_p, total)


@gluon.jit
def _next_member(barriers, keys, at, i: gl.constexpr, which: gl.constexpr, config: gl.constexpr):
    """The :class:`Next` of a consumer's i-th member, whose queries are `at`: the next one, or in the next turn the first."""
    LAST: gl.constexpr = i + 1 == own_count(which, config.MEMBERS, config.BLOCKS)
    member: gl.constexpr = own_member(0 if LAST else i + 1, which, config.BLOCKS)
    if LAST:
        queries, turn = which + keys.zeroth, keys.next_turn
    else:
        queries, turn = at + 2, keys.turn
    place = member_stage(turn, member, config).place
    full, phase = member_full(barriers, turn, member, config)
    return Next(queries, place, full, phase)


@gluon.jit
def _next_scores(tiles, after, zeroth, config: gl.constexpr, WAITS: gl.constexpr):
    """Q K^T of the :class:`Next` member, under way."""
    if WAITS:
        mbarrier.wait(after.full, after.phase)
    return _pairs(tiles.q.index(after.queries), tiles.k.index(after.keys + zeroth), config)


@gluon.jit
def _pairs(left, right, config: gl.constexpr):
    """The product of tiles of queries and of keys, or dO and values, under way."""
    zero = gl.full([BLOCK_M, config.BLOCK_N], 0.0, gl.float32, config.PAIRS)
    transposed = right.reshape([config.BLOCK_N, config.DIM]).permute((1, 0))
    return warpgroup_mma(left.reshape([BLOCK_M, config.DIM]), transposed, zero, use_acc=False, is_async=True)
