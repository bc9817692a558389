"""dK and dV on Hopper (sm_90) for head dims from 33 to 128, with the dBias that is made beside them: key_grad.py says what, this how.

The parts of a program run side by side: two or three consumers of 64 keys each, and a producer that copies tiles of queries, dO and bias to
shared memory ahead of them. While one consumer makes probabilities, the other multiplies: products that outlive a tile within one consumer
would all be serialised by ptxas here.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from .hopper import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    consumers_of,
    copy,
    of_pairs,
    padded_dim,
    serves,
    stage_of,
    tiled,
    tiled_mask,
)
from .hopper_key_tile import (
    BLOCK_M,
    BLOCK_N,
    allocate_terms,
    copy_terms,
    holds_lifts,
    ones_for_terms,
    open_queries,
    store_tile,
    tile,
    tiled_terms,
    uniform_bias_of,
)
from .hopper_lift import lift_room, ones_for_lifts, ones_in_registers, store_lifts
from .hopper_registers import lane_sums, store_rows, sums_of_lanes
from .key_sums import by_group, vectors_of
from .launch import launch
from .layout import Sequence, Span, slice_pointer, strided
from .overlap import follow
from .row_terms import Incoming
from .scores import rules_of
from .sequence import place_keys
from .walk import query_lists, query_range, query_step

STAGES = gl.constexpr(2)  # tiles of queries, dO and bias in shared memory


def takes(problem: Any, d_out: Tensor, d_bias: Tensor | None) -> bool:
    """Whether `key_gradients` takes a problem with these."""
    return problem.first is None and serves(problem, (64, 128), d_out, d_bias, problem.mask if of_pairs(problem.mask) else None)


def key_gradients(
    problem: Any,
    incoming: Incoming,
    d_key: Tensor | None,
    d_value: Tensor | None,
    key_sums: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """As in key_grad.py, for what it takes."""
    batch, heads, len_q, head_dim = problem.query.shape
    kv_heads, len_k, value_dim = problem.value.shape[1:]
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
        d_out=tiled(incoming.d_out, block_m, dim),
        d_bias=tiled(d_bias, block_m, block_n),
        rules=rules_of(problem, lists),
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
    k_tiles = gl.allocate_shared_memory(k.dtype, [CONSUMERS, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [CONSUMERS, 1, 1, BLOCK_N, DIM], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [STAGES, 1, 1, BLOCK_M, DIM], d_out.layout)
    terms_tiles = allocate_terms(terms, STAGES)
    bias_tiles = q_tiles
    mask_tiles = q_tiles
    d_bias_tiles = q_tiles
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    if mask is not None:
        mask_tiles = gl.allocate_shared_memory(mask.dtype, [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], mask.layout)
    if d_bias is not None:
        d_bias_tiles = gl.allocate_shared_memory(d_bias.dtype, [CONSUMERS, 1, 1, BLOCK_M, BLOCK_N], d_bias.layout)
    rooms_and_ones = ((q_tiles, q_tiles, q_tiles), q_tiles)  # as above, nobody's
    if rules.bias_by_key is not None:
        rooms_and_ones = ((lift_room(BLOCK_N), lift_room(BLOCK_N), lift_room(BLOCK_N)), ones_for_lifts(BLOCK_M))
    lowered = (q_tiles, q_tiles)
    if CONSUMERS == 3:  # two have registers for these ones
        lowered = ones_for_terms(terms, q_tiles)
    kv_full = barriers(1, 1)
    q_full = barriers(STAGES, 1)
    d_out_full = barriers(STAGES, 1)
    free = barriers(STAGES, CONSUMERS)
    fence_async_shared()
    mbarrier.expect(kv_full.index(0), CONSUMERS * k.block_type.nbytes + CONSUMERS * v.block_type.nbytes)
    for i in gl.static_range(CONSUMERS):
        copy(k, [batch, kv_head, col + i * BLOCK_N, 0], kv_full.index(0), k_tiles.index(i))
        copy(v, [batch, kv_head, col + i * BLOCK_N, 0], kv_full.index(0), v_tiles.index(i))
    tiles = (q_tiles, terms_tiles, bias_tiles, mask_tiles, d_out_tiles, d_bias_tiles)
    ready = (q_full, d_out_full, free)
    own = (k_tiles, v_tiles, kv_full, rooms_and_ones, lowered)
    results = (key_sums, d_bias)  # d_k and d_v inside it would be stored by two bytes
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (tiles, ready, own, rules, d_k, d_v, results, seq, groups, col, 0, HEAD_DIM, VALUE_DIM, EVEN_N, BY_GROUP)),
                (_consume, (tiles, ready, own, rules, d_k, d_v, results, seq, groups, col, 1, HEAD_DIM, VALUE_DIM, EVEN_N, BY_GROUP)),
                (_produce, (q, terms, bias, mask, d_out, tiles, ready, own, rules, seq, groups, col)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tiles, ready, own, rules, d_k, d_v, results, seq, groups, col, 0, HEAD_DIM, VALUE_DIM, EVEN_N, BY_GROUP)),
                (_consume, (tiles, ready, own, rules, d_k, d_v, results, seq, groups, col, 1, HEAD_DIM, VALUE_DIM, EVEN_N, BY_GROUP)),
                (_consume, (tiles, ready, own, rules, d_k, d_v, results, seq, groups, col, 2, HEAD_DIM, VALUE_DIM, EVEN_N, BY_GROUP)),
                (_produce, (q, terms, bias, mask, d_out, tiles, ready, own, rules, seq, groups, col)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )


@gluon.jit
def _produce(q, terms, bias, mask, d_out, tiles, ready, own, rules, seq, groups, col):
    """Copy tiles of queries, bias, mask and dO to shared memory, as far ahead as there are free stages."""
    q_tiles, terms_tiles, bias_tiles, mask_tiles, d_out_tiles, _ = tiles
    q_full, d_out_full, free = ready
    k_tiles, _, _, _, _ = own
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
            mbarrier.expect(q_full.index(stage), q.block_type.nbytes + terms.block_type.nbytes + BIAS_BYTES)
            copy(q, [seq.batch, head, start, 0], q_full.index(stage), q_tiles.index(stage))
            copy_terms(terms, seq.batch, head, start, q_full.index(stage), terms_tiles.index(stage))
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
    tiles, ready, own, rules, d_k, d_v, results, seq, groups, col,
    which: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, EVEN_N: gl.constexpr, BY_GROUP: gl.constexpr,
):  # fmt: skip
    """The gradients of BLOCK_N of the program's keys, in place `which`."""
    k_tiles, v_tiles, kv_full, rooms_and_ones, lowered = own
    CONSUMERS: gl.constexpr = k_tiles.shape[0]
    DIM: gl.constexpr = k_tiles.shape[4]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # keys down
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    _, _, _, _, _, d_bias_tiles = tiles
    key_sums, d_bias = results
    owner = Span(col, 0, None)
    col += which * BLOCK_N
    k_tile = k_tiles.index(which).reshape([BLOCK_N, DIM])
    v_tile = v_tiles.index(which).reshape([BLOCK_N, DIM])
    dk = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
    dv = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
    rooms, ones = rooms_and_ones
    lifts = rooms[which]
    if CONSUMERS == 2 and holds_lifts(tiles[1].dtype):
        OWN: gl.constexpr = gl.DotOperandLayout(0, PAIRS, 2)
        lowered = (ones_in_registers(BLOCK_N, 0, OWN), ones_in_registers(BLOCK_N, 3, OWN))
    fixed = (k_tile, v_tile, (lifts, ones, lowered), tiles, ready, rules, (d_k, d_v, key_sums, d_bias))
    mbarrier.wait(kv_full.index(0), 0)
    sums = lane_sums(gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS))
    step = 0
    for head in range(seq.head, seq.head + groups):
        this = Sequence(seq.batch, head, seq.len_q, seq.len_k)
        if not BY_GROUP:
            sums = lane_sums(gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS))
        per_key = (uniform_bias_of(rules, this), 0, 0)
        if rules.bias_by_key is not None:
            store_lifts(lifts, rules, this, col)
        begin, end, full_end = query_range(rules, this, owner, BLOCK_M, CONSUMERS * BLOCK_N)
        if rules.lists is None:
            open_begin, open_end = open_queries(rules, this, col, begin, end)
            if rules.right is not None or not EVEN_N:
                for start in range(begin, open_begin, BLOCK_M):
                    dk, dv, sums = _add(fixed, this, per_key, dk, dv, sums, step, start, col, which, CONSUMERS, PAIRS, FACTOR, DIM, True)
                    step += 1
            for start in range(open_begin, open_end, BLOCK_M):
                dk, dv, sums = _add(fixed, this, per_key, dk, dv, sums, step, start, col, which, CONSUMERS, PAIRS, FACTOR, DIM, False)
                step += 1
            if rules.left is not None:
                for start in range(open_end, end, BLOCK_M):
                    dk, dv, sums = _add(fixed, this, per_key, dk, dv, sums, step, start, col, which, CONSUMERS, PAIRS, FACTOR, DIM, True)
                    step += 1
        else:
            for position in range(begin, end, BLOCK_M):
                start = query_step(rules, this, owner, position, end, full_end, BLOCK_M, CONSUMERS * BLOCK_N)
                dk, dv, sums = _add(fixed, this, per_key, dk, dv, sums, step, start, col, which, CONSUMERS, PAIRS, FACTOR, DIM, True)
                step += 1
            for position in range(end, full_end, BLOCK_M):
                start = query_step(rules, this, owner, position, end, full_end, BLOCK_M, CONSUMERS * BLOCK_N)
                dk, dv, sums = _add(fixed, this, per_key, dk, dv, sums, step, start, col, which, CONSUMERS, PAIRS, FACTOR, DIM, False)
                step += 1
        if d_bias is not None and rules.lists is None:
            zeros = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS)
            for start in range(0, begin, BLOCK_M):
                store_tile(d_bias, d_bias_tiles.index(which), zeros, this, start, col)
            for start in range(begin + gl.cdiv(end - begin, BLOCK_M) * BLOCK_M, seq.len_q, BLOCK_M):
                store_tile(d_bias, d_bias_tiles.index(which), zeros, this, start, col)
        if key_sums is not None and not BY_GROUP:
            _store_sums(key_sums, this, col, sums_of_lanes(sums, PAIRS), PAIRS)
    if key_sums is not None and BY_GROUP:
        _store_sums(key_sums, seq, col, sums_of_lanes(sums, PAIRS), PAIRS)
    if d_bias is not None:
        tma.store_wait(0)
    if d_k is not None:
        store_rows(d_k, seq, col, seq.len_k, dk * rules.scale, HEAD_DIM)
    if d_v is not None:
        store_rows(d_v, seq, col, seq.len_k, dv, VALUE_DIM)


@gluon.jit
def _store_sums(key_sums, seq, col, sums, PAIRS: gl.constexpr):
    """The sums over the queries for a block of keys."""
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(1, PAIRS))
    gl.store(slice_pointer(key_sums, seq) + cols.to(gl.int64) * key_sums.row, sums.to(key_sums.ptr.dtype.element_ty), mask=cols < seq.len_k)


@gluon.jit
def _add(
    fixed, seq, per_key, dk, dv, sums, step, start, col, which: gl.constexpr, CONSUMERS: gl.constexpr,
    PAIRS: gl.constexpr, FACTOR: gl.constexpr, DIM: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """The tile of a step added to (dk, dv, sums); the consumers' tiles of bias and mask stand side by side, and so do those of dBias."""
    place = (step % STAGES * CONSUMERS + which, which)
    return tile(fixed, seq, per_key, dk, dv, sums, stage_of(step, STAGES), place, start, col, PAIRS, FACTOR, DIM, EDGE)
