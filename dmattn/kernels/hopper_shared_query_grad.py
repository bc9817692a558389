"""dQ together with the dBias of a bias that few (batch, head) share, on Hopper (sm_90), in Gluon.

dBias is a sum over the members that share it. A program here takes some queries of all members: tile by tile of keys it makes dS of each
member, which is a factor of dQ and a term of the tile of dBias. hopper_query_grad.py and hopper_bias_grad.py make dS twice.

A program has three parts that run side by side: two consumers of 64 queries each, and a producer that copies what the members' queries have,
which stays, and tiles of bias and of the members' keys and values to shared memory ahead of them.

Consumers share the work by queries as long as one has registers for dQ of all members. Else they share it by members: both have the same
queries, each has dQ of every other member, and one gives its part of each tile of dBias to the other, which stores the sum.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .device import processors
from .hopper import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    padded_dim,
    serves,
    stage_of,
    store,
    tiled,
    tiled_vectors,
)
from .hopper_members import BLOCK_M, member_full, member_stage, own_count, own_member, produce
from .hopper_registers import Hiding, as_factor, by_rows, by_threads, exponent_factor, order_of, rounded_pairs, ruled, store_rows
from .hopper_walk import open_keys
from .launch import launch
from .layout import Sequence, Span, strided
from .overlap import follow
from .row_terms import Incoming
from .scores import rules_of
from .sequence import member_of, place_queries
from .walk import key_range

# Programs for each processor and round of programs, by blocks of queries of a program. With fewer the two other kernels are faster, which have
# some for each member; a round that is not full takes as long as a full one.
LEAST_FILL = {1: 0.7, 2: 0.5}
MOST_SUMS = 256  # columns of dQ, of all its members, that a consumer has registers for


def takes(problem: Any, d_out: Tensor, d_bias: Tensor) -> bool:
    """Whether `query_and_bias_gradients` takes a problem with these."""
    if problem.mask is not None or problem.first is not None or d_bias.dtype != problem.bias.dtype:
        return False
    if not serves(problem, (64, 128), d_out, d_bias):
        return False
    blocks = _blocks(_members(problem, d_bias), padded_dim(problem))
    if blocks == 0:
        return False
    programs = triton.cdiv(problem.query.shape[2], blocks * BLOCK_M.value) * d_bias.shape[0] * d_bias.shape[1]
    at_once = processors(problem.query.device)
    return programs >= LEAST_FILL[blocks] * triton.cdiv(programs, at_once) * at_once


def query_and_bias_gradients(problem: Any, incoming: Incoming, d_query: Tensor, d_bias: Tensor) -> None:
    """Fill the gradients of query and bias; `incoming` has its terms."""
    heads, len_q, head_dim = problem.query.shape[1:]
    bias_batch, bias_heads = d_bias.shape[:2]
    len_k = problem.key.shape[2]
    members, dim = _members(problem, d_bias), padded_dim(problem)
    blocks = _blocks(members, dim)
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
        terms=tiled_vectors(incoming.terms, 2, block_m),
        d_q=strided(d_query, heads),
        bias_heads=bias_heads,
        sharing_heads=heads // bias_heads,
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
        maxnreg=LAUNCH_REGISTERS[2],
    )


def _members(problem: Any, d_bias: Tensor) -> int:
    """How many (batch, head) share one slice of the bias."""
    batch, heads = problem.query.shape[:2]
    return batch // d_bias.shape[0] * (heads // d_bias.shape[1])


def _blocks(members: int, dim: int) -> int:
    """How many blocks of BLOCK_M queries a program has: one for each consumer, one for both, who share the members then, or 0 if it cannot."""
    if 2 <= members <= MOST_SUMS // dim:
        return 2
    return 1 if 4 <= members <= 2 * (MOST_SUMS // dim) else 0  # by members, three take nearly as long as four


@gluon.jit
def _query_gradients_kernel(
    q, k, v, bias, d_out, d_bias, rules, terms, d_q, bias_heads, sharing_heads, groups, len_q, len_k,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, MEMBERS: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCKS x BLOCK_M queries of all MEMBERS of one slice of the bias, and their dBias, from a grid of one axis.

    q, k, v, bias, d_out, d_bias and terms (`row_terms.Incoming`) are tensor descriptors.

    Consumers share the work by queries where there are two BLOCKS of them, and by members where there is one (hopper_members.py).
    """
    follow()
    GROUP: gl.constexpr = MEMBERS if BLOCKS == 2 else 1
    STAGES: gl.constexpr = 2 if BLOCKS == 2 else min(MEMBERS + 1, 8)
    BIAS_TILES: gl.constexpr = 3 if BLOCKS == 2 else 2
    block, bias_head, entry = place_queries(rules, len_q, bias_heads, BLOCKS * BLOCK_M)
    sharing = (sharing_heads, groups)
    seq = Sequence(entry, bias_head, len_q, len_k)  # of the slice
    row = block * (BLOCKS * BLOCK_M)
    q_tiles = gl.allocate_shared_memory(q.dtype, [MEMBERS * BLOCKS, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [MEMBERS * BLOCKS, 1, 1, BLOCK_M, DIM], d_out.layout)
    terms_tiles = gl.allocate_shared_memory(gl.float32, [MEMBERS * BLOCKS, 1, 1, 2, BLOCK_M], terms.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES * GROUP, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES * GROUP, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles = gl.allocate_shared_memory(bias.dtype, [BIAS_TILES * BLOCKS, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    q_full = barriers(1, 1)
    full = barriers(2 * MEMBERS // GROUP, 1)
    free = barriers(STAGES, BLOCKS)
    bias_full, bias_free, part = full, free, ()  # nobody's, unless consumers share the members
    if BLOCKS == 1:
        bias_full, bias_free = barriers(BIAS_TILES, 1), barriers(1, 1)
        given = gl.allocate_shared_memory(gl.float32, [BLOCK_N // 8, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
        part = (given, barriers(1, 1), barriers(1, 1))
    fence_async_shared()
    tiles = (q_tiles, d_out_tiles, terms_tiles, k_tiles, v_tiles, bias_tiles)
    ready = (q_full, full, free, bias_full, bias_free)
    gl.warp_specialize(
        [
            (_consume, (tiles, ready, part, rules, seq, sharing, row, d_bias, d_q, 0, HEAD_DIM, MEMBERS, BLOCKS, EVEN_N)),
            (_consume, (tiles, ready, part, rules, seq, sharing, row, d_bias, d_q, 1, HEAD_DIM, MEMBERS, BLOCKS, EVEN_N)),
            (produce, (q, k, v, bias, d_out, terms, tiles, ready, rules, seq, sharing, row, MEMBERS, BLOCKS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(
    tiles, ready, part, rules, seq, sharing, row, d_bias, d_q,
    which: gl.constexpr, HEAD_DIM: gl.constexpr, MEMBERS: gl.constexpr, BLOCKS: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """What a consumer does: all members of the first or the second BLOCK_M queries, or every other member of the only ones."""
    q_tiles, d_out_tiles, _, k_tiles, v_tiles, bias_tiles = tiles
    FIRST: gl.constexpr = own_member(0, which, BLOCKS)
    OWN: gl.constexpr = own_count(which, MEMBERS, BLOCKS)
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    DIM: gl.constexpr = k_tiles.shape[4]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q_full, full, _, _, _ = ready
    sharing_heads, _ = sharing
    begin, end, _ = key_range(rules, seq, Span(row, 0, None), BLOCKS * BLOCK_M, BLOCK_N)
    if BLOCKS == 2:
        row += which * BLOCK_M
    open_begin, open_end = open_keys(rules, seq, row, begin, end, BLOCK_M, BLOCK_N)
    fixed = (tiles, ready, part, rules, seq, row, gl.cdiv(end - begin, BLOCK_N) - 1, d_bias)
    state = ()  # dQ of each member; then Q K^T and dP of the first one in the tile that comes
    for _sum in gl.static_range(OWN):
        state += (gl.full([BLOCK_M, DIM], 0.0, gl.float32, SUMS),)
    s = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    d_p = s
    if begin < end:
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(full.index(FIRST), 0)
        s = _pairs(q_tiles.index(which), k_tiles.index(FIRST), PAIRS)
        d_p = _pairs(d_out_tiles.index(which), v_tiles.index(FIRST), PAIRS)
        s, d_p = warpgroup_mma_wait(0, [s, d_p])
    state += (s, d_p)
    turn = 0  # tiles so far
    if rules.left is not None:
        for start in range(begin, open_begin, BLOCK_N):
            state = _tile(fixed, state, turn, start, which, MEMBERS, BLOCKS, True)
            turn += 1
    for start in range(open_begin, open_end, BLOCK_N):
        state = _tile(fixed, state, turn, start, which, MEMBERS, BLOCKS, False)
        turn += 1
    if rules.right is not None or not EVEN_N:
        for start in range(open_end, end, BLOCK_N):
            state = _tile(fixed, state, turn, start, which, MEMBERS, BLOCKS, True)
            turn += 1
    if BLOCKS == 2 or which == 1:
        tma.store_wait(0)
        if rules.left is not None or rules.right is not None:
            _store_zeros(d_bias, bias_tiles.index(which), seq, row, begin, begin + turn * BLOCK_N, PAIRS)
    for i in gl.static_range(OWN):
        store_rows(d_q, member_of(seq, own_member(i, which, BLOCKS), sharing_heads), row, seq.len_q, state[i] * rules.scale, HEAD_DIM)


@gluon.jit
def _store_zeros(d_bias, buffer, seq, row, begin, end, PAIRS: gl.constexpr):
    """What of the rows of dBias lies before and behind the tiles that are visited; the buffer is that of a tile."""
    BLOCK_N: gl.constexpr = buffer.shape[3]
    buffer.reshape([BLOCK_M, BLOCK_N]).store(gl.full([BLOCK_M, BLOCK_N], 0.0, d_bias.dtype, PAIRS))
    fence_async_shared()
    for start in range(0, begin, BLOCK_N):
        store(d_bias, [seq.batch, seq.head, row, start], buffer)
    for start in range(end, seq.len_k, BLOCK_N):
        store(d_bias, [seq.batch, seq.head, row, start], buffer)
    tma.store_wait(0)


@gluon.jit
def _tile(
    fixed, state, turn, start, which: gl.constexpr, MEMBERS: gl.constexpr, BLOCKS: gl.constexpr, EDGE: gl.constexpr
):  # fmt: skip
    """One tile of keys: `state` after it, and its tile of dBias stored in the memory of its bias and copied from there.

    Beside the probabilities of a member, the tensor cores have dS K of the member before, dP, and the next member's Q K^T to do. The last of
    these comes behind the probabilities for tiles of 64 keys, for want of registers, and where a consumer has two members, whose
    next keys are not there earlier. The next of the last member is the first one in the tile that follows, or, where none does, in the
    last tile once more, for nothing.
    """
    tiles, ready, _, rules, seq, row, last, _ = fixed
    q_tiles, d_out_tiles, terms_tiles, k_tiles, v_tiles, bias_tiles = tiles
    _, _, free, bias_full, bias_free = ready
    OWN: gl.constexpr = own_count(which, MEMBERS, BLOCKS)
    GROUP: gl.constexpr = k_tiles.shape[0] // free.shape[0]
    BIAS_TILES: gl.constexpr = bias_tiles.shape[0] // BLOCKS
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    DIM: gl.constexpr = k_tiles.shape[4]
    EARLY: gl.constexpr = 1 if BLOCK_N == 32 and (BLOCKS == 2 or OWN > 2) else 0  # products ahead of the probabilities
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16]), 2)
    vectors = terms_tiles._reinterpret(gl.float32, [2 * terms_tiles.shape[0], BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows = row + gl.arange(0, BLOCK_M, ROWS)[:, None]
    cols = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]
    bias_tile = bias_tiles.index(turn % BIAS_TILES * BLOCKS + (which if BLOCKS == 2 else 0))
    bias_pairs = bias_tile.reshape([BLOCK_M, BLOCK_N])
    # 0, which the compiler does not know: it would keep the addresses of all members' tiles in registers, of which there are too few.
    zeroth = turn >> 30
    next_turn = gl.minimum(turn + 1, last)
    sums = ()
    total = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    dq = state[0]
    next_s = state[OWN]
    d_p = state[OWN + 1]
    if BLOCKS == 1:
        bias_stage, bias_phase = stage_of(turn, BIAS_TILES)
        mbarrier.wait(bias_full.index(bias_stage), bias_phase)
    HOLDS: gl.constexpr = OWN <= 2  # the bias, for there are registers left
    if HOLDS:
        bias = bias_pairs.load(PAIRS)
    for i in gl.static_range(OWN):
        at = 2 * i + which + zeroth  # where the member's queries are
        stage, _, keys = member_stage(tiles, ready, turn, own_member(i, which, BLOCKS), MEMBERS)
        s = next_s
        divisor_rows = vectors.index(2 * at).load(ROWS)
        delta_rows = vectors.index(2 * at + 1).load(ROWS)
        next_at = at + 2 if i + 1 < OWN else which + zeroth
        next_keys, full, phase = _next_keys(tiles, ready, turn, next_turn, i, which, MEMBERS, BLOCKS)
        if EARLY:
            if GROUP == 1 or i + 1 == OWN:
                mbarrier.wait(full, phase)
            next_s = _pairs(q_tiles.index(next_at), k_tiles.index(next_keys + zeroth), PAIRS)
        if i > 0:
            s = warpgroup_mma_wait(1 + 2 * EARLY, [s])
        if not HOLDS:
            bias = bias_pairs.load(PAIRS)
        s = ruled(s, bias, Hiding(), rules, seq, rows, cols, EDGE)
        p = gl.exp2(s * exponent_factor(rules) - divisor_rows[:, None])
        if i > 0:
            dq, d_p = warpgroup_mma_wait(EARLY, [dq, d_p])
            sums += (dq,)
            if GROUP == 1:
                before, _, _ = member_stage(tiles, ready, turn, own_member(i - 1, which, BLOCKS), MEMBERS)
                mbarrier.arrive(free.index(before), count=1)
        elif BLOCKS == 1 and which == 1:
            tma.store_wait(0)  # the copy engine has read the tile of dBias before: there is room for the bias of the next tile
            mbarrier.arrive(bias_free.index(0), count=1)
        d_s = p * (d_p - delta_rows[:, None])
        total = d_s if i == 0 else total + d_s
        ds = as_factor(rounded_pairs(d_s, k_tiles.dtype), k_tiles.dtype, FACTOR)
        dq = warpgroup_mma(ds, k_tiles.index(keys + zeroth).reshape([BLOCK_N, DIM]), state[i], is_async=True)
        if not EARLY:
            if GROUP == 1 or i + 1 == OWN:
                mbarrier.wait(full, phase)
            next_s = _pairs(q_tiles.index(next_at), k_tiles.index(next_keys + zeroth), PAIRS)
        d_p = _pairs(d_out_tiles.index(next_at), v_tiles.index(next_keys + zeroth), PAIRS)
    _store_total(fixed, total, bias_tile, turn, start, which, BLOCKS, PAIRS)
    dq, next_s, d_p = warpgroup_mma_wait(0, [dq, next_s, d_p])
    if BLOCKS == 2:
        tma.store_wait(1)  # the copy engine has read the tile of dBias before: there is room for the bias of the tile after the next
    mbarrier.arrive(free.index(stage), count=1)
    sums += (dq, next_s, d_p)
    return sums


@gluon.jit
def _next_keys(
    tiles, ready, turn, next_turn, i: gl.constexpr, which: gl.constexpr, MEMBERS: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """(place, barrier, parity) of the keys of what comes after a consumer's i-th member: the next one, or in the next turn the first."""
    if i + 1 < own_count(which, MEMBERS, BLOCKS):
        _, _, keys = member_stage(tiles, ready, turn, own_member(i + 1, which, BLOCKS), MEMBERS)
        full, phase = member_full(tiles, ready, turn, own_member(i + 1, which, BLOCKS), MEMBERS)
    else:
        _, _, keys = member_stage(tiles, ready, next_turn, own_member(0, which, BLOCKS), MEMBERS)
        full, phase = member_full(tiles, ready, next_turn, own_member(0, which, BLOCKS), MEMBERS)
    return keys, full, phase


@gluon.jit
def _store_total(fixed, total, bias_tile, turn, start, which: gl.constexpr, BLOCKS: gl.constexpr, PAIRS: gl.constexpr):
    """Sums of dS to their place in dBias, by way of the memory of their bias; of consumers that share the members, by the second."""
    _, _, part, _, seq, row, _, d_bias = fixed
    if BLOCKS == 1:
        total = _joined(total, part, turn, which, PAIRS)
    if BLOCKS == 2 or which == 1:
        bias_tile.reshape(total.shape).store(total.to(d_bias.dtype))
        fence_async_shared()
        store(d_bias, [seq.batch, seq.head, row, start], bias_tile)
        if BLOCKS == 1:
            mbarrier.arrive(part[2].index(0), count=1)  # only now is what was given certainly read


@gluon.jit
def _joined(total, part, turn, which: gl.constexpr, PAIRS: gl.constexpr):
    """The sum of dS over all members, for the second consumer, to which the first one gives its part of it."""
    given, given_full, given_free = part
    if which == 0:
        mbarrier.wait(given_free.index(0), (turn & 1) ^ 1)
        given.store(by_threads(total))
        mbarrier.arrive(given_full.index(0), count=1)
    else:
        mbarrier.wait(given_full.index(0), turn & 1)
        total += by_rows(given.load(order_of(given.shape[0])), PAIRS)
    return total


@gluon.jit
def _pairs(left, right, PAIRS: gl.constexpr):
    """The product of tiles of queries and of keys, or dO and values, under way."""
    BLOCK_N: gl.constexpr = right.shape[2]
    DIM: gl.constexpr = right.shape[3]
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    transposed = right.reshape([BLOCK_N, DIM]).permute((1, 0))
    return warpgroup_mma(left.reshape([BLOCK_M, DIM]), transposed, zero, use_acc=False, is_async=True)
