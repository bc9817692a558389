"""dQ together with the dBias of a bias that two to four (batch, head) share, on Hopper (sm_90), in Gluon.

dBias is a sum over the members that share it. A program here takes some queries of all members: tile by tile of keys it makes dS of each
member, which is a factor of dQ and a term of the tile of dBias. hopper_query_grad.py and hopper_bias_grad.py make dS twice.

A program has three parts that run side by side: two consumers of 64 queries each, and a producer that copies what the members' queries have,
which stays, and tiles of bias and of the members' keys and values to shared memory ahead of them.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..replay import launch
from .bias_grad import processors
from .hopper import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    copy,
    padded_dim,
    serves,
    stage_of,
    store,
    tiled,
    tiled_vectors,
)
from .hopper_registers import as_factor, exponent_factor, rounded_pairs, ruled, store_rows
from .hopper_walk import open_keys
from .layout import Sequence, Span, strided
from .overlap import follow
from .row_terms import Incoming
from .scores import rules_of
from .sequence import place_queries
from .walk import key_range

BLOCK_M = gl.constexpr(64)  # queries of a consumer
STAGES = gl.constexpr(2)  # tiles of all members' keys and values in shared memory
BIAS_TILES = gl.constexpr(3)  # of bias: one that comes, one in use, and one that has become dBias and goes
LEAST_FILL = 0.5  # programs for each processor; with fewer the two other kernels are faster, which have some for each member
MOST_SUMS = 256  # columns of dQ, of all members, that a consumer has registers for


def takes(problem: Any, d_out: Tensor, d_bias: Tensor) -> bool:
    """Whether `query_and_bias_gradients` takes a problem with these."""
    if problem.mask is not None or problem.first is not None or d_bias.dtype != problem.bias.dtype:
        return False
    if not serves(problem, (64, 128), d_out, d_bias):
        return False
    programs = triton.cdiv(problem.query.shape[2], 2 * BLOCK_M.value) * d_bias.shape[0] * d_bias.shape[1]
    return 2 <= _members(problem, d_bias) <= MOST_SUMS // padded_dim(problem) and programs >= LEAST_FILL * processors(problem.query.device)


def query_and_bias_gradients(problem: Any, incoming: Incoming, d_query: Tensor, d_bias: Tensor) -> None:
    """Fill the gradients of query and bias; `incoming` has its terms."""
    heads, len_q, head_dim = problem.query.shape[1:]
    bias_batch, bias_heads = d_bias.shape[:2]
    len_k = problem.key.shape[2]
    members, dim = _members(problem, d_bias), padded_dim(problem)
    block_m, block_n = BLOCK_M.value, 64 if members * dim <= MOST_SUMS // 2 else 32
    launch(
        _query_gradients_kernel,
        triton.cdiv(len_q, 2 * block_m) * bias_batch * bias_heads,
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
        BLOCK_N=block_n,
        EVEN_N=len_k % block_n == 0,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[2],
    )


def _members(problem: Any, d_bias: Tensor) -> int:
    """How many (batch, head) share one slice of the bias."""
    batch, heads = problem.query.shape[:2]
    return batch // d_bias.shape[0] * (heads // d_bias.shape[1])


@gluon.jit
def _query_gradients_kernel(
    q, k, v, bias, d_out, d_bias, rules, terms, d_q, bias_heads, sharing_heads, groups, len_q, len_k,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, MEMBERS: gl.constexpr, BLOCK_N: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """One program: dQ of 2 BLOCK_M queries of all MEMBERS of one slice of the bias, and these rows of its dBias, from a grid of one axis.

    q, k, v, bias, d_out, d_bias and terms (`row_terms.Incoming`) are tensor descriptors.
    """
    follow()
    block, bias_head, entry = place_queries(rules, len_q, bias_heads, 2 * BLOCK_M)
    sharing = (sharing_heads, groups)
    seq = Sequence(entry, bias_head, len_q, len_k)  # of the slice
    row = block * (2 * BLOCK_M)
    q_tiles = gl.allocate_shared_memory(q.dtype, [MEMBERS * 2, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [MEMBERS * 2, 1, 1, BLOCK_M, DIM], d_out.layout)
    terms_tiles = gl.allocate_shared_memory(gl.float32, [MEMBERS * 2, 1, 1, 2, BLOCK_M], terms.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES * MEMBERS, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES * MEMBERS, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles = gl.allocate_shared_memory(bias.dtype, [BIAS_TILES * 2, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    q_full = barriers(1, 1)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)
    fence_async_shared()
    tiles = (q_tiles, d_out_tiles, terms_tiles, k_tiles, v_tiles, bias_tiles)
    ready = (q_full, full, free)
    gl.warp_specialize(
        [
            (_consume, (tiles, ready, rules, seq, sharing, row, d_bias, d_q, 0, HEAD_DIM, MEMBERS, EVEN_N)),
            (_consume, (tiles, ready, rules, seq, sharing, row, d_bias, d_q, 1, HEAD_DIM, MEMBERS, EVEN_N)),
            (_produce, (q, k, v, bias, d_out, terms, tiles, ready, rules, seq, sharing, row, MEMBERS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _sequence_of(sharing, seq, member: gl.constexpr):
    """The sequence of a member of a slice."""
    sharing_heads, _ = sharing
    return Sequence(seq.batch + member // sharing_heads, seq.head * sharing_heads + member % sharing_heads, seq.len_q, seq.len_k)


@gluon.jit
def _produce(q, k, v, bias, d_out, terms, tiles, ready, rules, seq, sharing, row, MEMBERS: gl.constexpr):
    """Copy what the members' queries have, and tiles of bias, keys and values to shared memory, as far ahead as there are free stages."""
    q_tiles, d_out_tiles, terms_tiles, k_tiles, v_tiles, bias_tiles = tiles
    q_full, full, free = ready
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    _, groups = sharing
    begin, end, _ = key_range(rules, seq, Span(row, 0, None), 2 * BLOCK_M, BLOCK_N)
    if begin < end:
        mbarrier.expect(q_full.index(0), 2 * MEMBERS * (q.block_type.nbytes + d_out.block_type.nbytes + terms.block_type.nbytes))
    for turn in range(gl.cdiv(end - begin, BLOCK_N)):
        start = begin + turn * BLOCK_N
        stage, phase = stage_of(turn, STAGES)
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), MEMBERS * (k.block_type.nbytes + v.block_type.nbytes) + 2 * bias.block_type.nbytes)
        for i in gl.static_range(2):
            copy(bias, [seq.batch, seq.head, row + i * BLOCK_M, start], full.index(stage), bias_tiles.index(turn % BIAS_TILES * 2 + i))
        for member in gl.static_range(MEMBERS):
            this = _sequence_of(sharing, seq, member)
            if turn == 0:
                for i in gl.static_range(2):
                    copy(q, [this.batch, this.head, row + i * BLOCK_M, 0], q_full.index(0), q_tiles.index(2 * member + i))
                    copy(d_out, [this.batch, this.head, row + i * BLOCK_M, 0], q_full.index(0), d_out_tiles.index(2 * member + i))
                    copy(terms, [this.batch, this.head, 0, row + i * BLOCK_M], q_full.index(0), terms_tiles.index(2 * member + i))
            copy(k, [this.batch, this.head // groups, start, 0], full.index(stage), k_tiles.index(stage * MEMBERS + member))
            copy(v, [this.batch, this.head // groups, start, 0], full.index(stage), v_tiles.index(stage * MEMBERS + member))


@gluon.jit
def _consume(
    tiles, ready, rules, seq, sharing, row, d_bias, d_q,
    which: gl.constexpr, HEAD_DIM: gl.constexpr, MEMBERS: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """BLOCK_M of the program's queries, the first or the second."""
    q_tiles, d_out_tiles, _, k_tiles, v_tiles, bias_tiles = tiles
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    DIM: gl.constexpr = k_tiles.shape[4]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q_full, full, _ = ready
    begin, end, _ = key_range(rules, seq, Span(row, 0, None), 2 * BLOCK_M, BLOCK_N)
    row += which * BLOCK_M
    open_begin, open_end = open_keys(rules, seq, row, begin, end, BLOCK_M, BLOCK_N)
    fixed = (tiles, ready, rules, seq, row, gl.cdiv(end - begin, BLOCK_N) - 1, d_bias)
    state = ()  # dQ of each member; then Q K^T and dP of the first one in the tile that comes
    for _member in gl.static_range(MEMBERS):
        state += (gl.full([BLOCK_M, DIM], 0.0, gl.float32, SUMS),)
    s = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    d_p = s
    if begin < end:
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(full.index(0), 0)
        s = _pairs(q_tiles.index(which), k_tiles.index(0), PAIRS)
        d_p = _pairs(d_out_tiles.index(which), v_tiles.index(0), PAIRS)
        s, d_p = warpgroup_mma_wait(0, [s, d_p])
    state += (s, d_p)
    turn = 0  # tiles so far
    if rules.left is not None:
        for start in range(begin, open_begin, BLOCK_N):
            state = _tile(fixed, state, turn, start, which, PAIRS, SUMS, MEMBERS, True)
            turn += 1
    for start in range(open_begin, open_end, BLOCK_N):
        state = _tile(fixed, state, turn, start, which, PAIRS, SUMS, MEMBERS, False)
        turn += 1
    if rules.right is not None or not EVEN_N:
        for start in range(open_end, end, BLOCK_N):
            state = _tile(fixed, state, turn, start, which, PAIRS, SUMS, MEMBERS, True)
            turn += 1
    tma.store_wait(0)
    if rules.left is not None or rules.right is not None:
        _store_zeros(d_bias, bias_tiles.index(which), seq, row, begin, begin + turn * BLOCK_N, PAIRS)
    for member in gl.static_range(MEMBERS):
        store_rows(d_q, _sequence_of(sharing, seq, member), row, seq.len_q, state[member] * rules.scale, HEAD_DIM)


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
    fixed, state, turn, start, which: gl.constexpr, PAIRS: gl.constexpr, SUMS: gl.constexpr, MEMBERS: gl.constexpr, EDGE: gl.constexpr
):  # fmt: skip
    """One tile of keys: `state` after it, and its tile of dBias stored in the memory of its bias and copied from there.

    Beside the probabilities of a member, the tensor cores have dS K of the member before, dP, and the next member's Q K^T to do, but the last
    of these not for tiles of 64 keys, for want of registers. The next of the last member is the first one in the tile that follows, or, where
    none does, in the last tile once more, for nothing.
    """
    tiles, ready, rules, seq, row, last, d_bias = fixed
    q_tiles, d_out_tiles, terms_tiles, k_tiles, v_tiles, bias_tiles = tiles
    _, full, free = ready
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    DIM: gl.constexpr = k_tiles.shape[4]
    EARLY: gl.constexpr = 1 if BLOCK_N == 32 else 0  # products ahead of the probabilities
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    vectors = terms_tiles._reinterpret(gl.float32, [2 * terms_tiles.shape[0], BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows = row + gl.arange(0, BLOCK_M, ROWS)[:, None]
    cols = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]
    bias_tile = bias_tiles.index(turn % BIAS_TILES * 2 + which)
    bias_pairs = bias_tile.reshape([BLOCK_M, BLOCK_N])
    # 0, which the compiler does not know: it would keep the addresses of all members' tiles in registers, of which there are too few.
    zeroth = turn >> 30
    stage, _ = stage_of(turn, STAGES)
    next_stage, next_phase = stage_of(gl.minimum(turn + 1, last), STAGES)
    sums = ()
    total = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    dq = state[0]
    next_s = state[MEMBERS]
    d_p = state[MEMBERS + 1]
    for member in gl.static_range(MEMBERS):
        at = 2 * member + which + zeroth
        s = next_s
        divisor_rows = vectors.index(2 * at).load(ROWS)
        delta_rows = vectors.index(2 * at + 1).load(ROWS)
        if member + 1 < MEMBERS:
            next_at = at + 2
            next_keys = stage * MEMBERS + member + 1 + zeroth
        else:
            next_at = which + zeroth
            next_keys = next_stage * MEMBERS + zeroth
            mbarrier.wait(full.index(next_stage), next_phase)
        if EARLY:
            next_s = _pairs(q_tiles.index(next_at), k_tiles.index(next_keys), PAIRS)
        if member > 0:
            s = warpgroup_mma_wait(1 + 2 * EARLY, [s])
        s = ruled(s, bias_pairs.load(PAIRS), (1, 0, 0, 0), rules, seq, rows, cols, EDGE)
        p = gl.exp2(s * exponent_factor(rules) - divisor_rows[:, None])
        if member > 0:
            dq, d_p = warpgroup_mma_wait(EARLY, [dq, d_p])
            sums += (dq,)
        d_s = p * (d_p - delta_rows[:, None])
        total = d_s if member == 0 else total + d_s
        ds = as_factor(rounded_pairs(d_s, k_tiles.dtype), k_tiles.dtype, FACTOR)
        dq = warpgroup_mma(ds, k_tiles.index(stage * MEMBERS + member + zeroth).reshape([BLOCK_N, DIM]), state[member], is_async=True)
        if not EARLY:
            next_s = _pairs(q_tiles.index(next_at), k_tiles.index(next_keys), PAIRS)
        d_p = _pairs(d_out_tiles.index(next_at), v_tiles.index(next_keys), PAIRS)
    bias_pairs.store(total.to(d_bias.dtype))
    fence_async_shared()
    store(d_bias, [seq.batch, seq.head, row, start], bias_tile)
    dq, next_s, d_p = warpgroup_mma_wait(0, [dq, next_s, d_p])
    tma.store_wait(1)  # the copy engine has read the tile of dBias before: there is room for the bias of the tile after the next
    mbarrier.arrive(free.index(stage), count=1)
    sums += (dq, next_s, d_p)
    return sums


@gluon.jit
def _pairs(left, right, PAIRS: gl.constexpr):
    """The product of tiles of queries and of keys, or dO and values, under way."""
    BLOCK_N: gl.constexpr = right.shape[2]
    DIM: gl.constexpr = right.shape[3]
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    transposed = right.reshape([BLOCK_N, DIM]).permute((1, 0))
    return warpgroup_mma(left.reshape([BLOCK_M, DIM]), transposed, zero, use_acc=False, is_async=True)
