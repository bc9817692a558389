"""dQ, and the gradient of a bias that many (batch, head) share, on Hopper (sm_90) of narrow heads with few keys, in Gluon.

A program takes a piece of the line of work (line.py). Of each block of queries that it crosses, it keeps the bias in shared memory and the
gradient of the bias in its consumers' registers, a part of the keys each. It walks its members, which a producer copies ahead of it, and stores
its sum as a part of dBias. The first consumer sums dQ over all consumers.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....problem import Problem
from ...base.device import processors
from ...base.launch import launch
from ...base.layout import Sequence, slice_pointer, strided
from ...base.leading import spread_of
from ...base.overlap import follow
from ...base.parts import sum_parts
from ...base.place import member_of
from ...base.query_terms import Incoming
from ...base.rules import LOG2E, rules_of
from ..addressing import copyable
from ..copies import (
    PRODUCER_REGISTERS,
    allocate_barriers,
    consumer_registers,
    copy,
    launch_registers,
    product_layout,
    stage_of,
    sync_threads,
    tiled,
)
from ..registers import as_factor, by_rows, by_threads, order_of, rounded_pairs
from .bias import DIM, KEYS, allocate_bias, bias_of, keep_bias, store_sums
from .line import FILLING, Line, members_in_piece, most_parts, own_piece, piece_at, slice_at

BLOCK_M = gl.constexpr(64)  # queries of a program
CHUNK = gl.constexpr(32)  # of the KEYS of a consumer, whose scores are in registers at once
STAGES = gl.constexpr(2)  # members in shared memory


class Config(NamedTuple):
    """Options of a launch, all constexprs."""

    CONSUMERS: Any
    DIM: Any
    PAIRS: Any  # the layout of a chunk of the scores
    SUMS: Any  # and of dQ


class Tiles(NamedTuple):
    """Tiles in shared memory, `bias` by consumer; consumers of one stage stand side by side."""

    q: Any  # [STAGES, 1, 1, BLOCK_M, DIM]
    d_out: Any  # [STAGES, 1, 1, BLOCK_M, DIM]
    k: Any  # [STAGES * CONSUMERS, 1, 1, KEYS, DIM]
    v: Any  # [STAGES * CONSUMERS, 1, 1, KEYS, DIM]
    bias: Any  # [2 * KEYS / CHUNK, 1, 1, BLOCK_M, CHUNK] each
    d_q: Any  # [1, 1, BLOCK_M, DIM]; None unless dQ is wanted


class Barriers(NamedTuple):
    """Barriers in shared memory: `full` when tiles have arrived, `free` when all consumers are done with a stage."""

    bias_full: Any  # [CONSUMERS]
    full: Any  # [STAGES]
    free: Any  # [STAGES]
    sums_full: Any  # [STAGES], of dQ, from the other consumers for the first


class Terms(NamedTuple):
    """Terms of queries (`query_terms.Incoming`)."""

    divisor: Any  # [BLOCK_M], the first term
    delta: Any  # [BLOCK_M]


class Context(NamedTuple):
    """The same for all members of a block of queries."""

    tiles: Any
    kept: Any  # the bias, as `bias_of` takes it
    barriers: Any
    rules: Any
    factor: Any  # of the products, to be exponents of 2
    row: Any  # the first query of the block


def query_gradients(
    problem: Problem, incoming: Incoming, d_query: Tensor | None, d_bias: Tensor | None, spare: tuple[Tensor | None, ...]
) -> None:
    """Fill those that are not None.

    The `spare` tensors are to be filled later, and lend their memory to the parts of dBias.
    """
    batch, heads, len_q = problem.query.shape[:3]
    len_k = problem.key.shape[2]
    entries, bias_heads = problem.bias.shape[:2]
    members = batch // entries * (heads // bias_heads)
    blocks = triton.cdiv(len_q, BLOCK_M.value) * entries * bias_heads
    consumers = 3 if len_k > 2 * KEYS.value else 2
    programs = min(processors(problem.query.device), blocks * members)
    spread = spread_of(problem.bias)
    count = most_parts(blocks, members, programs)
    parts = None if d_bias is None else _borrowed(count, d_bias, spare)
    launch(
        _resident_query_gradients_kernel,
        programs,
        q=tiled(problem.query, BLOCK_M.value, DIM),
        k=tiled(problem.key, KEYS.value, DIM),
        v=tiled(problem.value, KEYS.value, DIM),
        d_out=tiled(incoming.d_out, BLOCK_M.value, DIM),
        terms=strided(incoming.vectors, heads),
        bias=tiled(copyable("bias", problem.bias), BLOCK_M.value, CHUNK.value),
        rules=rules_of(problem, by_words=True),
        d_q=tiled(d_query, BLOCK_M.value, DIM),
        parts=strided(parts, bias_heads),
        part_count=count,
        block_count=blocks,
        entries=None if entries == 1 else entries,
        sharing_heads=heads // bias_heads,
        spread=spread,
        members=members,
        len_q=len_q,
        len_k=len_k,
        CONSUMERS=consumers,
        num_warps=4,
        maxnreg=launch_registers(consumers),
    )
    if d_bias is not None:
        sum_parts(parts, d_bias)


def _borrowed(count: int, d_bias: Tensor, spare: tuple[Tensor | None, ...]) -> Tensor:
    """So many times `d_bias` in float32, in the memory of one of the spare tensors if that is dense and has room; the tensor itself if one."""
    if count == 1:
        return d_bias
    shape = (count * d_bias.shape[0], *d_bias.shape[1:])
    for x in spare:
        if x is None or x.numel() * x.element_size() < 4 * count * d_bias.numel():
            continue
        dense = x.permute(sorted(range(4), key=lambda axis: -x.stride(axis)))
        if dense.is_contiguous():
            return dense.view(-1).view(torch.float32)[: count * d_bias.numel()].view(shape)
    return torch.empty(shape, dtype=torch.float32, device=d_bias.device)


@gluon.jit
def _resident_query_gradients_kernel(
    q, k, v, d_out, terms, bias, rules, d_q, parts, part_count, block_count, entries, sharing_heads, spread, members, len_q, len_k,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """One program: a piece of the work, from a grid of one axis."""
    follow()
    config: gl.constexpr = Config(
        CONSUMERS=CONSUMERS,
        DIM=q.block_shape[3],
        PAIRS=product_layout(CHUNK),
        SUMS=product_layout(q.block_shape[3]),
    )
    tiles = Tiles(
        q=gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, config.DIM], q.layout),
        d_out=gl.allocate_shared_memory(d_out.dtype, [STAGES, 1, 1, BLOCK_M, config.DIM], d_out.layout),
        k=gl.allocate_shared_memory(k.dtype, [STAGES * CONSUMERS, 1, 1, KEYS, config.DIM], k.layout),
        v=gl.allocate_shared_memory(v.dtype, [STAGES * CONSUMERS, 1, 1, KEYS, config.DIM], v.layout),
        bias=allocate_bias(rules, CONSUMERS, KEYS // CHUNK, BLOCK_M, CHUNK, WIDE=True),
        d_q=None if d_q is None else gl.allocate_shared_memory(d_q.dtype, [1, 1, BLOCK_M, config.DIM], d_q.layout),
    )
    barriers = Barriers(
        bias_full=None if bias is None else allocate_barriers(CONSUMERS, 1),
        full=allocate_barriers(STAGES, 1),
        free=allocate_barriers(STAGES, CONSUMERS),
        sums_full=allocate_barriers(STAGES, CONSUMERS - 1),
    )
    fence_async_shared()
    line = Line(part_count, block_count, entries, sharing_heads, spread, members, len_q, len_k)
    gl.warp_specialize(
        [
            (_consume, (tiles, barriers, bias, rules, terms, d_q, parts, line, which, config))
            if which < CONSUMERS
            else (_produce, (q, k, v, d_out, tiles, barriers, line, config))
            for which in (0, 1, 2, 3)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [consumer_registers(CONSUMERS)] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(q, k, v, d_out, tiles, barriers, line, config: gl.constexpr):
    """Copy each member to shared memory, as far ahead as there are free stages."""
    CONSUMERS: gl.constexpr = config.CONSUMERS
    BYTES: gl.constexpr = q.block_type.nbytes + d_out.block_type.nbytes + CONSUMERS * (k.block_type.nbytes + v.block_type.nbytes)
    blocks = gl.cdiv(line.len_q, BLOCK_M)
    begin, end = own_piece(line)
    span = FILLING + line.members
    turn = 0
    for block in range(begin // span, gl.cdiv(end - FILLING, span)):
        row = block % blocks * BLOCK_M
        first, last = members_in_piece(block, begin, end, line.members)
        for member in range(first, last):
            seq = member_of(None, slice_at(block // blocks, line), member, line.sharing_heads, line.spread)
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(barriers.free.index(stage), parity ^ 1)
            full = barriers.full.index(stage)
            mbarrier.expect(full, BYTES)
            copy(q, [seq.batch, seq.head, row, 0], full, tiles.q.index(stage))
            copy(d_out, [seq.batch, seq.head, row, 0], full, tiles.d_out.index(stage))
            for i in gl.static_range(CONSUMERS):
                copy(k, [seq.batch, seq.head, i * KEYS, 0], full, tiles.k.index(CONSUMERS * stage + i))
                copy(v, [seq.batch, seq.head, i * KEYS, 0], full, tiles.v.index(CONSUMERS * stage + i))
            turn += 1


@gluon.jit
def _consume(tiles, barriers, bias, rules, terms, d_q, parts, line, which: gl.constexpr, config: gl.constexpr):
    """KEYS keys of each block of queries, those in place `which`."""
    PAIRS: gl.constexpr = config.PAIRS
    CHUNKS: gl.constexpr = KEYS // CHUNK
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))  # [BLOCK_M]
    zeros = (gl.full([BLOCK_M, CHUNK], 0.0, gl.float32, PAIRS),) * CHUNKS
    blocks = gl.cdiv(line.len_q, BLOCK_M)
    begin, end = own_piece(line)
    span = FILLING + line.members
    turn = 0
    parity = 0
    for block in range(begin // span, gl.cdiv(end - FILLING, span)):
        row = block % blocks * BLOCK_M
        seq = slice_at(block // blocks, line)
        first, last = members_in_piece(block, begin, end, line.members)
        slice_seq = member_of(None, seq, 0, line.sharing_heads, line.spread)
        col = which * KEYS
        bias_full = None if bias is None else barriers.bias_full.index(which)
        kept = keep_bias(tiles.bias[which], bias, bias_full, parity, rules, slice_seq, row, col, COLS=CHUNK, PAIRS=PAIRS, KEYS_DOWN=False)
        parity ^= 1
        context = Context(tiles, kept, barriers, rules, rules.scale * LOG2E, row)
        totals = zeros  # dS of the members so far, [BLOCK_M, CHUNK] each
        vectors = _terms(terms, member_of(None, seq, first, line.sharing_heads, line.spread), row, rows)
        for member in range(first, last):
            further = gl.minimum(member + 1, last - 1)  # whose terms are asked for a member ahead
            next_vectors = _terms(terms, member_of(None, seq, further, line.sharing_heads, line.spread), row, rows)
            dq, totals = _member(context, vectors, totals, turn, which, config)
            vectors = next_vectors
            if d_q is not None:
                _give(dq, context, d_q, member_of(None, seq, member, line.sharing_heads, line.spread), turn, which, config)
            mbarrier.arrive(barriers.free.index(turn % STAGES), count=1)
            turn += 1
        if parts is not None:
            part = gl.program_id(0) - piece_at(block * span + FILLING, line)
            _store(parts, part, line.entries, seq, row, col, totals, PAIRS)
            if last == line.members:  # the last piece of a block writes the parts that it does not have
                for unused in range(part + 1, line.part_count):
                    _store(parts, unused, line.entries, seq, row, col, zeros, PAIRS)
    if d_q is not None and which == 0:
        tma.store_wait(0)


@gluon.jit
def _terms(terms, seq, row, rows):
    """The :class:`Terms` of a member's queries; `rows` count from the `row`."""
    vectors = slice_pointer(terms, seq) + row + rows
    return Terms(gl.load(vectors), gl.load(vectors + terms.row))


