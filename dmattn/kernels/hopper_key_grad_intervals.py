"""dK and dV on Hopper (sm_90) where each key has an interval of queries, in Gluon: as in hopper_key_grad.py, but for how work is divided.

The longest-lived keys have many times the queries of others, and one program that walks them all would outlast the rest. So a program has one
block of keys, of which its two consumers take the tiles of queries in turn, and at the end the second gives its sums to the first. Blocks of
one consumer's size also hold fewer pairs that no interval contains.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .hopper import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    copy,
    of_pairs,
    padded_dim,
    serves,
    stage_of,
    tiled,
)
from .hopper_key_tile import BLOCK_M, BLOCK_N, allocate_terms, copy_terms, ones_for_terms, open_queries, tile, tiled_terms, uniform_bias_of
from .hopper_lift import lift_room, ones_for_lifts, store_lifts
from .hopper_registers import interval_of, lane_sums, places_of, store_rows, sums_of_lanes
from .intervals import block_bounds
from .key_sums import by_group, vectors_of
from .launch import launch
from .layout import Sequence, Span, Strided, slice_pointer, strided
from .overlap import follow
from .row_terms import Incoming
from .scores import rules_of
from .sequence import next_step, place_keys, query_window

STAGES = gl.constexpr(4)  # tiles of queries, dO and bias in shared memory: half of them each consumer's


def takes(problem: Any, d_out: Tensor, d_bias: Tensor | None) -> bool:
    """Whether `key_gradients` takes a problem with these."""
    return problem.first is not None and serves(problem, (64, 128), d_out, d_bias)


def key_gradients(
    problem: Any,
    incoming: Incoming,
    d_key: Tensor | None,
    d_value: Tensor | None,
    key_sums: Tensor | None,
    d_bias: Tensor | None,
    order: Tensor | None,
) -> None:
    """As in key_grad.py, for what it takes."""
    batch, heads, len_q, head_dim = problem.query.shape
    kv_heads, len_k, value_dim = problem.value.shape[1:]
    block_m, block_n, dim = BLOCK_M.value, BLOCK_N.value, padded_dim(problem)
    if d_bias is not None:
        d_bias.zero_()  # what lies outside the intervals
    alike = all(x is None or x.shape[1] <= kv_heads for x in (problem.first, problem.last, problem.bias))
    launch(
        _key_gradients_kernel,
        triton.cdiv(len_k, block_n) * kv_heads * batch,
        q=tiled(problem.query, block_m, dim),
        k=tiled(problem.key, block_n, dim),
        v=tiled(problem.value, block_n, dim),
        bias=tiled(problem.bias if of_pairs(problem.bias) else None, block_m, block_n),
        d_out=tiled(incoming.d_out, block_m, dim),
        d_bias=tiled(d_bias, block_m, block_n),
        rules=rules_of(problem),
        bounds=strided(block_bounds(problem, block_n), heads),
        terms=tiled_terms(incoming),
        d_k=strided(d_key, heads),
        d_v=strided(d_value, heads),
        key_sums=strided(vectors_of(key_sums), heads),
        order=strided(order, heads),
        heads=heads,
        groups=heads // kv_heads,
        len_q=len_q,
        len_k=len_k,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        DIM=dim,
        ALIKE=alike,
        BY_GROUP=by_group(problem, key_sums),
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[2],
    )


@gluon.jit
def _key_gradients_kernel(
    q, k, v, bias, d_out, d_bias, rules, bounds, terms, d_k, d_v, key_sums, order, heads, groups, len_q, len_k,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, DIM: gl.constexpr, ALIKE: gl.constexpr, BY_GROUP: gl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one (batch, key-value head), from a grid of one axis. Walks the group's heads and their queries.

    q, k, v, d_out, bias (of pairs), d_bias and terms (`tiled_terms`) are tensor descriptors; any other bias is read from rules. What is
    stored for each key is stored where `order` says, if there is one. ALIKE: the heads of a group have the same intervals and bias of keys.
    """
    follow()
    block, kv_head, batch = place_keys(rules, len_k, heads // groups, BLOCK_N)
    col = block * BLOCK_N
    seq = Sequence(batch, kv_head * groups, len_q, len_k)
    if d_k is not None:
        d_k = _slice(d_k, seq)
    if d_v is not None:
        d_v = _slice(d_v, seq)
    if order is not None:
        order = _slice(order, seq)
    k_tile = gl.allocate_shared_memory(k.dtype, [1, 1, BLOCK_N, DIM], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [1, 1, BLOCK_N, DIM], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [STAGES, 1, 1, BLOCK_M, DIM], d_out.layout)
    terms_tiles = allocate_terms(terms, STAGES)
    bias_tiles = q_tiles
    d_bias_tiles = q_tiles
    if bias is not None:
        bias_tiles = gl.allocate_shared_memory(bias.dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_N], bias.layout)
    if d_bias is not None:
        d_bias_tiles = gl.allocate_shared_memory(d_bias.dtype, [2, 1, 1, BLOCK_M, BLOCK_N], d_bias.layout)
    if _is_dead(rules, bounds, seq, groups, col):
        _store_zeros((d_k, d_v, key_sums), order, seq, groups, col, HEAD_DIM, VALUE_DIM, DIM, BY_GROUP)
    else:
        kv_full = barriers(1, 1)
        q_full = barriers(STAGES, 1)
        d_out_full = barriers(STAGES, 1)
        free = barriers(STAGES, 1)
        given = barriers(2, 1)
        sums_given = barriers(2, 1)
        rooms_and_ones = ((q_tiles, q_tiles), q_tiles)  # as above, nobody's
        if rules.bias_by_key is not None:
            rooms_and_ones = ((lift_room(BLOCK_N), lift_room(BLOCK_N)), ones_for_lifts(BLOCK_M))
        lowered = ones_for_terms(terms, q_tiles)
        given_sums = gl.allocate_shared_memory(gl.float32, [BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        fence_async_shared()
        mbarrier.expect(kv_full.index(0), k.block_type.nbytes + v.block_type.nbytes)
        copy(k, [batch, kv_head, col, 0], kv_full.index(0), k_tile)
        copy(v, [batch, kv_head, col, 0], kv_full.index(0), v_tile)
        tiles = (q_tiles, terms_tiles, bias_tiles, q_tiles, d_out_tiles, d_bias_tiles)
        ready = (q_full, d_out_full, free)
        own = (k_tile, v_tile, kv_full, rooms_and_ones, lowered, given, given_sums, sums_given)
        results = (d_k, d_v, key_sums, d_bias, order)
        gl.warp_specialize(
            [
                (_consume, (tiles, ready, own, rules, bounds, results, seq, groups, col, 0, HEAD_DIM, VALUE_DIM, DIM, ALIKE, BY_GROUP)),
                (_consume, (tiles, ready, own, rules, bounds, results, seq, groups, col, 1, HEAD_DIM, VALUE_DIM, DIM, ALIKE, BY_GROUP)),
                (_produce, (q, terms, bias, d_out, tiles, ready, rules, bounds, seq, groups, col)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def _slice(t, seq):
    """The slice of one sequence as a tensor that has no other: an address for consumers to keep, where they would keep strides too."""
    return Strided(slice_pointer(t, seq), 0, 0, t.row, t.col, 1)


@gluon.jit
def _is_dead(rules, bounds, seq, groups, col):
    """Whether no query of any head attends a block of keys."""
    live = False
    for head in range(seq.head, seq.head + groups):
        begin, end, _last_to_begin, _first_to_end = _range(rules, bounds, Sequence(seq.batch, head, seq.len_q, seq.len_k), col)
        live = live | (begin < end)
    return not live


@gluon.jit
def _store_zeros(results, order, seq, groups, col, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, DIM: gl.constexpr, BY_GROUP: gl.constexpr):
    """The gradients of a block of keys that no query attends."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    d_k, d_v, key_sums = results
    zeros = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
    if d_k is not None:
        store_rows(d_k, seq, col, seq.len_k, zeros, HEAD_DIM, order)
    if d_v is not None:
        store_rows(d_v, seq, col, seq.len_k, zeros, VALUE_DIM, order)
    if key_sums is not None:
        no_sums = gl.full([BLOCK_N], 0.0, gl.float32, gl.SliceLayout(1, SUMS))
        for head in range(seq.head, seq.head + (1 if BY_GROUP else groups)):
            _store_sums(key_sums, order, Sequence(seq.batch, head, seq.len_q, seq.len_k), col, no_sums, SUMS)


@gluon.jit
def _store_sums(key_sums, order, seq, col, sums, LAYOUT: gl.constexpr):
    """The sums over the queries for a block of keys."""
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    places = cols.to(gl.int64)
    if order is not None:
        places = places_of(order, seq, cols, seq.len_k)
    gl.store(slice_pointer(key_sums, seq) + places * key_sums.row, sums.to(key_sums.ptr.dtype.element_ty), mask=cols < seq.len_k)


@gluon.jit
def _store_both_sums(key_sums, order, seq, col, sums, own, turn, which: gl.constexpr, LAYOUT: gl.constexpr):
    """The same of what each consumer has summed: the second gives its sums to the first, the `turn`-th time."""
    _, _, _, _, _, _, given_sums, sums_given = own
    if which == 0:
        mbarrier.wait(sums_given.index(1), turn & 1)
        sums += given_sums.load(gl.SliceLayout(1, LAYOUT))
        mbarrier.arrive(sums_given.index(0), count=1)
        _store_sums(key_sums, order, seq, col, sums, LAYOUT)
    else:
        mbarrier.wait(sums_given.index(0), (turn & 1) ^ 1)
        given_sums.store(sums)
        mbarrier.arrive(sums_given.index(1), count=1)


@gluon.jit
def _produce(q, terms, bias, d_out, tiles, ready, rules, bounds, seq, groups, col):
    """Copy tiles of queries, bias and dO to shared memory, as far ahead as there are free stages."""
    q_tiles, terms_tiles, bias_tiles, _, d_out_tiles, _ = tiles
    BIAS_BYTES: gl.constexpr = 0 if bias is None else bias.block_type.nbytes
    q_full, d_out_full, free = ready
    step = 0
    for head in range(seq.head, seq.head + groups):
        begin, end, _to_begin, _to_end = _range(rules, bounds, Sequence(seq.batch, head, seq.len_q, seq.len_k), col)
        for start in range(begin, end, BLOCK_M):
            stage, phase = stage_of(step, STAGES)
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), q.block_type.nbytes + terms.block_type.nbytes + BIAS_BYTES)
            copy(q, [seq.batch, head, start, 0], q_full.index(stage), q_tiles.index(stage))
            copy_terms(terms, seq.batch, head, start, q_full.index(stage), terms_tiles.index(stage))
            if bias is not None:
                entry = gl.where(rules.bias.batch == 0, 0, seq.batch)
                copy(bias, [entry, head // rules.bias.group, start, col], q_full.index(stage), bias_tiles.index(stage))
            mbarrier.expect(d_out_full.index(stage), d_out.block_type.nbytes)
            copy(d_out, [seq.batch, head, start, 0], d_out_full.index(stage), d_out_tiles.index(stage))
            step += 1


@gluon.jit
def _consume(
    tiles, ready, own, rules, bounds, results, seq, groups, col,
    which: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, DIM: gl.constexpr, ALIKE: gl.constexpr, BY_GROUP: gl.constexpr,
):  # fmt: skip
    """What every second tile of queries gives to the gradients of the program's keys, and from the first consumer, the gradients."""
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # keys down
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    k_tile, v_tile, kv_full, rooms_and_ones, lowered, given, _, _ = own
    d_k, d_v, key_sums, d_bias, order = results
    dk = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
    dv = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
    rooms, ones = rooms_and_ones
    lifts = rooms[which]
    lifting = (lifts, ones, lowered)
    fixed = (k_tile.reshape([BLOCK_N, DIM]), v_tile.reshape([BLOCK_N, DIM]), lifting, tiles, ready, rules, (d_k, d_v, key_sums, d_bias))
    of_group = 0
    if ALIKE:
        of_group = _describe_block(rules, bounds, seq, col, lifts, PAIRS)
    mbarrier.wait(kv_full.index(0), 0)
    sums = lane_sums(gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS))
    before = 0  # steps of the heads before
    for head in range(seq.head, seq.head + groups):
        this = Sequence(seq.batch, head, seq.len_q, seq.len_k)
        if not BY_GROUP:
            sums = lane_sums(gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, PAIRS))
        per_key, steps = of_group if ALIKE else _describe_block(rules, bounds, this, col, lifts, PAIRS)
        begin, end, open_begin, open_end = steps
        mine = begin + ((before + which) % 2) * BLOCK_M
        open_begin = next_step(mine, open_begin, 2 * BLOCK_M)
        open_end = gl.maximum(next_step(mine, open_end, 2 * BLOCK_M), open_begin)
        for start in range(mine, gl.minimum(open_begin, end), 2 * BLOCK_M):
            step = before + (start - begin) // BLOCK_M
            turn = stage_of(step, STAGES)
            dk, dv, sums = tile(fixed, this, per_key, dk, dv, sums, turn, (turn[0], which), start, col, PAIRS, FACTOR, DIM, True)
        for start in range(open_begin, gl.minimum(open_end, end), 2 * BLOCK_M):
            step = before + (start - begin) // BLOCK_M
            turn = stage_of(step, STAGES)
            dk, dv, sums = tile(fixed, this, per_key, dk, dv, sums, turn, (turn[0], which), start, col, PAIRS, FACTOR, DIM, False)
        for start in range(open_end, end, 2 * BLOCK_M):
            step = before + (start - begin) // BLOCK_M
            turn = stage_of(step, STAGES)
            dk, dv, sums = tile(fixed, this, per_key, dk, dv, sums, turn, (turn[0], which), start, col, PAIRS, FACTOR, DIM, True)
        before += gl.cdiv(end - begin, BLOCK_M)
        if key_sums is not None and not BY_GROUP:
            _store_both_sums(key_sums, order, this, col, sums_of_lanes(sums, PAIRS), own, head - seq.head, which, PAIRS)
    if key_sums is not None and BY_GROUP:
        _store_both_sums(key_sums, order, seq, col, sums_of_lanes(sums, PAIRS), own, 0, which, PAIRS)
    if d_bias is not None:
        tma.store_wait(0)
    exchange = _exchange(tiles, DIM)
    if which == 0:
        mbarrier.arrive(given.index(0), count=1)  # its tiles of queries are read: their memory takes the sums of the other
        mbarrier.wait(given.index(1), 0)
        if d_k is not None:
            store_rows(d_k, seq, col, seq.len_k, (dk + exchange.index(0).load(SUMS)) * rules.scale, HEAD_DIM, order)
        if d_v is not None:
            store_rows(d_v, seq, col, seq.len_k, dv + exchange.index(1).load(SUMS), VALUE_DIM, order)
    else:
        mbarrier.wait(given.index(0), 0)
        if d_k is not None:
            exchange.index(0).store(dk)
        if d_v is not None:
            exchange.index(1).store(dv)
        mbarrier.arrive(given.index(1), count=1)


@gluon.jit
def _describe_block(rules, bounds, seq, col, lifts, PAIRS: gl.constexpr):
    """Store the lifts of a block of keys: (what else `tile` has to know of it, (begin, end, begin and end of the tiles that hide no pair))."""
    middle2, length = interval_of(rules, seq, col, BLOCK_N, PAIRS)
    if rules.bias_by_key is not None:
        store_lifts(lifts, rules, seq, col)
    begin, end, last_to_begin, first_to_end = _range(rules, bounds, seq, col)
    open_begin, open_end = open_queries(rules, seq, col, begin, end)
    open_begin = gl.maximum(open_begin, next_step(begin, gl.minimum(last_to_begin, seq.len_q), BLOCK_M))
    open_end = gl.minimum(open_end, next_step(begin, first_to_end - BLOCK_M + 1, BLOCK_M))
    return (uniform_bias_of(rules, seq), middle2, length), (begin, end, open_begin, open_end)


@gluon.jit
def _exchange(tiles, DIM: gl.constexpr):
    """The memory of the tiles of queries as two float32 tiles of sums."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_tiles, _, _, _, _, _ = tiles
    return q_tiles._reinterpret(gl.float32, [2, BLOCK_N, DIM], LAYOUT)


@gluon.jit
def _range(rules, bounds, seq, col):
    """(begin, end, last_to_begin, first_to_end) of the queries that attend a block of keys; from the last to begin on all keys are alive."""
    begin, end = query_window(rules.left, rules.right, seq, Span(col, 0, None), BLOCK_N)
    pointer = slice_pointer(bounds, seq) + gl.cast(col // BLOCK_N, gl.int64) * bounds.row
    end = gl.maximum(gl.minimum(end, gl.load(pointer + 1)), 0)
    begin = gl.minimum(gl.maximum(begin, gl.load(pointer)), end)
    return begin // BLOCK_M * BLOCK_M, end, gl.load(pointer + 2), gl.load(pointer + 3)
