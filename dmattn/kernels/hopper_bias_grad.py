"""The gradient of a bias shared by several (batch, head) on Hopper (sm_90), in Gluon: bias_grad.py says what and how it is split.

A program has three parts that run side by side: two consumers, each with 64 rows of one tile of dBias in registers, and a producer that
copies the members' queries, keys, dO and values to shared memory ahead of them. Tiles are as large as registers allow, since what bounds
the kernel is how often members are read.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper import CONSUMER_REGISTERS, LAUNCH_REGISTERS, PRODUCER_REGISTERS, barriers, copy, padded_dim, serves, tiled
from .hopper_registers import Hiding, exponent_factor, load_vector, ruled
from .launch import launch
from .layout import Sequence, Span, slice_pointer, strided
from .overlap import follow
from .row_terms import Incoming
from .scores import rules_of
from .sequence import in_window, member_of
from .softmax import divisor2

BLOCK_M = gl.constexpr(64)  # queries of a consumer
BLOCK_N = gl.constexpr(128)
ROWS, COLS = 2 * BLOCK_M.value, BLOCK_N.value  # of a program's tile


def takes(problem: Any, d_out: Tensor) -> bool:
    """Whether `shared_gradient` takes a problem with this d_out."""
    return problem.mask is None and problem.first is None and serves(problem, (64, 128), d_out)


def shared_gradient(problem: Any, incoming: Incoming, parts: Tensor, programs: int, sharing: tuple[int, int, int, int]) -> None:
    """Fill `parts` (parts * B or 1, H or Hk or 1, Sq, Sk), each tile by one of the programs, which share the members as `sharing` says."""
    heads, len_q = problem.query.shape[1:3]
    _, lse, delta = incoming.strided(heads)
    block_m, block_n, dim = BLOCK_M.value, BLOCK_N.value, padded_dim(problem)
    launch(
        _shared_gradient_kernel,
        programs,
        q=tiled(problem.query, block_m, dim),
        k=tiled(problem.key, block_n, dim),
        v=tiled(problem.value, block_n, dim),
        bias=tiled(problem.bias, block_m, block_n),
        d_out=tiled(incoming.d_out, block_m, dim),
        rules=rules_of(problem),
        lse=lse,
        delta=delta,
        parts=strided(parts, parts.shape[1]),
        sharing=sharing,
        heads=heads,
        groups=heads // problem.key.shape[1],
        len_q=len_q,
        len_k=problem.key.shape[2],
        DIM=dim,
        STAGES=2,
        LATE_STAGES=2 if dim == 64 else 1,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[2],
    )


@gluon.jit
def _shared_gradient_kernel(
    q, k, v, bias, d_out, rules, lse, delta, parts, sharing, heads, groups, len_q, len_k,
    DIM: gl.constexpr, STAGES: gl.constexpr, LATE_STAGES: gl.constexpr,
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
    if not in_window(rules, seq, Span(row, 0, None), Span(col, 0, None), 2 * BLOCK_M, BLOCK_N):
        end = begin
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES * 2, 1, 1, BLOCK_M, DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, DIM], k.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [LATE_STAGES * 2, 1, 1, BLOCK_M, DIM], d_out.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [LATE_STAGES, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles = gl.allocate_shared_memory(bias.dtype, [2, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    bias_full = barriers(1, 1)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)
    late_full = barriers(LATE_STAGES, 1)
    late_free = barriers(LATE_STAGES, 2)
    fence_async_shared()
    mbarrier.expect(bias_full.index(0), 2 * bias.block_type.nbytes)
    for i in gl.static_range(2):
        copy(bias, [seq.batch, seq.head, row + i * BLOCK_M, col], bias_full.index(0), bias_tiles.index(i))
    tiles = (q_tiles, k_tiles, d_out_tiles, v_tiles, bias_tiles)
    ready = (bias_full, full, free, late_full, late_free)
    where = (seq, sharing_heads, row, col, begin, end, part_entry)
    gl.warp_specialize(
        [
            (_consume, (tiles, ready, rules, lse, delta, parts, where, 0, DIM, STAGES, LATE_STAGES)),
            (_consume, (tiles, ready, rules, lse, delta, parts, where, 1, DIM, STAGES, LATE_STAGES)),
            (_produce, (q, k, d_out, v, tiles, ready, where, groups, STAGES, LATE_STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(q, k, d_out, v, tiles, ready, where, groups, STAGES: gl.constexpr, LATE_STAGES: gl.constexpr):
    """Copy each member's tiles to shared memory, as far ahead as there are free stages."""
    q_tiles, k_tiles, d_out_tiles, v_tiles, _ = tiles
    _, full, free, late_full, late_free = ready
    seq, sharing_heads, row, col, begin, end, _ = where
    for member in range(begin, end):
        this = member_of(seq, member, sharing_heads)
        step = member - begin
        stage = step % STAGES
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 2 * q.block_type.nbytes + k.block_type.nbytes)
        copy(k, [this.batch, this.head // groups, col, 0], full.index(stage), k_tiles.index(stage))
        copy(q, [this.batch, this.head, row, 0], full.index(stage), q_tiles.index(2 * stage))
        copy(q, [this.batch, this.head, row + BLOCK_M, 0], full.index(stage), q_tiles.index(2 * stage + 1))
        late = step % LATE_STAGES
        mbarrier.wait(late_free.index(late), ((step // LATE_STAGES) & 1) ^ 1)
        mbarrier.expect(late_full.index(late), 2 * d_out.block_type.nbytes + v.block_type.nbytes)
        copy(v, [this.batch, this.head // groups, col, 0], late_full.index(late), v_tiles.index(late))
        copy(d_out, [this.batch, this.head, row, 0], late_full.index(late), d_out_tiles.index(2 * late))
        copy(d_out, [this.batch, this.head, row + BLOCK_M, 0], late_full.index(late), d_out_tiles.index(2 * late + 1))


@gluon.jit
def _consume(
    tiles, ready, rules, lse, delta, parts, where,
    which: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, LATE_STAGES: gl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of the program's tile, the first or the second."""
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    bias_full, _, _, _, _ = ready
    seq, _, row, col, begin, end, part_entry = where
    row += which * BLOCK_M
    total = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    mbarrier.wait(bias_full.index(0), 0)
    offset = seq.len_k - seq.len_q
    at_edge = col + BLOCK_N > seq.len_k
    if rules.right is not None:
        at_edge |= col + BLOCK_N > row + offset + rules.right + 1
    if rules.left is not None:
        at_edge |= col < row + BLOCK_M - 1 + offset - rules.left
    if at_edge:
        for member in range(begin, end):
            total += _member(tiles, ready, rules, lse, delta, where, row, member, which, DIM, STAGES, LATE_STAGES, True)
    else:
        for member in range(begin, end):
            total += _member(tiles, ready, rules, lse, delta, where, row, member, which, DIM, STAGES, LATE_STAGES, False)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))
    pointers = slice_pointer(parts, Sequence(part_entry, seq.head, seq.len_q, seq.len_k))
    pointers = pointers + (rows.to(gl.int64) * parts.row)[:, None] + (cols.to(gl.int64) * parts.col)[None, :]
    gl.store(pointers, total.to(parts.ptr.dtype.element_ty), mask=(rows < seq.len_q)[:, None] & (cols < seq.len_k)[None, :])


@gluon.jit
def _member(
    tiles, ready, rules, lse, delta, where, row, member,
    which: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, LATE_STAGES: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """dS of the consumer's rows in one member."""
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    q_tiles, k_tiles, d_out_tiles, v_tiles, bias_tiles = tiles
    _, full, free, late_full, late_free = ready
    seq, sharing_heads, _, col, begin, _, _ = where
    seq = member_of(seq, member, sharing_heads)
    step = member - begin
    stage = step % STAGES
    late = step % LATE_STAGES
    lse_rows = load_vector(lse, lse.row, seq, row, seq.len_q, float("inf"), BLOCK_M, gl.SliceLayout(1, PAIRS), False)
    delta_rows = load_vector(delta, delta.row, seq, row, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(1, PAIRS), False)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    q_tile = q_tiles.index(2 * stage + which).reshape([BLOCK_M, DIM])
    s = warpgroup_mma(q_tile, k_tiles.index(stage).reshape([BLOCK_N, DIM]).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(late_full.index(late), (step // LATE_STAGES) & 1)
    d_out_tile = d_out_tiles.index(2 * late + which).reshape([BLOCK_M, DIM])
    d_p = warpgroup_mma(d_out_tile, v_tiles.index(late).reshape([BLOCK_N, DIM]).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(free.index(stage), count=1)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]
    s = ruled(s, bias_tiles.index(which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS), Hiding(), rules, seq, rows, cols, EDGE)
    p = gl.exp2(s * exponent_factor(rules) - divisor2(lse_rows)[:, None])
    d_p = warpgroup_mma_wait(0, [d_p])
    mbarrier.arrive(late_free.index(late), count=1)
    return p * (d_p - delta_rows[:, None])
