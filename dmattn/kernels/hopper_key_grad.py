"""dK and dV on Hopper (sm_90) for head dims from 33 to 128, with the dBias that is made beside them: key_grad.py says what, this how.

The parts of a program run side by side: two or three consumers of 64 keys each, and a producer that copies tiles of queries, dO and bias to
shared memory ahead of them. Scores stand with keys down, so that the sums over queries take them for their left factor from registers. While
one consumer makes probabilities, the other multiplies: products that outlive a tile within one consumer would all be serialised by ptxas.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    consumers_of,
    copy,
    exponent_factor,
    load_vector,
    mask_of,
    of_pairs,
    padded_dim,
    ruled,
    serves,
    stage_of,
    store,
    tiled,
    tiled_mask,
    tiled_vectors,
)
from .layout import Sequence, Span, load_rows, slice_pointer, strided
from .replay import launch
from .scores import LOG2E, rules_of
from .sequence import next_step, place, place_keys
from .softmax import divisor2
from .walk import query_lists, query_range, query_step

BLOCK_M = gl.constexpr(64)  # queries of a tile
BLOCK_N = gl.constexpr(64)  # keys of a consumer
STAGES = gl.constexpr(2)  # tiles of queries, dO and bias in shared memory


def takes(problem: Any, d_out: Tensor, d_bias: Tensor | None) -> bool:
    """Whether `key_gradients` takes a problem with these."""
    return problem.first is None and serves(problem, (64, 128), d_out, d_bias, problem.mask if of_pairs(problem.mask) else None)


def key_gradients(
    problem: Any,
    incoming: tuple[Tensor, Tensor, Tensor],
    d_key: Tensor | None,
    d_value: Tensor | None,
    key_sums: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """As in key_grad.py, for what it takes."""
    batch, heads, len_q, head_dim = problem.query.shape
    kv_heads, len_k, value_dim = problem.value.shape[1:]
    d_out, lse, delta = incoming
    block_m, block_n, dim = BLOCK_M.value, BLOCK_N.value, padded_dim(problem)
    open_walk = problem.mask is None and problem.left is None and problem.right is None
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
        bias=tiled(problem.bias if of_pairs(problem.bias) else None, block_m, block_n),
        mask=tiled_mask(problem.mask, block_m, block_n) if of_pairs(problem.mask) else None,
        d_out=tiled(d_out, block_m, dim),
        d_bias=tiled(d_bias, block_m, block_n),
        rules=rules_of(problem, lists),
        packed=packed_rows(lse, delta),
        d_k=strided(d_key, heads),
        d_v=strided(d_value, heads),
        key_sums=strided(None if key_sums is None else key_sums[:, :, 0], heads),
        heads=heads,
        groups=heads // kv_heads,
        len_q=len_q,
        len_k=len_k,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        DIM=dim,
        CONSUMERS=consumers,
        EVEN_N=len_k % (consumers * block_n) == 0,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[consumers],
    )


def packed_rows(lse: Tensor, delta: Tensor) -> TensorDescriptor:
    """For each block of queries what scores are lessened by (`divisor2`), then delta, as the copy engine takes them."""
    batch, heads, len_q = lse.shape
    blocks = triton.cdiv(len_q, BLOCK_M.value)
    packed = lse.new_empty((batch, heads, blocks, 2 * BLOCK_M.value))
    launch(
        _packed_rows_kernel,
        blocks * heads * batch,
        lse=strided(lse, heads),
        delta=strided(delta, heads),
        packed=strided(packed, heads),
        heads=heads,
        len_q=len_q,
        BLOCK_M=BLOCK_M.value,
        num_warps=1,
    )
    return tiled_vectors(packed)


@triton.jit
def _packed_rows_kernel(lse, delta, packed, heads, len_q, BLOCK_M: tl.constexpr):
    """One program: one block of queries of one (batch, head). A query past the end has no probabilities."""
    block, head, batch = place(len_q, heads, BLOCK_M)
    seq = Sequence(batch, head, len_q, 0)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M), len_q)
    pointers = slice_pointer(packed, seq) + tl.cast(block, tl.int64) * packed.row + tl.arange(0, BLOCK_M)
    tl.store(pointers, divisor2(load_rows(lse, seq, rows, float("-inf"))))
    tl.store(pointers + BLOCK_M, load_rows(delta, seq, rows, 0.0))


@gluon.jit
def _key_gradients_kernel(
    q, k, v, bias, mask, d_out, d_bias, rules, packed, d_k, d_v, key_sums, heads, groups, len_q, len_k,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, DIM: gl.constexpr, CONSUMERS: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """One program: CONSUMERS times BLOCK_N keys of one (batch, key-value head), from a grid of one axis. Walks the group's heads and queries.

    q, k, v, d_out, bias and mask (of pairs), d_bias and packed (`packed_rows`) are tensor descriptors; any other bias or mask is read from
    rules.
    """
    block, kv_head, batch = place_keys(rules, len_k, heads // groups, CONSUMERS * BLOCK_N)
    seq = Sequence(batch, kv_head * groups, len_q, len_k)
    col = block * (CONSUMERS * BLOCK_N)
    k_tiles = gl.allocate_shared_memory(k.dtype, [CONSUMERS, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [CONSUMERS, 1, 1, BLOCK_N, DIM], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [STAGES, 1, 1, BLOCK_M, DIM], d_out.layout)
    packed_tiles = gl.allocate_shared_memory(packed.dtype, [STAGES, 1, 1, 1, 2 * BLOCK_M], packed.layout)
    bias_tiles = q_tiles
    mask_tiles = q_tiles
    d_bias_tiles = q_tiles
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    if mask is not None:
        mask_tiles = gl.allocate_shared_memory(mask.dtype, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], mask.layout)
    if d_bias is not None:
        d_bias_tiles = gl.allocate_shared_memory(d_bias.dtype, [CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], d_bias.layout)
    kv_full = barriers(1, 1)
    q_full = barriers(STAGES, 1)
    d_out_full = barriers(STAGES, 1)
    free = barriers(STAGES, CONSUMERS)
    fence_async_shared()
    mbarrier.expect(kv_full.index(0), CONSUMERS * k.block_type.nbytes + CONSUMERS * v.block_type.nbytes)
    for i in gl.static_range(CONSUMERS):
        copy(k, [batch, kv_head, col + i * BLOCK_N, 0], kv_full.index(0), k_tiles.index(i))
        copy(v, [batch, kv_head, col + i * BLOCK_N, 0], kv_full.index(0), v_tiles.index(i))
    tiles = (q_tiles, packed_tiles, bias_tiles, mask_tiles, d_out_tiles, d_bias_tiles)
    ready = (q_full, d_out_full, free)
    own = (k_tiles, v_tiles, kv_full)
    results = (d_k, d_v, key_sums, d_bias)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (tiles, ready, own, rules, results, seq, groups, col, 0, HEAD_DIM, VALUE_DIM, EVEN_N)),
                (_consume, (tiles, ready, own, rules, results, seq, groups, col, 1, HEAD_DIM, VALUE_DIM, EVEN_N)),
                (_produce, (q, packed, bias, mask, d_out, tiles, ready, own, rules, seq, groups, col)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tiles, ready, own, rules, results, seq, groups, col, 0, HEAD_DIM, VALUE_DIM, EVEN_N)),
                (_consume, (tiles, ready, own, rules, results, seq, groups, col, 1, HEAD_DIM, VALUE_DIM, EVEN_N)),
                (_consume, (tiles, ready, own, rules, results, seq, groups, col, 2, HEAD_DIM, VALUE_DIM, EVEN_N)),
                (_produce, (q, packed, bias, mask, d_out, tiles, ready, own, rules, seq, groups, col)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )


@gluon.jit
def _produce(q, packed, bias, mask, d_out, tiles, ready, own, rules, seq, groups, col):
    """Copy tiles of queries, bias, mask and dO to shared memory, as far ahead as there are free stages."""
    q_tiles, packed_tiles, bias_tiles, mask_tiles, d_out_tiles, _ = tiles
    q_full, d_out_full, free = ready
    k_tiles, _, _ = own
    CONSUMERS: gl.constexpr = k_tiles.shape[0]
    BIAS_BYTES: gl.constexpr = 0 if bias is None else CONSUMERS * bias.block_type.nbytes
    step = 0
    for head in range(seq.head, seq.head + groups):
        this = Sequence(seq.batch, head, seq.len_q, seq.len_k)
        begin, end, full_end = query_range(rules, this, Span(col, 0, None), BLOCK_M, CONSUMERS * BLOCK_N)
        for position in range(begin, full_end, BLOCK_M):
            start = query_step(rules, this, Span(col, 0, None), position, end, full_end, BLOCK_M, CONSUMERS * BLOCK_N)
            stage, phase = stage_of(step, STAGES)
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), q.block_type.nbytes + packed.block_type.nbytes + BIAS_BYTES)
            copy(q, [seq.batch, head, start, 0], q_full.index(stage), q_tiles.index(stage))
            copy(packed, [seq.batch, head, start // BLOCK_M, 0], q_full.index(stage), packed_tiles.index(stage))
            if bias is not None:
                entry = gl.where(rules.bias.batch == 0, 0, seq.batch)
                bias_head = head // rules.bias.group
                for i in gl.static_range(CONSUMERS):
                    copy(bias, [entry, bias_head, start, col + i * BLOCK_N], q_full.index(stage), bias_tiles.index(CONSUMERS * stage + i))
            if mask is None:
                mbarrier.expect(d_out_full.index(stage), d_out.block_type.nbytes)
            elif position < end:
                mbarrier.expect(d_out_full.index(stage), d_out.block_type.nbytes + CONSUMERS * mask.block_type.nbytes)
                entry = gl.where(rules.mask.batch == 0, 0, seq.batch)
                mask_head = head // rules.mask.group
                for i in gl.static_range(CONSUMERS):
                    copy(mask, [entry, mask_head, start, col + i * BLOCK_N], d_out_full.index(stage), mask_tiles.index(CONSUMERS * stage + i))
            else:
                mbarrier.expect(d_out_full.index(stage), d_out.block_type.nbytes)
            copy(d_out, [seq.batch, head, start, 0], d_out_full.index(stage), d_out_tiles.index(stage))
            step += 1


@gluon.jit
def _consume(
    tiles, ready, own, rules, results, seq, groups, col,
    which: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """The gradients of BLOCK_N of the program's keys, in place `which`."""
    k_tiles, v_tiles, kv_full = own
    CONSUMERS: gl.constexpr = k_tiles.shape[0]
    DIM: gl.constexpr = k_tiles.shape[4]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # keys down
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    _, _, _, _, _, d_bias_tiles = tiles
    d_k, d_v, key_sums, d_bias = results
    owner = Span(col, 0, None)
    col += which * BLOCK_N
    k_tile = k_tiles.index(which).reshape([BLOCK_N, DIM])
    v_tile = v_tiles.index(which).reshape([BLOCK_N, DIM])
    dk = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
    dv = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
    fixed = (k_tile, v_tile, tiles, ready, rules, results)
    mbarrier.wait(kv_full.index(0), 0)
    step = 0
    for head in range(seq.head, seq.head + groups):
        this = Sequence(seq.batch, head, seq.len_q, seq.len_k)
        sums = gl.full([BLOCK_N], 0.0, gl.float32, gl.SliceLayout(1, PAIRS))
        per_key = (bias_by_key(rules, this, col, PAIRS), 0, 0)
        begin, end, full_end = query_range(rules, this, owner, BLOCK_M, CONSUMERS * BLOCK_N)
        if rules.lists is None:
            open_begin, open_end = open_queries(rules, this, col, begin, end)
            if rules.right is not None or not EVEN_N:
                for start in range(begin, open_begin, BLOCK_M):
                    dk, dv, sums = tile(
                        fixed, this, per_key, dk, dv, sums, stage_of(step, STAGES), _place(step, which, CONSUMERS),
                        start, col, PAIRS, FACTOR, DIM, True,
                    )  # fmt: skip
                    step += 1
            for start in range(open_begin, open_end, BLOCK_M):
                dk, dv, sums = tile(
                    fixed, this, per_key, dk, dv, sums, stage_of(step, STAGES), _place(step, which, CONSUMERS),
                    start, col, PAIRS, FACTOR, DIM, False,
                )  # fmt: skip
                step += 1
            if rules.left is not None:
                for start in range(open_end, end, BLOCK_M):
                    dk, dv, sums = tile(
                        fixed, this, per_key, dk, dv, sums, stage_of(step, STAGES), _place(step, which, CONSUMERS),
                        start, col, PAIRS, FACTOR, DIM, True,
                    )  # fmt: skip
                    step += 1
        else:
            for position in range(begin, end, BLOCK_M):
                start = query_step(rules, this, owner, position, end, full_end, BLOCK_M, CONSUMERS * BLOCK_N)
                dk, dv, sums = tile(
                    fixed, this, per_key, dk, dv, sums, stage_of(step, STAGES), _place(step, which, CONSUMERS),
                    start, col, PAIRS, FACTOR, DIM, True,
                )  # fmt: skip
                step += 1
            for position in range(end, full_end, BLOCK_M):
                start = query_step(rules, this, owner, position, end, full_end, BLOCK_M, CONSUMERS * BLOCK_N)
                dk, dv, sums = tile(
                    fixed, this, per_key, dk, dv, sums, stage_of(step, STAGES), _place(step, which, CONSUMERS),
                    start, col, PAIRS, FACTOR, DIM, False,
                )  # fmt: skip
                step += 1
        if d_bias is not None and rules.lists is None:
            zeros = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS)
            for start in range(0, begin, BLOCK_M):
                store_tile(d_bias, d_bias_tiles.index(which), zeros, this, start, col)
            for start in range(begin + gl.cdiv(end - begin, BLOCK_M) * BLOCK_M, seq.len_q, BLOCK_M):
                store_tile(d_bias, d_bias_tiles.index(which), zeros, this, start, col)
        if key_sums is not None:
            cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))
            gl.store(slice_pointer(key_sums, this) + cols.to(gl.int64) * key_sums.row, sums, mask=cols < seq.len_k)
    if d_bias is not None:
        tma.store_wait(0)
    if d_k is not None:
        store_rows(d_k, seq, col, dk * rules.scale, HEAD_DIM, DIM, SUMS)
    if d_v is not None:
        store_rows(d_v, seq, col, dv, VALUE_DIM, DIM, SUMS)


