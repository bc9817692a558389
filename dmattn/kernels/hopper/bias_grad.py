"""The gradient of a bias shared by several (batch, head) on Hopper (sm_90), in Gluon: the same as portable/bias_grad.py, split likewise.

A program has three parts that run side by side: two consumers, each with 64 rows of one tile of dBias in registers, and a producer that
copies the members' queries, keys, dO and values to shared memory ahead of them. The kernel is bound by how often members are read, so tiles are
as large as registers allow.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ...problem import Problem
from ..base.launch import launch
from ..base.layout import Sequence, slice_pointer, strided
from ..base.overlap import follow
from ..base.place import member_of
from ..base.query_terms import Incoming
from ..base.rules import rules_of
from ..base.softmax import divisor2
from ..base.window import any_hidden, any_in_window
from ..portable.bias_grad import PROGRAMS_PER_PROCESSOR, Sharing
from .addressing import copyable
from .copies import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    allocate_barriers,
    allocate_pairs,
    allocate_tiles,
    copied_dims,
    copy,
    copy_tile,
    pieces,
    place_of_keys,
    place_of_queries,
    product_layout,
    product_under_way,
    stage_of,
    summed_dims,
    tiled,
    whole_of,
)
from .registers import Hiding, capped, exponent_factor, load_pairs, load_vector, mask_of, ruled, up_to

BLOCK_M = gl.constexpr(64)  # queries of a consumer
BLOCK_N = gl.constexpr(128)


class Config(NamedTuple):
    """Constexprs of a launch, and the layout in registers of tiles of pairs."""

    DIM: Any  # as they are multiplied (`summed_dims`)
    DIM_V: Any
    STAGES: Any  # of queries and keys
    LATE_STAGES: Any  # of dO and values
    PAIRS: Any  # of [BLOCK_M, BLOCK_N]


class Tiles(NamedTuple):
    """Tiles in shared memory, of a member in each stage; those of queries by twos, one for each consumer."""

    q: Any  # [2 STAGES, 1, 1, BLOCK_M, DIM], padded to `copied_dims`; as the next
    k: Any  # [STAGES, 1, 1, BLOCK_N, DIM]
    d_out: Any  # [2 LATE_STAGES, 1, 1, BLOCK_M, DIM_V]; likewise
    v: Any  # [LATE_STAGES, 1, 1, BLOCK_N, DIM_V]
    bias: Any  # [2, 1, 1, BLOCK_M, BLOCK_N], of all members


class Barriers(NamedTuple):
    """Barriers: full when a copy has come, free when both consumers have used it."""

    bias_full: Any  # [1, 1]
    full: Any  # [STAGES, 1], of queries and keys
    free: Any  # [STAGES, 1]
    late_full: Any  # [LATE_STAGES, 1], of dO and values
    late_free: Any  # [LATE_STAGES, 1]


class Context(NamedTuple):
    """Everything that members of a program's tile share; they are those from `begin` to `end`.

    Of packed sequences they are in steps of `stride`, which else is None.
    """

    tiles: Any
    barriers: Any
    seq: Any  # of the slice of the bias
    sharing_heads: Any  # heads of a batch entry that share the slice
    spread: Any  # and batch entries (`member_of`)
    row: Any  # the first query of both consumers
    col: Any
    begin: Any
    end: Any
    stride: Any


class Vectors(NamedTuple):
    """Vectors by query in memory (`layout.Strided`)."""

    lse: Any
    delta: Any


def shared_gradient(problem: Problem, incoming: Incoming, d_bias: Tensor) -> None:
    """Fill `d_bias` (entries of the bias, H or Hk or 1, Sq, Sk), as in portable/bias_grad.py."""
    heads = problem.query.shape[1]
    bias_batch, bias_heads, len_q, len_k = d_bias.shape
    tiles = triton.cdiv(len_q, 2 * BLOCK_M.value) * triton.cdiv(len_k, BLOCK_N.value) * bias_batch * bias_heads
    sharing = Sharing.of(d_bias, problem, tiles, PROGRAMS_PER_PROCESSOR)
    parts = sharing.parts(d_bias)
    lse, delta = incoming.strided(heads)[1:]
    block_m, block_n, (dim, dim_v) = BLOCK_M.value, BLOCK_N.value, summed_dims(problem)
    launch(
        _shared_gradient_kernel,
        tiles * sharing.splits,
        q=tiled(problem.query, block_m, whole_of(dim)),
        k=tiled(problem.key, block_n, whole_of(dim)),
        v=tiled(problem.value, block_n, whole_of(dim_v)),
        bias=tiled(copyable("bias", problem.bias), block_m, block_n),
        d_out=tiled(incoming.d_out, block_m, whole_of(dim_v)),
        rules=rules_of(problem, packed_blocks=sharing.sequences(problem)),
        lse=lse,
        delta=delta,
        parts=strided(parts, bias_heads),
        sharing=sharing.argument,
        spread=sharing.spread,
        heads=heads,
        groups=heads // problem.key.shape[1],
        len_q=len_q,
        len_k=len_k,
        DIM=dim,
        DIM_V=dim_v,
        STAGES=2,
        LATE_STAGES=2 if whole_of(max(dim, dim_v)) == 64 else 1,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[2],
    )
    sharing.sum_parts(parts, d_bias)


@gluon.jit
def _shared_gradient_kernel(
    q, k, v, bias, d_out, rules, lse, delta, parts, sharing, spread, heads, groups, len_q, len_k,
    DIM: gl.constexpr, DIM_V: gl.constexpr, STAGES: gl.constexpr, LATE_STAGES: gl.constexpr,
):  # fmt: skip
    """One program: one tile of dBias of one bias entry, summed over its share of the (batch, head) members, stored once.

    Grid of one axis: blocks of queries fastest, then blocks of keys, bias heads, bias batch entries, parts. STAGES tiles of queries and keys
    are in shared memory, and LATE_STAGES of dO and values, which are needed later.
    """
    follow()
    slice_batch, sharing_heads, members, members_per_part = sharing
    program = gl.program_id(0)
    blocks_m = gl.cdiv(len_q, 2 * BLOCK_M)
    blocks_n = gl.cdiv(len_k, BLOCK_N)
    bias_heads = heads // sharing_heads
    row = program % blocks_m * (2 * BLOCK_M)
    col = program // blocks_m % blocks_n * BLOCK_N
    bias_head = program // (blocks_m * blocks_n) % bias_heads
    part_entry = program // (blocks_m * blocks_n) // bias_heads
    entry = part_entry % slice_batch
    begin = part_entry // slice_batch * members_per_part
    end = gl.minimum(begin + members_per_part, members)
    seq = Sequence(entry, bias_head, len_q, len_k)  # of the slice
    seen = True
    if rules.ends is None:  # else the window is each sequence's own
        seen = any_in_window(rules.left, rules.right, seq, row, col, 2 * BLOCK_M, BLOCK_N)
    if not seen:
        end = begin
    stride = None
    if rules.ends is not None:  # by turns, up to the first sequence that is too short: those after it are, too
        begin, end, stride = part_entry // slice_batch, members, gl.cdiv(members, members_per_part)
    PAIRS: gl.constexpr = product_layout(BLOCK_N)
    config: gl.constexpr = Config(DIM, DIM_V, STAGES, LATE_STAGES, PAIRS)
    tiles = Tiles(
        q=allocate_tiles(q, STAGES * 2, BLOCK_M, DIM),
        k=allocate_tiles(k, STAGES, BLOCK_N, DIM),
        d_out=allocate_tiles(d_out, LATE_STAGES * 2, BLOCK_M, DIM_V),
        v=allocate_tiles(v, LATE_STAGES, BLOCK_N, DIM_V),
        bias=allocate_pairs(rules.bias, 2, BLOCK_M, BLOCK_N),
    )
    barriers = Barriers(
        bias_full=allocate_barriers(1, 1),
        full=allocate_barriers(STAGES, 1),
        free=allocate_barriers(STAGES, 2),
        late_full=allocate_barriers(LATE_STAGES, 1),
        late_free=allocate_barriers(LATE_STAGES, 2),
    )
    fence_async_shared()
    if bias is not None:  # else consumers load it
        mbarrier.expect(barriers.bias_full.index(0), 2 * bias.block_type.nbytes)
        for i in gl.static_range(2):
            copy(bias, [seq.batch, seq.head, row + i * BLOCK_M, col], barriers.bias_full.index(0), tiles.bias.index(i))
    context = Context(tiles, barriers, seq, sharing_heads, spread, row, col, begin, end, stride)
    vectors = Vectors(lse, delta)
    gl.warp_specialize(
        [
            (_consume, (context, rules, vectors, parts, part_entry, bias is None, 0, config)),
            (_consume, (context, rules, vectors, parts, part_entry, bias is None, 1, config)),
            (_produce, (q, k, d_out, v, context, rules, groups, config)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(q, k, d_out, v, context, rules, groups, config: gl.constexpr):
    """Copy each member's tiles to shared memory, as far ahead as there are free stages; q, k, d_out and v are tensor descriptors."""
    if rules.ends is None:
        for member in range(context.begin, context.end):
            seq = member_of(None, context.seq, member, context.sharing_heads, context.spread)
            _copy_member(q, k, d_out, v, context, seq, groups, member - context.begin, config)
    else:
        step, member = 0, context.begin
        while member < context.end:
            seq = member_of(rules.ends, context.seq, member, context.sharing_heads, context.spread, rules.packed_blocks)
            if _has_tile(context, rules, seq):
                _copy_member(q, k, d_out, v, context, seq, groups, step, config)
                step += 1
            member = _member_after(context, seq, member)


