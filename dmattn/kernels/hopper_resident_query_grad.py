"""dQ, and the gradient of a bias that many (batch, head) share, on Hopper (sm_90) of narrow heads with few keys, in Gluon.

All the work, blocks of queries times the members that share their bias, is one line that is cut into as many equal pieces as there are
processors. A program takes a piece: of each block of queries that it crosses it keeps the bias in shared memory and the gradient of the bias
in its consumers' registers, a part of the keys each; it walks its members, which a producer copies ahead of it, and stores its sum as a part
of dBias. What the consumers have of dQ is summed by the first of them.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .bias_grad import Sharing
from .device import processors
from .hopper import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_THREE,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    copy,
    stage_of,
    sync_threads,
    tiled,
)
from .hopper_registers import as_factor, by_rows, by_threads, order_of, rounded_pairs
from .hopper_resident import DIM, KEYS, allocate_bias, bias_of, keep_bias, store_sums
from .launch import launch
from .layout import Sequence, slice_pointer, strided
from .overlap import follow
from .row_terms import Incoming
from .scores import LOG2E, rules_of
from .sequence import member_of

BLOCK_M = gl.constexpr(64)  # queries of a program
CHUNK = gl.constexpr(32)  # of the KEYS of a consumer, whose scores are in registers at once
FILLING = gl.constexpr(3)  # members whose time it takes to fill the bias of a block
STAGES = gl.constexpr(2)  # members in shared memory


def query_gradients(problem: Any, incoming: Incoming, d_query: Tensor | None, d_bias: Tensor | None, spare: tuple[Tensor | None, ...]) -> None:
    """Fill those that are not None of a problem that `hopper_resident.takes_backward` admits.

    The `spare` tensors are to be filled later, and lend their memory to the parts of dBias.
    """
    batch, heads, len_q, _ = problem.query.shape
    len_k = problem.key.shape[2]
    bias_heads = problem.bias.shape[1]
    members = batch * (heads // bias_heads)
    blocks = triton.cdiv(len_q, BLOCK_M.value) * bias_heads
    consumers = 3 if len_k > 2 * KEYS.value else 2
    programs = min(processors(problem.query.device), blocks * members)
    sharing = Sharing(1, bias_heads, heads // bias_heads, members, _parts_of(blocks, members, programs))
    parts = None if d_bias is None else _borrowed(sharing.splits, d_bias, spare)
    launch(
        _resident_query_gradients_kernel,
        programs,
        q=tiled(problem.query, BLOCK_M.value, DIM),
        k=tiled(problem.key, KEYS.value, DIM),
        v=tiled(problem.value, KEYS.value, DIM),
        d_out=tiled(incoming.d_out, BLOCK_M.value, DIM),
        terms=strided(incoming.terms, heads),
        bias=tiled(problem.bias, BLOCK_M.value, CHUNK.value),
        rules=rules_of(problem),
        d_q=tiled(d_query, BLOCK_M.value, DIM),
        parts=strided(parts, bias_heads),
        part_count=sharing.splits,
        block_count=blocks,
        sharing_heads=heads // bias_heads,
        members=members,
        len_q=len_q,
        len_k=len_k,
        CONSUMERS=consumers,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[consumers],
    )
    if d_bias is not None:
        sharing.sum_parts(parts, d_bias)


def _parts_of(blocks: int, members: int, programs: int) -> int:
    """How many programs have a piece of one block, at most."""
    span = FILLING.value + members
    size, longer = divmod(blocks * span, programs)

    def piece_at(place: int) -> int:
        return place // (size + 1) if place < longer * (size + 1) else longer + (place - longer * (size + 1)) // size

    return max(piece_at((block + 1) * span - 1) - piece_at(block * span + FILLING.value) + 1 for block in range(blocks))


def _borrowed(count: int, d_bias: Tensor, spare: tuple[Tensor | None, ...]) -> Tensor:
    """So many times `d_bias` in float32, in the memory of one of the spare tensors if that is dense and has room; the tensor itself if one."""
    if count == 1:
        return d_bias
    shape = (count, *d_bias.shape[1:])
    for x in spare:
        if x is None or x.numel() * x.element_size() < 4 * count * d_bias.numel():
            continue
        dense = x.permute(sorted(range(4), key=lambda axis: -x.stride(axis)))
        if dense.is_contiguous():
            return dense.view(-1).view(torch.float32)[: count * d_bias.numel()].view(shape)
    return torch.empty(shape, dtype=torch.float32, device=d_bias.device)


@gluon.jit
def _resident_query_gradients_kernel(
    q, k, v, d_out, terms, bias, rules, d_q, parts, part_count, block_count, sharing_heads, members, len_q, len_k,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """One program: a piece of the work, from a grid of one axis. Blocks are counted by queries fastest, then heads of the bias."""
    follow()
    DIM: gl.constexpr = q.block_shape[3]
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [STAGES, 1, 1, BLOCK_M, DIM], d_out.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [CONSUMERS * STAGES, 1, 1, KEYS, DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [CONSUMERS * STAGES, 1, 1, KEYS, DIM], v.layout)
    kept = ()
    for _ in gl.static_range(CONSUMERS):
        kept += (allocate_bias(bias, KEYS // CHUNK, True),)
    d_q_tile = q_tiles.index(0)  # nobody's, unless there is dQ to store
    if d_q is not None:
        d_q_tile = gl.allocate_shared_memory(d_q.dtype, [1, 1, BLOCK_M, DIM], d_q.layout)
    bias_full = barriers(CONSUMERS, 1)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, CONSUMERS)
    sums_full = barriers(STAGES, CONSUMERS - 1)
    fence_async_shared()
    tiles = (q_tiles, k_tiles, v_tiles, d_out_tiles, d_q_tile)
    ready = (full, free, sums_full, bias_full)
    sizes = (part_count, block_count, sharing_heads, members, len_q, len_k)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (tiles, kept[0], ready, bias, rules, terms, d_q, parts, sizes, 0)),
                (_consume, (tiles, kept[1], ready, bias, rules, terms, d_q, parts, sizes, 1)),
                (_produce, (q, k, v, d_out, tiles, ready, sizes)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tiles, kept[0], ready, bias, rules, terms, d_q, parts, sizes, 0)),
                (_consume, (tiles, kept[1], ready, bias, rules, terms, d_q, parts, sizes, 1)),
                (_consume, (tiles, kept[2], ready, bias, rules, terms, d_q, parts, sizes, 2)),
                (_produce, (q, k, v, d_out, tiles, ready, sizes)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_THREE, CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )


@gluon.jit
def _piece(block_count, members):
    """[begin, end) of the program's piece of the line; the first pieces may have one place more than the others."""
    total = block_count * (FILLING + members)
    size = total // gl.num_programs(0)
    longer = total % gl.num_programs(0)
    program = gl.program_id(0)
    begin = program * size + gl.minimum(program, longer)
    return begin, begin + size + gl.where(program < longer, 1, 0)