@gluon.jit
def _place(step, which: gl.constexpr, CONSUMERS: gl.constexpr):
    """Where a consumer's tiles of bias and mask are at a step, and where its tile of dBias."""
    return step % STAGES * CONSUMERS + which, which


@gluon.jit
def tile(
    fixed, seq, per_key, dk, dv, sums, turn, place, start, col,
    PAIRS: gl.constexpr, FACTOR: gl.constexpr, DIM: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """One tile of queries added to (dk, dv, sums).

    `turn` is (its stage, the parity of how often that was used), `place` where among the tiles of bias and mask, and of dBias, the consumer's
    are; `per_key` is what the keys have that does not depend on the query: their bias, and of their intervals twice the middle and the length.
    """
    key_bias, middle2, length = per_key
    k_tile, v_tile, tiles, ready, rules, results = fixed
    q_tiles, packed_tiles, bias_tiles, mask_tiles, d_out_tiles, d_bias_tiles = tiles
    q_full, d_out_full, free = ready
    d_k, d_v, key_sums, d_bias = results
    stage, phase = turn
    of_tile, of_consumer = place
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, PAIRS))[None, :]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))[:, None]
    kept = 1
    if EDGE and (rules.mask_rows is None or rules.mask_cols is None):
        kept = mask_of(rules, seq, rows, cols, start, col)
    mbarrier.wait(q_full.index(stage), phase)
    q_tile = q_tiles.index(stage).reshape([BLOCK_M, DIM])
    zero = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(d_out_full.index(stage), phase)
    d_out_tile = d_out_tiles.index(stage).reshape([BLOCK_M, DIM])
    d_p = warpgroup_mma(v_tile, d_out_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if EDGE and rules.mask_rows is not None and rules.mask_cols is not None:
        kept = mask_tiles.index(of_tile).reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(PAIRS)
    bias = _bias_of(key_bias, bias_tiles.index(of_tile), rules, seq, start, PAIRS)
    row_vectors = packed_tiles._reinterpret(gl.float32, [2 * packed_tiles.shape[0], BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    divisor_rows = row_vectors.index(2 * stage).load(gl.SliceLayout(0, PAIRS))
    s = warpgroup_mma_wait(1, [s])
    s = ruled(s, bias, (kept, middle2, length), rules, seq, start + rows, col + cols, EDGE)
    p = gl.exp2(s * exponent_factor(rules) - divisor_rows[None, :])
    if d_v is not None:
        dv = warpgroup_mma(gl.convert_layout(p.to(q_tiles.dtype), FACTOR), d_out_tile, dv, is_async=True)
    delta_rows = row_vectors.index(2 * stage + 1).load(gl.SliceLayout(0, PAIRS))
    d_p = warpgroup_mma_wait(0 if d_v is None else 1, [d_p])
    ds = p * (d_p - delta_rows[None, :])
    if d_k is not None:
        dk = warpgroup_mma(gl.convert_layout(ds.to(q_tiles.dtype), FACTOR), q_tile, dk, is_async=True)
    if key_sums is not None:
        sums += gl.sum(ds, 1)
    if d_bias is not None:
        store_tile(d_bias, d_bias_tiles.index(of_consumer), ds, seq, start, col)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(free.index(stage), count=1)
    return dk, dv, sums


@gluon.jit
def open_queries(rules, seq, col, begin, end):
    """[begin, end) of the tiles of which no pair is hidden, in steps of BLOCK_M from the given begin."""
    offset = seq.len_k - seq.len_q
    last = next_step(begin, end, BLOCK_M)
    open_begin = begin
    if rules.right is not None:
        open_begin = next_step(begin, col + BLOCK_N - 1 - offset - rules.right, BLOCK_M)
    open_begin = gl.where(col + BLOCK_N > seq.len_k, last, gl.minimum(open_begin, last))
    open_end = last
    if rules.left is not None:
        open_end = next_step(begin, col + rules.left - offset - BLOCK_M + 2, BLOCK_M)
    return open_begin, gl.minimum(gl.maximum(open_end, open_begin), last)


@gluon.jit
def store_tile(d_bias, buffer, ds, seq, start, col):
    """dS of a tile, keys down, to its place in dBias, by way of shared memory."""
    tma.store_wait(0)  # the copy engine has read what the buffer held
    buffer.reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).store(ds.to(d_bias.dtype))
    fence_async_shared()
    store(d_bias, [seq.batch, seq.head, start, col], buffer)


@gluon.jit
def store_rows(t, seq, col, x, WIDTH: gl.constexpr, DIM: gl.constexpr, SUMS: gl.constexpr):
    """A row per key of one sequence, inside the bounds."""
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    pointers = slice_pointer(t, seq) + (cols.to(gl.int64) * t.row)[:, None] + (dims * t.col)[None, :]
    gl.store(pointers, x.to(t.ptr.dtype.element_ty), mask=(cols < seq.len_k)[:, None] & (dims < WIDTH)[None, :])


@gluon.jit
def bias_by_key(rules, seq, col, PAIRS: gl.constexpr):
    """The bias of a block of keys times LOG2E, [BLOCK_N, 1], where it does not depend on the query; else 0."""
    if rules.bias is None or rules.bias_rows is not None:
        return 0.0
    elif rules.bias_cols is None:
        return gl.load(slice_pointer(rules.bias, seq)).to(gl.float32) * LOG2E
    else:
        bias = load_vector(rules.bias, rules.bias.col, seq, col, seq.len_k, 0.0, BLOCK_N, gl.SliceLayout(1, PAIRS), False)[:, None]
        return bias.to(gl.float32) * LOG2E


@gluon.jit
def _bias_of(key_bias, bias_tile, rules, seq, start, PAIRS: gl.constexpr):
    """The bias of one tile, keys down, as `ruled` takes it: [BLOCK_N, BLOCK_M], or 1 where it is broadcast."""
    if rules.bias is None or rules.bias_rows is None:
        return key_bias
    elif rules.bias_cols is not None:
        return bias_tile.reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(PAIRS)
    else:
        bias = load_vector(rules.bias, rules.bias.row, seq, start, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(0, PAIRS), False)[None, :]
        return bias.to(gl.float32) * LOG2E