@gluon.jit
def _member_after(context, seq, member):
    """The number of the member after a packed sequence's; that after all where no further one is long enough."""
    return gl.where(context.row < seq.len_q, member + context.stride, context.end)


@gluon.jit
def _has_tile(context, rules, seq):
    """Whether a packed sequence has a pair of the tile."""
    row, col = context.row, context.col
    seen = any_in_window(rules.left, rules.right, seq, row, col, 2 * BLOCK_M, BLOCK_N)
    return (row < seq.len_q) & (col < seq.len_k) & seen


@gluon.jit
def _copy_member(q, k, d_out, v, context, seq, groups, step, config: gl.constexpr):
    """Copy the tiles of a member, which is that of a step."""
    tiles, barriers = context.tiles, context.barriers
    entry, row = place_of_queries(seq, context.row)
    col = place_of_keys(seq, context.col)[1]
    stage, phase = stage_of(step, config.STAGES)
    mbarrier.wait(barriers.free.index(stage), phase ^ 1)
    full = barriers.full.index(stage)
    mbarrier.expect(full, 2 * (2 * BLOCK_M + BLOCK_N) * copied_dims(config.DIM))
    copy_tile(k, entry, seq.head // groups, col, full, tiles.k, stage, config.DIM)
    copy_tile(q, entry, seq.head, row, full, tiles.q, 2 * stage, config.DIM)
    copy_tile(q, entry, seq.head, row + BLOCK_M, full, tiles.q, 2 * stage + 1, config.DIM)
    late, late_phase = stage_of(step, config.LATE_STAGES)
    mbarrier.wait(barriers.late_free.index(late), late_phase ^ 1)
    late_full = barriers.late_full.index(late)
    mbarrier.expect(late_full, 2 * (2 * BLOCK_M + BLOCK_N) * copied_dims(config.DIM_V))
    copy_tile(v, entry, seq.head // groups, col, late_full, tiles.v, late, config.DIM_V)
    copy_tile(d_out, entry, seq.head, row, late_full, tiles.d_out, 2 * late, config.DIM_V)
    copy_tile(d_out, entry, seq.head, row + BLOCK_M, late_full, tiles.d_out, 2 * late + 1, config.DIM_V)


@gluon.jit
def _consume(context, rules, vectors, parts, part_entry, LOADS: gl.constexpr, which: gl.constexpr, config: gl.constexpr):
    """BLOCK_M rows of the program's tile, the first or the second; it LOADS the bias of them where that is not copied."""
    PAIRS: gl.constexpr = config.PAIRS
    seq, col = context.seq, context.col
    row = context.row + which * BLOCK_M
    total = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    if LOADS:
        _load_bias(context, rules, row, which, PAIRS)
    else:
        mbarrier.wait(context.barriers.bias_full.index(0), 0)
    if rules.ends is not None:
        step, member = 0, context.begin
        while member < context.end:
            own = member_of(rules.ends, seq, member, context.sharing_heads, context.spread, rules.packed_blocks)
            if _has_tile(context, rules, own):
                total += _member(context, rules, vectors, own, row, step, which, config, EDGE=True)
                step += 1
            member = _member_after(context, own, member)
    elif rules.mask is not None or any_hidden(rules.left, rules.right, seq, row, col, BLOCK_M, BLOCK_N):
        for member in range(context.begin, context.end):
            own = member_of(None, seq, member, context.sharing_heads, context.spread)
            total += _member(context, rules, vectors, own, row, member - context.begin, which, config, EDGE=True)
    else:
        for member in range(context.begin, context.end):
            own = member_of(None, seq, member, context.sharing_heads, context.spread)
            total += _member(context, rules, vectors, own, row, member - context.begin, which, config, EDGE=False)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))  # [BLOCK_M]
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))  # [BLOCK_N]
    pointers = slice_pointer(parts, Sequence(part_entry, seq.head, seq.len_q, seq.len_k))
    pointers = pointers + (rows.to(gl.int64) * parts.row)[:, None] + (cols.to(gl.int64) * parts.col)[None, :]
    gl.store(pointers, total.to(parts.ptr.dtype.element_ty), mask=(rows < seq.len_q)[:, None] & (cols < seq.len_k)[None, :])


