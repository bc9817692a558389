"""dK and dV on Hopper (sm_90) of narrow heads with few queries, many of which share a bias, in Gluon: the bias stays on chip.

A program has a block of keys of one slice of the bias, and walks the members that share it. Its consumers, of 64 keys each, keep the bias in
shared memory, keys down; a producer copies the members ahead of them. The loop over tiles is kept small: unrolled, its code no longer fits the
instruction cache.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....problem import Problem
from ...base.launch import launch
from ...base.layout import strided
from ...base.overlap import follow
from ...base.query_terms import Incoming
from ...base.rules import LOG2E, rules_of
from ..addressing import copyable
from ..copies import (
    PRODUCER_REGISTERS,
    allocate_barriers,
    consumer_registers,
    consumers_of,
    copy,
    launch_registers,
    product_layout,
    stage_of,
    tiled,
    tiled_vectors,
)
from ..registers import as_factor, rounded_pairs, store_tile
from .bias import DIM, Part, allocate_bias, bias_of, keep_bias, part_of, parts_of, sequence_of, slice_of

BLOCK_M = gl.constexpr(64)  # queries of a tile
CHUNK = gl.constexpr(32)  # of them, whose scores are in registers at once
BLOCK_N = gl.constexpr(64)  # keys of a consumer
STAGES = gl.constexpr(6)  # tiles of queries, dO and terms in shared memory, no fewer than a member has


class Config(NamedTuple):
    """Options of a launch, all constexprs."""

    CONSUMERS: Any
    TILES: Any  # of a member's queries
    DIM: Any
    HEAD_DIM: Any
    VALUE_DIM: Any
    OF_KEYS: Any  # whether dK is wanted
    OF_VALUES: Any  # and dV
    PAIRS: Any  # the layout of a chunk of the scores, keys down
    SUMS: Any  # and of dK and dV


class Tiles(NamedTuple):
    """Tiles in shared memory, `bias` by consumer."""

    k: Any  # [CONSUMERS, 1, 1, BLOCK_N, DIM]
    v: Any  # [CONSUMERS, 1, 1, BLOCK_N, DIM]
    q: Any  # [STAGES, 1, 1, BLOCK_M, DIM]
    d_out: Any  # [STAGES, 1, 1, BLOCK_M, DIM]
    terms: Any  # [STAGES, 1, 1, 2, BLOCK_M]
    bias: Any  # [TILES * BLOCK_M / CHUNK, 1, 1, CHUNK, BLOCK_N] each


class Barriers(NamedTuple):
    """Barriers in shared memory: `full` when copies have arrived, `free` when all consumers have multiplied a stage."""

    bias_full: Any  # [CONSUMERS]
    kv_full: Any  # [1]
    q_full: Any  # [STAGES], with dO and terms
    q_free: Any  # [STAGES]


class Keys(NamedTuple):
    """A consumer's keys and values of one member, in registers."""

    k: Any  # [BLOCK_N, DIM]
    v: Any  # [BLOCK_N, DIM]


class Queries(NamedTuple):
    """The queries of a stage, with dO and their terms (`query_terms.Incoming`), in shared memory."""

    q: Any  # [BLOCK_M, DIM]
    d_out: Any  # [BLOCK_M, DIM]
    divisor: Any  # [BLOCK_M], the first term
    delta: Any  # [BLOCK_M]


class Sums(NamedTuple):
    """Running sums of a consumer's keys."""

    dk: Any  # [BLOCK_N, DIM]
    dv: Any  # [BLOCK_N, DIM]


def key_gradients(problem: Problem, incoming: Incoming, d_key: Tensor | None, d_value: Tensor | None) -> None:
    """Fill those that are not None."""
    heads, len_q, head_dim = problem.query.shape[1:]
    len_k, value_dim = problem.value.shape[2:]
    consumers = consumers_of(len_k, DIM)
    programs, parts = parts_of(problem, triton.cdiv(len_k, consumers * BLOCK_N.value))
    launch(
        _resident_key_gradients_kernel,
        programs,
        q=tiled(problem.query, BLOCK_M.value, DIM),
        k=tiled(problem.key, BLOCK_N.value, DIM),
        v=tiled(problem.value, BLOCK_N.value, DIM),
        d_out=tiled(incoming.d_out, BLOCK_M.value, DIM),
        terms=tiled_vectors(incoming.vectors, 2, BLOCK_M.value),
        bias=tiled(copyable("bias", problem.bias), CHUNK.value, BLOCK_N.value),
        rules=rules_of(problem, by_words=True),
        d_k=strided(d_key, heads),
        d_v=strided(d_value, heads),
        **parts,
        len_q=len_q,
        len_k=len_k,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        TILES=triton.cdiv(len_q, BLOCK_M.value),
        CONSUMERS=consumers,
        num_warps=4,
        maxnreg=launch_registers(consumers),
    )