@gluon.jit
def _member(context, vectors, totals, turn, which: gl.constexpr, config: gl.constexpr):
    """(the consumer's share of one member's dQ, the totals with its dS)."""
    DTYPE: gl.constexpr = context.tiles.q.dtype
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, config.PAIRS, 2)
    tiles = context.tiles
    zero = gl.full([BLOCK_M, CHUNK], 0.0, gl.float32, config.PAIRS)
    stage, parity = stage_of(turn, STAGES)
    bias = bias_of(context.kept, 0, context.rules, config.PAIRS)  # [BLOCK_M, CHUNK]
    mbarrier.wait(context.barriers.full.index(stage), parity)
    q_tile = tiles.q.index(stage).reshape([BLOCK_M, config.DIM]).load(FACTOR)
    d_out_tile = tiles.d_out.index(stage).reshape([BLOCK_M, config.DIM]).load(FACTOR)
    k_tile = tiles.k.index(config.CONSUMERS * stage + which).reshape([KEYS, config.DIM])
    v_tile = tiles.v.index(config.CONSUMERS * stage + which).reshape([KEYS, config.DIM])
    dq = gl.full([BLOCK_M, config.DIM], 0.0, gl.float32, config.SUMS)
    further_totals = ()
    for i in gl.static_range(KEYS // CHUNK):
        k_part = k_tile.slice(i * CHUNK, CHUNK)  # [CHUNK, DIM]
        if i > 0:
            bias = bias_of(context.kept, i, context.rules, config.PAIRS)
        s = warpgroup_mma(q_tile, k_part.permute((1, 0)), bias, is_async=True)  # [BLOCK_M, CHUNK]
        v_part = v_tile.slice(i * CHUNK, CHUNK)
        d_p = warpgroup_mma(d_out_tile, v_part.permute((1, 0)), zero, use_acc=False, is_async=True)
        if i > 0:
            s, dq = warpgroup_mma_wait(1, [s, dq])
        else:
            s = warpgroup_mma_wait(1, [s])
        p = gl.exp2(s * context.factor - vectors.divisor[:, None])
        d_p = warpgroup_mma_wait(0, [d_p])
        ds = p * (d_p - vectors.delta[:, None])
        further_totals += (totals[i] + ds,)
        rounded = as_factor(rounded_pairs(ds, DTYPE), DTYPE, gl.DotOperandLayout(0, config.SUMS, 2))
        dq = warpgroup_mma(rounded, k_part, dq, use_acc=i > 0, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    return dq, further_totals


@gluon.jit
def _give(dq, context, d_q, seq, turn, which: gl.constexpr, config: gl.constexpr):
    """A consumer's share of one member's dQ to the first one, in the place of its keys, and from that, dQ to its place."""
    CONSUMERS: gl.constexpr = config.CONSUMERS
    COUNT: gl.constexpr = config.DIM // 8
    gl.static_assert(BLOCK_M * 4 == KEYS * 2)
    tiles = context.tiles
    sums = tiles.k._reinterpret(gl.float32, [STAGES * CONSUMERS, COUNT, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    stage, parity = stage_of(turn, STAGES)
    if which == 0:
        mbarrier.wait(context.barriers.sums_full.index(stage), parity)
        for i in gl.static_range(1, CONSUMERS):
            dq += by_rows(sums.index(CONSUMERS * stage + i).load(order_of(COUNT)), config.SUMS)
        store_sums(d_q, tiles.d_q, seq, context.row, dq * context.rules.scale)  # then the sums of the others are certainly read
    else:
        sync_threads()  # all have multiplied the keys
        sums.index(CONSUMERS * stage + which).store(by_threads(dq))
        fence_async_shared()
        mbarrier.arrive(context.barriers.sums_full.index(stage), count=1)


@gluon.jit
def _store(parts, part, entries, seq, row, col, totals, PAIRS: gl.constexpr):
    """A consumer's totals to their part of a bias with so many entries, None for one; `seq` is the slice."""
    if entries is not None:
        part = part * entries + seq.batch
    for i in gl.static_range(len(totals)):
        rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))
        cols = gl.arange(0, CHUNK, gl.SliceLayout(0, PAIRS))
        start = col + i * CHUNK
        corner = slice_pointer(parts, Sequence(part, seq.head, seq.len_q, seq.len_k)) + gl.cast(row, gl.int64) * parts.row + start * parts.col
        inside = (rows < seq.len_q - row)[:, None] & (cols < seq.len_k - start)[None, :]
        pointers = corner + (rows * parts.row)[:, None] + (cols * parts.col)[None, :]  # [BLOCK_M, CHUNK]
        gl.store(pointers, totals[i].to(parts.ptr.dtype.element_ty), mask=inside)