@gluon.jit
def _members_of(block, begin, end, members):
    """[first, last) of the members of a block that are in a piece; the first places of a block are for its start."""
    zeroth = block * (FILLING + members) + FILLING
    return gl.maximum(begin - zeroth, 0), gl.minimum(end - zeroth, members)


@gluon.jit
def _piece_at(place, block_count, members):
    """Whose piece a place on the line is in."""
    total = block_count * (FILLING + members)
    size = total // gl.num_programs(0)
    longer = total % gl.num_programs(0)
    return gl.where(place < longer * (size + 1), place // (size + 1), longer + (place - longer * (size + 1)) // size)


@gluon.jit
def _produce(q, k, v, d_out, tiles, ready, sizes):
    """Copy each member to shared memory, as far ahead as there are free stages."""
    q_tiles, k_tiles, v_tiles, d_out_tiles, _ = tiles
    full, free, _, _ = ready
    _, block_count, sharing_heads, members, len_q, len_k = sizes
    CONSUMERS: gl.constexpr = k_tiles.shape[0] // STAGES
    BYTES: gl.constexpr = q.block_type.nbytes + d_out.block_type.nbytes + CONSUMERS * (k.block_type.nbytes + v.block_type.nbytes)
    blocks = gl.cdiv(len_q, BLOCK_M)
    begin, end = _piece(block_count, members)
    turn = 0
    for block in range(begin // (FILLING + members), gl.cdiv(end - FILLING, FILLING + members)):
        row = block % blocks * BLOCK_M
        first, last = _members_of(block, begin, end, members)
        for member in range(first, last):
            this = member_of(Sequence(0, block // blocks, len_q, len_k), member, sharing_heads)
            stage, parity = stage_of(turn, STAGES)
            mbarrier.wait(free.index(stage), parity ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            copy(q, [this.batch, this.head, row, 0], full.index(stage), q_tiles.index(stage))
            copy(d_out, [this.batch, this.head, row, 0], full.index(stage), d_out_tiles.index(stage))
            for i in gl.static_range(CONSUMERS):
                copy(k, [this.batch, this.head, i * KEYS, 0], full.index(stage), k_tiles.index(CONSUMERS * stage + i))
                copy(v, [this.batch, this.head, i * KEYS, 0], full.index(stage), v_tiles.index(CONSUMERS * stage + i))
            turn += 1


@gluon.jit
def _consume(tiles, memory, ready, bias, rules, terms, d_q, parts, sizes, which: gl.constexpr):
    """KEYS keys of each block of queries, those in place `which`."""
    part_count, block_count, sharing_heads, members, len_q, len_k = sizes
    CHUNKS: gl.constexpr = KEYS // CHUNK
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    index = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))
    zero = gl.full([BLOCK_M, CHUNK], 0.0, gl.float32, PAIRS)
    blocks = gl.cdiv(len_q, BLOCK_M)
    begin, end = _piece(block_count, members)
    _, free, _, bias_full = ready
    turn = 0
    parity = 0
    for block in range(begin // (FILLING + members), gl.cdiv(end - FILLING, FILLING + members)):
        row = block % blocks * BLOCK_M
        seq = Sequence(0, block // blocks, len_q, len_k)  # of the slice
        first, last = _members_of(block, begin, end, members)
        slice_seq = member_of(seq, 0, sharing_heads)
        kept = keep_bias(memory, bias, bias_full.index(which), parity, rules, slice_seq, row, which * KEYS, CHUNK, PAIRS, False, True)
        parity ^= 1
        fixed = (tiles, kept, ready, rules, rules.scale * LOG2E)
        totals = ()
        for _chunk in gl.static_range(CHUNKS):
            totals += (zero,)
        vectors = _terms(terms, member_of(seq, first, sharing_heads), row, index)
        for member in range(first, last):
            further = gl.minimum(member + 1, last - 1)  # whose vectors are asked for a member ahead
            next_vectors = _terms(terms, member_of(seq, further, sharing_heads), row, index)
            dq, totals = _member(fixed, vectors, totals, turn, which, PAIRS)
            vectors = next_vectors
            if d_q is not None:
                _give(dq, tiles, ready, rules, d_q, member_of(seq, member, sharing_heads), row, turn, which)
            mbarrier.arrive(free.index(turn % STAGES), count=1)
            turn += 1
        if parts is not None:
            part = gl.program_id(0) - _piece_at(block * (FILLING + members) + FILLING, block_count, members)
            _store(parts, part, seq.head, row, which * KEYS, len_q, len_k, totals, PAIRS)
            if last == members:  # the last piece of a block writes the parts that it does not have
                zeros = ()
                for _zero in gl.static_range(CHUNKS):
                    zeros += (zero,)
                for unused in range(part + 1, part_count):
                    _store(parts, unused, seq.head, row, which * KEYS, len_q, len_k, zeros, PAIRS)
    if d_q is not None and which == 0:
        tma.store_wait(0)


@gluon.jit
def _terms(terms, seq, row, index):
    """The terms of queries (`row_terms.Incoming`): what scores are lessened by, and delta."""
    vectors = slice_pointer(terms, seq) + row + index
    return gl.load(vectors), gl.load(vectors + terms.row)


@gluon.jit
def _member(fixed, vectors, totals, turn, which: gl.constexpr, PAIRS: gl.constexpr):
    """(the consumer's share of one member's dQ, the totals with its dS)."""
    tiles, kept, ready, rules, factor = fixed
    q_tiles, k_tiles, v_tiles, d_out_tiles, _ = tiles
    full, _, _, _ = ready
    subtrahend, minus = vectors
    CONSUMERS: gl.constexpr = k_tiles.shape[0] // STAGES
    DIM: gl.constexpr = q_tiles.shape[4]
    DTYPE: gl.constexpr = q_tiles.dtype
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, PAIRS, 2)
    zero = gl.full([BLOCK_M, CHUNK], 0.0, gl.float32, PAIRS)
    stage, parity = stage_of(turn, STAGES)
    bias = bias_of(kept, 0, rules, PAIRS)
    mbarrier.wait(full.index(stage), parity)
    q_tile = q_tiles.index(stage).reshape([BLOCK_M, DIM]).load(FACTOR)
    d_out_tile = d_out_tiles.index(stage).reshape([BLOCK_M, DIM]).load(FACTOR)
    k_tile = k_tiles.index(CONSUMERS * stage + which).reshape([KEYS, DIM])
    v_tile = v_tiles.index(CONSUMERS * stage + which).reshape([KEYS, DIM])
    dq = gl.full([BLOCK_M, DIM], 0.0, gl.float32, OUT)
    further_totals = ()
    for i in gl.static_range(KEYS // CHUNK):
        k_part = k_tile.slice(i * CHUNK, CHUNK)
        if i > 0:
            bias = bias_of(kept, i, rules, PAIRS)
        s = warpgroup_mma(q_tile, k_part.permute((1, 0)), bias, is_async=True)
        v_part = v_tile.slice(i * CHUNK, CHUNK)
        d_p = warpgroup_mma(d_out_tile, v_part.permute((1, 0)), zero, use_acc=False, is_async=True)
        if i > 0:
            s, dq = warpgroup_mma_wait(1, [s, dq])
        else:
            s = warpgroup_mma_wait(1, [s])
        p = gl.exp2(s * factor - subtrahend[:, None])
        d_p = warpgroup_mma_wait(0, [d_p])
        ds = p * (d_p - minus[:, None])
        further_totals += (totals[i] + ds,)
        rounded = as_factor(rounded_pairs(ds, DTYPE), DTYPE, gl.DotOperandLayout(0, OUT, 2))
        dq = warpgroup_mma(rounded, k_part, dq, use_acc=i > 0, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    return dq, further_totals


@gluon.jit
def _give(dq, tiles, ready, rules, d_q, seq, row, turn, which: gl.constexpr):
    """A consumer's share of one member's dQ to the first one, in the place of its keys, and from that, dQ to its place."""
    _, k_tiles, _, _, d_q_tile = tiles
    _, _, sums_full, _ = ready
    CONSUMERS: gl.constexpr = k_tiles.shape[0] // STAGES
    OUT: gl.constexpr = dq.type.layout
    COUNT: gl.constexpr = dq.shape[1] // 8
    gl.static_assert(dq.shape[0] * 4 == KEYS * 2)
    sums = k_tiles._reinterpret(gl.float32, [CONSUMERS * STAGES, COUNT, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    stage, parity = stage_of(turn, STAGES)
    if which == 0:
        mbarrier.wait(sums_full.index(stage), parity)
        for i in gl.static_range(1, CONSUMERS):
            dq += by_rows(sums.index(CONSUMERS * stage + i).load(order_of(COUNT)), OUT)
        store_sums(d_q, d_q_tile, seq, row, dq * rules.scale)  # then the sums of the others are certainly read
    else:
        sync_threads()  # all have multiplied the keys
        sums.index(CONSUMERS * stage + which).store(by_threads(dq))
        fence_async_shared()
        mbarrier.arrive(sums_full.index(stage), count=1)


@gluon.jit
def _store(parts, part, bias_head, row, col, len_q, len_k, totals, PAIRS: gl.constexpr):
    """A consumer's sums to their part."""
    for i in gl.static_range(len(totals)):
        rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))
        cols = gl.arange(0, CHUNK, gl.SliceLayout(0, PAIRS))
        start = col + i * CHUNK
        pointers = slice_pointer(parts, Sequence(part, bias_head, len_q, len_k)) + gl.cast(row, gl.int64) * parts.row + start * parts.col
        inside = (rows < len_q - row)[:, None] & (cols < len_k - start)[None, :]
        gl.store(pointers + (rows * parts.row)[:, None] + (cols * parts.col)[None, :], totals[i].to(parts.ptr.dtype.element_ty), mask=inside)