@gluon.jit
def _resident_key_gradients_kernel(
    q, k, v, d_out, terms, bias, rules, d_k, d_v, entries, sharing_heads, spread, members, splits, len_q, len_k,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, TILES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """One program: dK and dV of a block of keys of every `splits`-th of the members that share a slice of the bias.

    Grid of one axis as `part_of` has it.
    """
    follow()
    config: gl.constexpr = Config(
        CONSUMERS=CONSUMERS,
        TILES=TILES,
        DIM=q.block_shape[3],
        HEAD_DIM=HEAD_DIM,
        VALUE_DIM=VALUE_DIM,
        OF_KEYS=d_k is not None,
        OF_VALUES=d_v is not None,
        PAIRS=product_layout(CHUNK),
        SUMS=product_layout(q.block_shape[3]),
    )
    block, number, first = part_of(gl.cdiv(len_k, CONSUMERS * BLOCK_N), splits)
    tiles = Tiles(
        k=gl.allocate_shared_memory(k.dtype, [CONSUMERS, 1, 1, BLOCK_N, config.DIM], k.layout),
        v=gl.allocate_shared_memory(v.dtype, [CONSUMERS, 1, 1, BLOCK_N, config.DIM], v.layout),
        q=gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, config.DIM], q.layout),
        d_out=gl.allocate_shared_memory(d_out.dtype, [STAGES, 1, 1, BLOCK_M, config.DIM], d_out.layout),
        terms=gl.allocate_shared_memory(terms.dtype, [STAGES, 1, 1, 2, BLOCK_M], terms.layout),
        bias=allocate_bias(rules, CONSUMERS, TILES * (BLOCK_M // CHUNK), CHUNK, BLOCK_N, WIDE=False),
    )
    barriers = Barriers(
        bias_full=None if bias is None else allocate_barriers(CONSUMERS, 1),
        kv_full=allocate_barriers(1, 1),
        q_full=allocate_barriers(STAGES, 1),
        q_free=allocate_barriers(STAGES, CONSUMERS),
    )
    fence_async_shared()
    entry, bias_head = slice_of(number, entries)
    part = Part(entry, bias_head, sharing_heads, spread, block * (CONSUMERS * BLOCK_N), first, members, splits, len_q, len_k)
    # d_k and d_v by themselves: in a tuple with others they would lose that their columns lie side by side
    gl.warp_specialize(
        [
            (_consume, (tiles, barriers, bias, rules, part, d_k, d_v, which, config))
            if which < CONSUMERS
            else (_produce, (q, k, v, d_out, terms, tiles, barriers, part, config))
            for which in (0, 1, 2, 3)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [consumer_registers(CONSUMERS)] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(q, k, v, d_out, terms, tiles, barriers, part, config: gl.constexpr):
    """Copy each member to shared memory, as far ahead as there are free stages; its keys and values as the forward pass does its queries."""
    gl.static_assert(config.TILES <= STAGES)
    turn = 0
    for member in range(part.first, part.members, part.splits):
        seq = sequence_of(part, member)
        first, parity = stage_of(turn + (STAGES - config.TILES), STAGES)
        mbarrier.wait(barriers.q_free.index(first), parity ^ 1)
        kv_full = barriers.kv_full.index(0)
        mbarrier.expect(kv_full, config.CONSUMERS * (k.block_type.nbytes + v.block_type.nbytes))
        for i in gl.static_range(config.CONSUMERS):
            copy(k, [seq.batch, seq.head, part.start + i * BLOCK_N, 0], kv_full, tiles.k.index(i))
            copy(v, [seq.batch, seq.head, part.start + i * BLOCK_N, 0], kv_full, tiles.v.index(i))
        for row in range(0, seq.len_q, BLOCK_M):
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(barriers.q_free.index(stage), parity ^ 1)
            q_full = barriers.q_full.index(stage)
            mbarrier.expect(q_full, q.block_type.nbytes + d_out.block_type.nbytes + terms.block_type.nbytes)
            copy(q, [seq.batch, seq.head, row, 0], q_full, tiles.q.index(stage))
            copy(d_out, [seq.batch, seq.head, row, 0], q_full, tiles.d_out.index(stage))
            copy(terms, [seq.batch, seq.head, 0, row], q_full, tiles.terms.index(stage))
            turn += 1


@gluon.jit
def _consume(tiles, barriers, bias, rules, part, d_k, d_v, which: gl.constexpr, config: gl.constexpr):
    """dK and dV of BLOCK_N keys of every member, in place `which`."""
    CHUNKS: gl.constexpr = BLOCK_M // CHUNK  # of a tile
    ALL: gl.constexpr = CHUNKS * config.TILES
    PAIRS: gl.constexpr = config.PAIRS
    OWN: gl.constexpr = gl.DotOperandLayout(0, PAIRS, 2)
    gl.static_assert(CHUNKS == 2)
    col = part.start + which * BLOCK_N
    seq = sequence_of(part, 0)
    bias_full = None if bias is None else barriers.bias_full.index(which)
    kept = keep_bias(tiles.bias[which], bias, bias_full, 0, rules, seq, 0, col, COLS=CHUNK, PAIRS=PAIRS, KEYS_DOWN=True)
    factor = rules.scale * LOG2E
    phase = 0
    turn = 0
    next_bias = bias_of(kept, 0, rules, PAIRS)  # [BLOCK_N, CHUNK]
    for member in range(part.first, part.members, part.splits):
        mbarrier.wait(barriers.kv_full.index(0), phase)
        keys = Keys(
            k=tiles.k.index(which).reshape([BLOCK_N, config.DIM]).load(OWN),
            v=tiles.v.index(which).reshape([BLOCK_N, config.DIM]).load(OWN),
        )
        sums = Sums(
            dk=gl.full([BLOCK_N, config.DIM], 0.0, gl.float32, config.SUMS),
            dv=gl.full([BLOCK_N, config.DIM], 0.0, gl.float32, config.SUMS),
        )
        for i in range(config.TILES):
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(barriers.q_full.index(stage), parity)
            queries = _queries(tiles, stage, config)
            first = _products(keys, queries, next_bias, 0, PAIRS)
            second = _products(keys, queries, bias_of(kept, CHUNKS * i + 1, rules, PAIRS), 1, PAIRS)
            s, d_p = warpgroup_mma_wait(2, first)  # both [BLOCK_N, CHUNK]
            sums = _add(sums, s, d_p, queries, factor, 0, config)
            s, d_p = warpgroup_mma_wait(config.OF_KEYS + config.OF_VALUES, second)
            sums = _add(sums, s, d_p, queries, factor, 1, config)
            next_bias = bias_of(kept, gl.where(CHUNKS * i + 2 < ALL, CHUNKS * i + 2, 0), rules, PAIRS)
            dk, dv = warpgroup_mma_wait(0, [sums.dk, sums.dv])
            sums = Sums(dk, dv)
            mbarrier.arrive(barriers.q_free.index(stage), count=1)
            turn += 1
        seq = sequence_of(part, member)
        if d_k is not None:
            store_tile(d_k, seq, col, seq.len_k, sums.dk * rules.scale, config.HEAD_DIM)
        if d_v is not None:
            store_tile(d_v, seq, col, seq.len_k, sums.dv, config.VALUE_DIM)
        phase ^= 1


@gluon.jit
def _queries(tiles, stage, config: gl.constexpr):
    """The :class:`Queries` of a stage."""
    vectors = tiles.terms._reinterpret(gl.float32, [2 * STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Queries(
        q=tiles.q.index(stage).reshape([BLOCK_M, config.DIM]),
        d_out=tiles.d_out.index(stage).reshape([BLOCK_M, config.DIM]),
        divisor=vectors.index(2 * stage),
        delta=vectors.index(2 * stage + 1),
    )


@gluon.jit
def _products(keys, queries, bias, chunk: gl.constexpr, PAIRS: gl.constexpr):
    """(scores, V dO^T) of a chunk of a tile, keys down, under way."""
    s = warpgroup_mma(keys.k, queries.q.slice(chunk * CHUNK, CHUNK).permute((1, 0)), bias, is_async=True)  # [BLOCK_N, CHUNK]
    zero = gl.full([BLOCK_N, CHUNK], 0.0, gl.float32, PAIRS)
    return s, warpgroup_mma(keys.v, queries.d_out.slice(chunk * CHUNK, CHUNK).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _add(sums, s, d_p, queries, factor, chunk: gl.constexpr, config: gl.constexpr):
    """The sums with a chunk of a tile, under way."""
    START: gl.constexpr = chunk * CHUNK
    COLS: gl.constexpr = gl.SliceLayout(0, config.PAIRS)
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, config.SUMS, 2)
    DTYPE: gl.constexpr = queries.q.dtype
    dk = sums.dk
    dv = sums.dv
    p = gl.exp2(s * factor - queries.divisor.slice(START, CHUNK).load(COLS)[None, :])  # [BLOCK_N, CHUNK]
    if config.OF_VALUES:
        dv = warpgroup_mma(as_factor(rounded_pairs(p, DTYPE), DTYPE, FACTOR), queries.d_out.slice(START, CHUNK), dv, is_async=True)
    ds = p * (d_p - queries.delta.slice(START, CHUNK).load(COLS)[None, :])
    if config.OF_KEYS:
        dk = warpgroup_mma(as_factor(rounded_pairs(ds, DTYPE), DTYPE, FACTOR), queries.q.slice(START, CHUNK), dk, is_async=True)
    return Sums(dk, dv)
