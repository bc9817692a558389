"""dQ on Hopper (sm_90) for head dims from 33 to 128, in Gluon: query_grad.py says what is made, this how.

A program has three parts that run side by side: two consumers of 64 queries each, and a producer that copies tiles of keys, values and bias
to shared memory ahead of them. A consumer makes dS of one tile while dS K of the tile before is still multiplied. As in hopper_forward.py, a
program may take several blocks of queries.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .device import processors
from .hopper import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PANEL,
    PRODUCER_REGISTERS,
    barriers,
    copy,
    of_pairs,
    padded_dim,
    serves,
    stage_of,
    tiled,
)
from .hopper_lift import ones_for_lifts
from .hopper_registers import Hiding, as_factor, bias_vector, exponent_factor, load_vector, mask_of, rounded_pairs, ruled, store_rows
from .hopper_walk import (
    Lengths,
    copy_blocks,
    copy_described,
    even_work,
    intervals_of,
    key_walk,
    lift_tile,
    listed_key,
    listed_keys,
    open_keys,
    tile_range,
    visits_of,
    work_of,
)
from .launch import launch
from .layout import strided
from .lift import COLUMNS
from .overlap import follow
from .row_terms import LIFT_COLUMNS, Incoming, store_terms
from .softmax import divisor2

BLOCK_M = gl.constexpr(64)  # queries of a consumer
BLOCK_N = gl.constexpr(64)
STAGES = gl.constexpr(3)  # tiles of keys, values and bias in shared memory


def takes(problem: Any, d_out: Tensor, out: Tensor) -> bool:
    """Whether `query_gradients` takes a problem with these. Without pairs to load head dims to 64 are faster in query_grad.py."""
    return serves(problem, (64, 128) if of_pairs(problem.bias) else (128,), d_out, out)


def query_gradients(problem: Any, incoming: Incoming, out: Tensor, d_lse: Tensor | None, d_query: Tensor) -> None:
    """As in query_grad.py without a dBias, for what it takes; and `incoming.terms` are filled, as a program has what makes them at hand."""
    batch, heads, len_q, head_dim = problem.query.shape
    kv_heads, len_k = problem.key.shape[1:3]
    block_m, block_n, dim = BLOCK_M.value, BLOCK_N.value, padded_dim(problem)
    rules, intervals, lifts, sub = key_walk(problem, 2 * block_m, block_n)
    works = triton.cdiv(len_q, 2 * block_m) * heads * batch
    launch(
        _query_gradients_kernel,
        min(works, processors(problem.query.device)) if even_work(problem) else works,
        q=tiled(problem.query, block_m, dim),
        k=tiled(problem.key, sub, PANEL.value),
        v=tiled(problem.value, sub, PANEL.value),
        bias=tiled(problem.bias if of_pairs(problem.bias) else None, block_m, sub),
        intervals=intervals,
        lifts=lifts,
        d_out=tiled(incoming.d_out, block_m, dim),
        out=tiled(out, block_m, dim),
        rules=rules,
        lse=strided(incoming.lse, heads),
        d_lse=strided(d_lse, heads),
        terms=strided(incoming.terms, heads),
        query_lifts=strided(incoming.lifts, heads),
        d_q=strided(d_query, heads),
        heads=heads,
        groups=heads // kv_heads,
        works=works,
        len_q=len_q,
        len_k=len_k,
        HEAD_DIM=head_dim,
        DIM=dim,
        EVEN_N=len_k % block_n == 0,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[2],
    )


@gluon.jit
def _query_gradients_kernel(
    q, k, v, bias, intervals, lifts, d_out, out, rules, lse, d_lse, terms, query_lifts, d_q, heads, groups, works, len_q, len_k,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """One program: dQ and terms of some of the `works`, 2 BLOCK_M queries of one (batch, head) each, from a grid of one axis.

    q, k, v, d_out, out, bias (of pairs), intervals and lifts are tensor descriptors, as in hopper_forward.py, or else None. The terms go to
    `terms` and `query_lifts`, which may be None (`row_terms.Incoming`).
    """
    follow()
    SUB: gl.constexpr = k.block_shape[2]
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [2, 1, 1, BLOCK_M, DIM], d_out.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, DIM], v.layout)
    bias_tiles = k_tiles
    interval_tiles = k_tiles
    lift_tiles = k_tiles
    ones = k_tiles
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES * 2, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    if intervals is not None:
        interval_tiles = gl.allocate_shared_memory(intervals.dtype, [STAGES * (BLOCK_N // SUB), 1, 1, 1, 2 * SUB], intervals.layout)
    if lifts is not None:
        lift_tiles = gl.allocate_shared_memory(lifts.dtype, [STAGES * (BLOCK_N // SUB), 1, 1, SUB, COLUMNS], lifts.layout)
        ones = ones_for_lifts(BLOCK_M)
    q_full = barriers(1, 1)
    q_free = barriers(1, 2)
    k_full = barriers(STAGES, 1)
    v_full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)
    fence_async_shared()
    tiles = (q_tiles, d_out_tiles, k_tiles, v_tiles, bias_tiles, interval_tiles, lift_tiles, ones)
    ready = (q_full, q_free, k_full, v_full, free)
    lengths = Lengths(works, heads, len_q, len_k)
    vectors = (lse, d_lse, (terms, query_lifts, rules.scale))
    gl.warp_specialize(
        [
            (_consume, (tiles, ready, rules, lengths, vectors, d_q, 0, HEAD_DIM, DIM, SUB, EVEN_N)),
            (_consume, (tiles, ready, rules, lengths, vectors, d_q, 1, HEAD_DIM, DIM, SUB, EVEN_N)),
            (_produce, (q, k, v, bias, intervals, lifts, d_out, out, tiles, ready, rules, lengths, groups)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(q, k, v, bias, intervals, lifts, d_out, out, tiles, ready, rules, lengths, groups):
    """Copy queries, dO and O, and tiles of keys, values, bias, intervals and lifts to shared memory, as far ahead as there are free stages.

    O comes as if it were the first tile: that of one consumer in the place of keys, that of the other in the place of values.
    """
    q_tiles, d_out_tiles, k_tiles, v_tiles, bias_tiles, interval_tiles, lift_tiles, _ = tiles
    q_full, q_free, k_full, v_full, free = ready
    TILE_BYTES: gl.constexpr = 2 * k_tiles.shape[3] * k_tiles.shape[4]
    SUB: gl.constexpr = k.block_shape[2]
    BLOCKS: gl.constexpr = BLOCK_N // SUB
    INTERVAL_BYTES: gl.constexpr = 0 if intervals is None else BLOCKS * intervals.block_type.nbytes
    LIFT_BYTES: gl.constexpr = 0 if lifts is None else BLOCKS * lifts.block_type.nbytes
    BIAS_BYTES: gl.constexpr = 0 if bias is None else 2 * bias.block_type.nbytes
    turn = 0  # tiles so far
    visited = visits_of(gl.program_id(0), rules, lengths, 2 * BLOCK_M)
    for number in range(gl.program_id(0), lengths.works, gl.num_programs(0)):
        seq, row = work_of(number, rules, lengths, 2 * BLOCK_M)
        walk = tile_range(visited, rules, seq, row, 2 * BLOCK_M, BLOCK_N, SUB)
        visited = visits_of(number + gl.num_programs(0), rules, lengths, 2 * BLOCK_M)
        stage, phase = stage_of(turn, STAGES)
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), out.block_type.nbytes)
        copy(out, [seq.batch, seq.head, row, 0], k_full.index(stage), k_tiles.index(stage))
        mbarrier.expect(v_full.index(stage), out.block_type.nbytes)
        copy(out, [seq.batch, seq.head, row + BLOCK_M, 0], v_full.index(stage), v_tiles.index(stage))
        turn += 1
        mbarrier.wait(q_free.index(0), (number // gl.num_programs(0) & 1) ^ 1)
        mbarrier.expect(q_full.index(0), 2 * q.block_type.nbytes + 2 * d_out.block_type.nbytes)
        for i in gl.static_range(2):
            copy(q, [seq.batch, seq.head, row + i * BLOCK_M, 0], q_full.index(0), q_tiles.index(i))
            copy(d_out, [seq.batch, seq.head, row + i * BLOCK_M, 0], q_full.index(0), d_out_tiles.index(i))
        kv_head = seq.head // groups
        for step in range(walk.begin, walk.full_end, BLOCK_N):
            starts = listed_keys(rules, seq, row, step, walk, 2 * BLOCK_M, BLOCK_N, SUB)
            stage, phase = stage_of(turn, STAGES)
            full = k_full.index(stage)
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(full, TILE_BYTES + INTERVAL_BYTES + LIFT_BYTES + BIAS_BYTES)
            copy_blocks(k, seq.batch, kv_head, starts, full, k_tiles, stage)
            copy_described(intervals, lifts, rules, seq, starts, full, interval_tiles, lift_tiles, stage, BLOCKS, SUB)
            if bias is not None:  # whose columns are one block
                entry = gl.where(rules.bias.batch == 0, 0, seq.batch)
                head = seq.head // rules.bias.group
                for i in gl.static_range(2):
                    copy(bias, [entry, head, row + i * BLOCK_M, starts[0]], full, bias_tiles.index(2 * stage + i))
            mbarrier.expect(v_full.index(stage), TILE_BYTES)
            copy_blocks(v, seq.batch, kv_head, starts, v_full.index(stage), v_tiles, stage)
            turn += 1


@gluon.jit
def _consume(
    tiles, ready, rules, lengths, vectors, d_q,
    which: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, SUB: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """dQ and terms of BLOCK_M queries of each of the program's blocks, the first or the second."""
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q_tiles, d_out_tiles, k_tiles, v_tiles, _, _, _, _ = tiles
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    q_full, q_free, k_full, v_full, free = ready
    turn = 0  # tiles so far
    visited = visits_of(gl.program_id(0), rules, lengths, 2 * BLOCK_M)
    for number in range(gl.program_id(0), lengths.works, gl.num_programs(0)):
        seq, row = work_of(number, rules, lengths, 2 * BLOCK_M)
        walk = tile_range(visited, rules, seq, row, 2 * BLOCK_M, BLOCK_N, SUB)
        visited = visits_of(number + gl.num_programs(0), rules, lengths, 2 * BLOCK_M)
        begin, end, full_end = walk.begin, walk.end, walk.full_end
        own_row = row + which * BLOCK_M
        d_out_tile = d_out_tiles.index(which).reshape([BLOCK_M, DIM])
        mbarrier.wait(q_full.index(0), number // gl.num_programs(0) & 1)
        stage, phase = stage_of(turn, STAGES)
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(v_full.index(stage), phase)
        out_tile = (k_tiles if which == 0 else v_tiles).index(stage).reshape([BLOCK_M, DIM])
        divisor_rows, delta_rows = _terms(vectors, out_tile, d_out_tile, seq, own_row, SUMS, PAIRS)
        mbarrier.arrive(free.index(stage), count=1)
        turn += 1
        factors = (q_tiles.index(which).reshape([BLOCK_M, DIM]), d_out_tile, divisor_rows, delta_rows)
        fixed = (factors, tiles, ready, rules, seq, row, walk)
        dq = gl.full([BLOCK_M, DIM], 0.0, gl.float32, SUMS)
        ds = rounded_pairs(gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS), k_tiles.dtype)
        sums = (dq, ds, turn)
        if begin < full_end:
            after = begin + BLOCK_N
            sums = _tile(fixed, sums, begin, which, PAIRS, SUMS, SUB, True, True)
            if rules.lists is None:
                open_begin, open_end = open_keys(rules, seq, own_row, after, end, BLOCK_M, BLOCK_N)
                if rules.left is not None:
                    for step in range(after, open_begin, BLOCK_N):
                        sums = _tile(fixed, sums, step, which, PAIRS, SUMS, SUB, True, False)
                for step in range(open_begin, open_end, BLOCK_N):
                    sums = _tile(fixed, sums, step, which, PAIRS, SUMS, SUB, False, False)
                if rules.right is not None or not EVEN_N:
                    for step in range(open_end, end, BLOCK_N):
                        sums = _tile(fixed, sums, step, which, PAIRS, SUMS, SUB, True, False)
            else:
                for step in range(after, end, BLOCK_N):
                    sums = _tile(fixed, sums, step, which, PAIRS, SUMS, SUB, True, False)
                for step in range(end, full_end, BLOCK_N):
                    sums = _tile(fixed, sums, step, which, PAIRS, SUMS, SUB, False, False)
            dq, ds, turn = sums
            mbarrier.arrive(q_free.index(0), count=1)
            last = (turn - 1) % STAGES
            dq = warpgroup_mma(as_factor(ds, k_tiles.dtype, FACTOR), k_tiles.index(last).reshape([BLOCK_N, DIM]), dq, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(free.index(last), count=1)
        else:
            mbarrier.arrive(q_free.index(0), count=1)
        store_rows(d_q, seq, own_row, seq.len_q, dq * rules.scale, HEAD_DIM)


@gluon.jit
def _terms(vectors, out_tile, d_out_tile, seq, row, SUMS: gl.constexpr, PAIRS: gl.constexpr):
    """The terms of a consumer's queries (`row_terms.Incoming`), which are stored, too."""
    lse, d_lse, places = vectors
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    lse_rows = load_vector(lse, lse.row, seq, row, seq.len_q, float("-inf"), BLOCK_M, ROWS, False)
    delta_rows = gl.sum(out_tile.load(SUMS).to(gl.float32) * d_out_tile.load(SUMS).to(gl.float32), 1)
    delta_rows = gl.convert_layout(delta_rows, ROWS)
    if d_lse is not None:
        of_lse = load_vector(d_lse, d_lse.row, seq, row, seq.len_q, 0.0, BLOCK_M, ROWS, False)
        delta_rows = gl.where(lse_rows == float("-inf"), 0.0, delta_rows - of_lse)
    if row < seq.len_q:
        store_terms(places, seq, row, gl.arange(0, BLOCK_M, ROWS), gl.arange(0, LIFT_COLUMNS, gl.SliceLayout(0, PAIRS)), lse_rows, delta_rows)
    return divisor2(lse_rows), delta_rows


@gluon.jit
def _tile(
    fixed, sums, step, which: gl.constexpr,
    PAIRS: gl.constexpr, SUMS: gl.constexpr, SUB: gl.constexpr, EDGE: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """dS of one tile of keys, while the tile before, if it is not the FIRST, is added to dq with its dS.

    `sums` are (dq so far, dS of the last tile, how many tiles there were).
    """
    factors, tiles, ready, rules, seq, row, walk = fixed
    q_tile, d_out_tile, divisor_rows, delta_rows = factors
    dq, ds, turn = sums
    _, _, k_tiles, v_tiles, bias_tiles, interval_tiles, lift_tiles, ones = tiles
    _, _, k_full, v_full, free = ready
    DIM: gl.constexpr = k_tiles.shape[4]
    start = 0  # where there are intervals, nothing needs it
    if rules.first is None:
        start = listed_key(rules, seq, row, step, 0, walk, 2 * BLOCK_M, SUB)
    row += which * BLOCK_M
    stage, phase = stage_of(turn, STAGES)
    before = (turn - 1) % STAGES
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]
    hiding = Hiding()
    if EDGE:
        hiding = Hiding(mask_of(rules, seq, rows, cols, row, start))
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(q_tile, k_tiles.index(stage).reshape([BLOCK_N, DIM]).permute((1, 0)), zero, use_acc=False, is_async=True)
    if rules.bias_by_key is not None:
        s = warpgroup_mma(ones, lift_tile(lift_tiles, stage, BLOCK_N).permute((1, 0)), s, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    d_p = warpgroup_mma(d_out_tile, v_tiles.index(stage).reshape([BLOCK_N, DIM]).permute((1, 0)), zero, use_acc=False, is_async=True)
    if not FIRST:
        dq = warpgroup_mma(
            as_factor(ds, k_tiles.dtype, gl.DotOperandLayout(0, SUMS, 2)), k_tiles.index(before).reshape([BLOCK_N, DIM]), dq, is_async=True
        )
    if rules.bias_rows is not None and rules.bias_cols is not None:
        bias = bias_tiles.index(2 * stage + which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS)
    else:
        bias = bias_vector(rules, seq, row, BLOCK_M, PAIRS)
    if EDGE and rules.first is not None:
        middle2, length = intervals_of(interval_tiles, stage, BLOCK_N, SUB, PAIRS)
        hiding = Hiding(1, (2 * (row + rows)).to(gl.float32), middle2, length)
    s = warpgroup_mma_wait(1 if FIRST else 2, [s])
    s = ruled(s, bias, hiding, rules, seq, row + rows, start + cols, EDGE)
    p = gl.exp2(s * exponent_factor(rules) - divisor_rows[:, None])
    d_p = warpgroup_mma_wait(0 if FIRST else 1, [d_p])
    d_s = p * (d_p - delta_rows[:, None])
    if not FIRST:
        dq = warpgroup_mma_wait(0, [dq])
        mbarrier.arrive(free.index(before), count=1)
    return dq, rounded_pairs(d_s, k_tiles.dtype), turn + 1
