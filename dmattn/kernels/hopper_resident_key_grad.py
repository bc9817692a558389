"""dK and dV on Hopper (sm_90) of narrow heads with few queries, many of which share a bias, in Gluon: the bias stays on chip.

A program has a block of keys of one slice of the bias, and walks the members that share it. Its consumers, of 64 keys each, keep the bias in
shared memory, keys down; a producer copies the members ahead of them. Loops are kept small, as in hopper_resident_forward.py.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    consumers_of,
    copy,
    stage_of,
    tiled,
    tiled_vectors,
)
from .hopper_registers import as_factor, rounded_pairs, store_rows
from .hopper_resident import DIM, allocate_bias, bias_of, keep_bias, part_of, parts_of
from .launch import launch
from .layout import Sequence, strided
from .overlap import follow
from .row_terms import Incoming
from .scores import LOG2E, rules_of
from .sequence import member_of

BLOCK_M = gl.constexpr(64)  # queries of a tile
CHUNK = gl.constexpr(32)  # of them, whose scores are in registers at once
BLOCK_N = gl.constexpr(64)  # keys of a consumer
STAGES = gl.constexpr(6)  # tiles of queries, dO and terms in shared memory, no fewer than a member has


def key_gradients(problem: Any, incoming: Incoming, d_key: Tensor | None, d_value: Tensor | None) -> None:
    """Fill those that are not None of a problem that `hopper_resident.takes_backward` admits."""
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
        terms=tiled_vectors(incoming.terms, 2, BLOCK_M.value),
        bias=tiled(problem.bias, CHUNK.value, BLOCK_N.value),
        rules=rules_of(problem),
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
        maxnreg=LAUNCH_REGISTERS[consumers],
    )


@gluon.jit
def _resident_key_gradients_kernel(
    q, k, v, d_out, terms, bias, rules, d_k, d_v, sharing_heads, members, splits, len_q, len_k,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, TILES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """One program: dK and dV of a block of keys of every `splits`-th of the members that share a slice of the bias.

    Grid of one axis as `part_of` has it.
    """
    follow()
    DIM: gl.constexpr = q.block_shape[3]
    block, bias_head, begin = part_of(gl.cdiv(len_k, CONSUMERS * BLOCK_N), splits)
    k_tiles = gl.allocate_shared_memory(k.dtype, [CONSUMERS, 1, 1, BLOCK_N, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [CONSUMERS, 1, 1, BLOCK_N, DIM], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [STAGES, 1, 1, BLOCK_M, DIM], d_out.layout)
    terms_tiles = gl.allocate_shared_memory(terms.dtype, [STAGES, 1, 1, 2, BLOCK_M], terms.layout)
    kept = ()
    for _ in gl.static_range(CONSUMERS):
        kept += (allocate_bias(bias, TILES * (BLOCK_M // CHUNK), False),)
    bias_full = barriers(CONSUMERS, 1)
    kv_full = barriers(1, 1)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, CONSUMERS)
    fence_async_shared()
    tiles = (q_tiles, k_tiles, v_tiles, d_out_tiles, terms_tiles)
    ready = (kv_full, full, free, bias_full)
    where = (bias_head, sharing_heads, block * (CONSUMERS * BLOCK_N), begin, members, splits, len_q, len_k)
    # d_k and d_v by themselves: in a tuple with others they would lose that their columns lie side by side
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (tiles, kept[0], ready, bias, rules, where, d_k, d_v, 0, HEAD_DIM, VALUE_DIM)),
                (_consume, (tiles, kept[1], ready, bias, rules, where, d_k, d_v, 1, HEAD_DIM, VALUE_DIM)),
                (_produce, (q, k, v, d_out, terms, tiles, ready, where, TILES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tiles, kept[0], ready, bias, rules, where, d_k, d_v, 0, HEAD_DIM, VALUE_DIM)),
                (_consume, (tiles, kept[1], ready, bias, rules, where, d_k, d_v, 1, HEAD_DIM, VALUE_DIM)),
                (_consume, (tiles, kept[2], ready, bias, rules, where, d_k, d_v, 2, HEAD_DIM, VALUE_DIM)),
                (_produce, (q, k, v, d_out, terms, tiles, ready, where, TILES)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )


@gluon.jit
def _produce(q, k, v, d_out, terms, tiles, ready, where, TILES: gl.constexpr):
    """Copy each member to shared memory, as far ahead as there are free stages; its keys and values as the forward pass does its queries."""
    q_tiles, k_tiles, v_tiles, d_out_tiles, terms_tiles = tiles
    kv_full, full, free, _ = ready
    bias_head, sharing_heads, col, begin, members, splits, len_q, len_k = where
    gl.static_assert(TILES <= STAGES)
    CONSUMERS: gl.constexpr = k_tiles.shape[0]
    turn = 0
    for member in range(begin, members, splits):
        this = member_of(Sequence(0, bias_head, len_q, len_k), member, sharing_heads)
        first, parity = stage_of(turn + (STAGES - TILES), STAGES)
        mbarrier.wait(free.index(first), parity ^ 1)
        mbarrier.expect(kv_full.index(0), CONSUMERS * (k.block_type.nbytes + v.block_type.nbytes))
        for i in gl.static_range(CONSUMERS):
            copy(k, [this.batch, this.head, col + i * BLOCK_N, 0], kv_full.index(0), k_tiles.index(i))
            copy(v, [this.batch, this.head, col + i * BLOCK_N, 0], kv_full.index(0), v_tiles.index(i))
        for start in range(0, len_q, BLOCK_M):
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(free.index(stage), parity ^ 1)
            mbarrier.expect(full.index(stage), q.block_type.nbytes + d_out.block_type.nbytes + terms.block_type.nbytes)
            copy(q, [this.batch, this.head, start, 0], full.index(stage), q_tiles.index(stage))
            copy(d_out, [this.batch, this.head, start, 0], full.index(stage), d_out_tiles.index(stage))
            copy(terms, [this.batch, this.head, 0, start], full.index(stage), terms_tiles.index(stage))
            turn += 1


@gluon.jit
def _consume(tiles, memory, ready, bias, rules, where, d_k, d_v, which: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr):
    """dK and dV of BLOCK_N keys of every member, in place `which`."""
    q_tiles, k_tiles, v_tiles, d_out_tiles, terms_tiles = tiles
    kv_full, full, free, bias_full = ready
    bias_head, sharing_heads, col, begin, members, splits, len_q, len_k = where
    DIM: gl.constexpr = q_tiles.shape[4]
    CHUNKS: gl.constexpr = BLOCK_M // CHUNK  # of a tile
    ALL: gl.constexpr = memory.shape[0]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])  # keys down
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OWN: gl.constexpr = gl.DotOperandLayout(0, PAIRS, 2)
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    col += which * BLOCK_N
    seq = Sequence(0, bias_head * sharing_heads, len_q, len_k)
    kept = keep_bias(memory, bias, bias_full.index(which), 0, rules, seq, 0, col, CHUNK, PAIRS, True, False)
    factor = rules.scale * LOG2E
    vectors = terms_tiles._reinterpret(gl.float32, [2 * STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    phase = 0
    turn = 0
    next_bias = bias_of(kept, 0, rules, PAIRS)
    for member in range(begin, members, splits):
        mbarrier.wait(kv_full.index(0), phase)
        k_tile = k_tiles.index(which).reshape([BLOCK_N, DIM]).load(OWN)
        v_tile = v_tiles.index(which).reshape([BLOCK_N, DIM]).load(OWN)
        dk = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
        dv = gl.full([BLOCK_N, DIM], 0.0, gl.float32, SUMS)
        for i in range(ALL // CHUNKS):
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(full.index(stage), parity)
            q_tile = q_tiles.index(stage).reshape([BLOCK_M, DIM])
            d_out_tile = d_out_tiles.index(stage).reshape([BLOCK_M, DIM])
            first = _products(q_tile, d_out_tile, k_tile, v_tile, next_bias, 0, PAIRS)
            second = _products(q_tile, d_out_tile, k_tile, v_tile, bias_of(kept, CHUNKS * i + 1, rules, PAIRS), 1, PAIRS)
            s, d_p = warpgroup_mma_wait(2, first)
            dk, dv = _add(dk, dv, s, d_p, q_tile, d_out_tile, vectors, stage, factor, 0, FACTOR, d_k is not None, d_v is not None, PAIRS)
            s, d_p = warpgroup_mma_wait((d_k is not None) + (d_v is not None), second)
            dk, dv = _add(dk, dv, s, d_p, q_tile, d_out_tile, vectors, stage, factor, 1, FACTOR, d_k is not None, d_v is not None, PAIRS)
            next_bias = bias_of(kept, gl.where(CHUNKS * i + 2 < ALL, CHUNKS * i + 2, 0), rules, PAIRS)
            dk, dv = warpgroup_mma_wait(0, [dk, dv])
            mbarrier.arrive(free.index(stage), count=1)
            turn += 1
        seq = member_of(Sequence(0, bias_head, len_q, len_k), member, sharing_heads)
        if d_k is not None:
            store_rows(d_k, seq, col, len_k, dk * rules.scale, HEAD_DIM)
        if d_v is not None:
            store_rows(d_v, seq, col, len_k, dv, VALUE_DIM)
        phase ^= 1


@gluon.jit
def _products(q_tile, d_out_tile, k_tile, v_tile, bias, j: gl.constexpr, PAIRS: gl.constexpr):
    """(scores, V dO^T) of a chunk of a tile, keys down, under way."""
    s = warpgroup_mma(k_tile, q_tile.slice(j * CHUNK, CHUNK).permute((1, 0)), bias, is_async=True)
    zero = gl.full([BLOCK_N, CHUNK], 0.0, gl.float32, PAIRS)
    return s, warpgroup_mma(v_tile, d_out_tile.slice(j * CHUNK, CHUNK).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _add(
    dk, dv, s, d_p, q_tile, d_out_tile, vectors, stage, factor,
    j: gl.constexpr, FACTOR: gl.constexpr, OF_KEYS: gl.constexpr, OF_VALUES: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """(dk, dv) with a chunk of a tile, under way."""
    COLS: gl.constexpr = gl.SliceLayout(0, PAIRS)
    DTYPE: gl.constexpr = q_tile.dtype
    p = gl.exp2(s * factor - vectors.index(2 * stage).slice(j * CHUNK, CHUNK).load(COLS)[None, :])
    if OF_VALUES:
        dv = warpgroup_mma(as_factor(rounded_pairs(p, DTYPE), DTYPE, FACTOR), d_out_tile.slice(j * CHUNK, CHUNK), dv, is_async=True)
    ds = p * (d_p - vectors.index(2 * stage + 1).slice(j * CHUNK, CHUNK).load(COLS)[None, :])
    if OF_KEYS:
        dk = warpgroup_mma(as_factor(rounded_pairs(ds, DTYPE), DTYPE, FACTOR), q_tile.slice(j * CHUNK, CHUNK), dk, is_async=True)
    return dk, dv