@gluon.jit
def _load_bias(context, rules, row, which: gl.constexpr, PAIRS: gl.constexpr):
    """Put the bias of the consumer's rows where copies would have put it."""
    first = member_of(None, context.seq, 0, context.sharing_heads, context.spread)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]  # [BLOCK_M, 1]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_N]
    bias = load_pairs(rules.bias, first, rows, cols, row, context.col, EDGE=True)
    context.tiles.bias.index(which).reshape([BLOCK_M, BLOCK_N]).store(bias)


@gluon.jit
def _member(context, rules, vectors, seq, row, step, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr):
    """dS of the consumer's rows in one member, which is that of a step."""
    tiles, barriers = context.tiles, context.barriers
    PAIRS: gl.constexpr = config.PAIRS
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    stage = step % config.STAGES
    late = step % config.LATE_STAGES
    lse_rows = load_vector(vectors.lse, vectors.lse.row, seq, row, seq.len_q, float("inf"), BLOCK_M, ROWS, EVEN=False)  # [BLOCK_M]
    delta_rows = load_vector(vectors.delta, vectors.delta.row, seq, row, seq.len_q, 0.0, BLOCK_M, ROWS, EVEN=False)  # [BLOCK_M]
    rows = gl.arange(0, BLOCK_M, ROWS)[:, None]  # [BLOCK_M, 1]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_N]
    kept = mask_of(rules, seq, rows, cols, row, context.col)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    mbarrier.wait(barriers.full.index(stage), (step // config.STAGES) & 1)
    s = product_under_way(pieces(tiles.q, 2 * stage + which, config.DIM), pieces(tiles.k, stage, config.DIM), zero, False)  # [BLOCK_M, BLOCK_N]
    mbarrier.wait(barriers.late_full.index(late), (step // config.LATE_STAGES) & 1)
    d_out_pieces = pieces(tiles.d_out, 2 * late + which, config.DIM_V)
    d_p = product_under_way(d_out_pieces, pieces(tiles.v, late, config.DIM_V), zero, False)  # [BLOCK_M, BLOCK_N]
    s = warpgroup_mma_wait(len(d_out_pieces), [s])
    mbarrier.arrive(barriers.free.index(stage), count=1)
    bias = tiles.bias.index(which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS)
    s = ruled(capped(s, rules), bias, Hiding(kept), rules, seq, row + rows, context.col + cols, EDGE)
    if rules.ends is not None:  # a bias past the last query may be NaN
        s = up_to(s, row + rows, seq.len_q - 1)
    p = gl.exp2(s * exponent_factor(rules) - divisor2(lse_rows)[:, None])
    d_p = warpgroup_mma_wait(0, [d_p])
    mbarrier.arrive(barriers.late_free.index(late), count=1)
    return p * (d_p - delta_rows[:, None])
