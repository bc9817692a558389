"""The gradient of a bias of pairs that several (batch, head) share: who shares a slice of it, and the kernel for every GPU."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.device import device_family, processors
from ..base.launch import launch
from ..base.layout import Sequence, Span, inside, load_rows, store_tile, strided
from ..base.leading import Spread, spread_of
from ..base.overlap import follow
from ..base.packed_blocks import packed_sequences
from ..base.parts import empty_parts, even_parts, sum_parts
from ..base.pieces import load_pieces
from ..base.place import member_of
from ..base.query_terms import Incoming
from ..base.rules import load_bias2, rules_of
from ..base.softmax import probabilities
from ..base.tiles import launch_options, pick
from ..base.timed_tiles import THREE_PROGRAMS, Tile
from ..base.window import all_in_window, any_in_window
from ..visits.intervals import any_live_interval
from ..visits.mask_blocks import tile_state

PROGRAMS_PER_PROCESSOR = 4
MEMORY_SHARE = 0.05  # of the bytes that the backward pass reads, which the parts of a sum may take
# NVIDIA H200, 2026-11-28: the backward pass of 64 rows of 64, 4 heads, beside a shared bias 0.040 to 0.018 ms in 16 parts instead of 3.
LITTLE_MEMORY = 1 << 20  # bytes that they may take in any case, as few parts leave most processors idle
# The same where more parts of a kernel by blocks end sooner. NVIDIA H200, 2026-11-28, backward: a bias that all 260 (batch, head) share, 1024 x
# 1024, 0.99 to 0.74 ms in 2 parts; 168 of them, causal, 577 x 577, 0.41 to 0.26 in 6 instead of 2 (shared_and_capped_nvidia_h200.json).
MEMORY_OF_FEW = 8 << 20
NARROW = 32  # dims of a head to which three programs on a processor may have registers enough
PACE_OF_MORE, PACE_BESIDE_A_MASK = 1.3, 1.5  # time of three programs on a processor, that of two being 1


class Sharing(NamedTuple):
    """Who shares one slice (Sq, Sk) of a bias: the members, (batch, head) pairs, and over how many programs they are split."""

    batch: int  # slices on the batch axis
    sharing_heads: int  # neighbouring query heads with the same slice
    members: int
    splits: int
    spread: Spread | None = None  # of slices with some of the leading axes
    together: int = 1  # neighbouring members that are one program's

    @classmethod
    def of(cls, d_bias: Tensor, problem: Problem, tiles: int, programs_per_processor: int, together: int = 1) -> Sharing:
        """That of a gradient made of `tiles` tiles. Split only as far as is needed to fill the GPU and as memory is worth it."""
        batch, heads = problem.query.shape[:2]
        bias_batch, bias_heads = d_bias.shape[:2]
        members = batch // bias_batch * (heads // bias_heads)
        fill = programs_per_processor * processors(problem.query.device) // tiles
        splits = even_parts(members // together, min(fill, _room(problem, d_bias, LITTLE_MEMORY)))
        return cls(bias_batch, heads // bias_heads, members, splits, spread_of(problem.bias), together)

    def evened(self, problem: Problem, d_bias: Tensor, tiles: int) -> Sharing:
        """Split further where the tiles leave some processors a program more than others, as far as memory is worth it: into the fewest parts
        whose rounds of a program to a processor take as few steps as any, or hardly more. A program takes one for each member, and one besides.

        NVIDIA H200, 2026-11-23: 288 tiles on 132 processors in 4 parts instead of 1, the backward pass of 768 rows of 384 beside a mask of
        keys 2.21 to 1.81 ms. Where parts fill the GPU anyway, more of them were no faster.
        """
        count, least = processors(problem.query.device), self.splits
        if least > 1 and least * tiles >= PROGRAMS_PER_PROCESSOR * count:
            return self
        most = min(_room(problem, d_bias, MEMORY_OF_FEW), self.members, 4 * PROGRAMS_PER_PROCESSOR * count // tiles)
        if most <= least:
            return self
        steps = {parts: triton.cdiv(tiles * parts, count) * (triton.cdiv(self.members, parts) + 1) for parts in range(least, most + 1)}
        return self._replace(splits=even_parts(self.members, next(parts for parts in steps if steps[parts] <= 1.05 * min(steps.values()))))

    @classmethod
    def of_nothing(cls, problem: Problem, programs_per_processor: int, group: int = 1) -> Sharing:
        """Where no sum is kept: the members of so many neighbouring heads are those of their batch entries, split as far as is needed to fill
        the GPU.
        """
        batch, heads = problem.query.shape[:2]
        fill = programs_per_processor * processors(problem.query.device) // (heads // group)
        return cls(1, group, batch * group, even_parts(batch, fill), together=group)

    def sequences(self, problem: Problem) -> Tensor | None:
        """The list of packed sequences where all of them share a slice. Their members are all of one sequence else."""
        return packed_sequences(problem) if self.batch == 1 else None

    @property
    def argument(self) -> tuple[int, int, int, int]:
        """That of a kernel whose programs walk members: slices on the batch axis, heads to a slice, members, members to a part."""
        each = triton.cdiv(self.members // self.together, self.splits) * self.together
        return self.batch, self.sharing_heads, self.members, each


def _registers(problem: Problem, tile: Tile, programs: int) -> int:
    """The most registers of a thread: beside a mask of keys, and of whole heads of 32 dims beside no mask, the compiler takes those of two
    programs on a processor, and can do with three's.

    With further rules or in float32 it would spill. Beside a mask three take half as long again as two, and end sooner where their last wave is
    fuller. NVIDIA H200, 2026-11-27: the backward pass of 768 rows of 768 of head dim 32 beside a mask of keys 3.88 to 3.46 ms. 2026-11-30:
    dBias of (36, 8, 2048², 32) that heads share 1.22 to 1.04, of 2001² 1.46 to 1.26, of (36, 8, 1001²) that entries share 0.235 to 0.214.
    """
    device, head_dim = problem.query.device, max(problem.query.shape[3], problem.value.shape[3])
    by_key = problem.mask is not None and problem.mask.shape[2] == 1
    is_whole = problem.mask is None and problem.query.shape[3] == problem.value.shape[3] == NARROW
    others = (problem.left, problem.right, problem.first, problem.bits, problem.seed, problem.softcap, problem.ends_q)
    is_timed = device_family(device) == "sm_90" and problem.query.dtype.itemsize == 2 and head_dim <= NARROW and tile.warps == 4
    if not (is_timed and (by_key or is_whole) and others == (None,) * len(others)):
        return tile.registers
    waves_of_two, waves_of_three = (triton.cdiv(programs, each * processors(device)) for each in (2, 3))
    return THREE_PROGRAMS if (PACE_OF_MORE if is_whole else PACE_BESIDE_A_MASK) * waves_of_three < waves_of_two else tile.registers


def _room(problem: Problem, d_bias: Tensor, least: int) -> int:
    """How many parts of a gradient memory is worth, of which so many bytes are there in any case."""
    return int(bytes_for_parts(problem, least) / (4 * d_bias.numel()))


def bytes_for_parts(problem: Problem, least: int) -> float:
    """What parts of a gradient may take, `least` of it in any case."""
    return max(MEMORY_SHARE * _bytes_read(problem), least)


def sharing_of(problem: Problem, d_bias: Tensor) -> Sharing:
    """That of the kernel below."""
    tiles = tiles_of(d_bias, *pick("bias", problem)[:2])
    return Sharing.of(d_bias, problem, tiles, PROGRAMS_PER_PROCESSOR).evened(problem, d_bias, tiles)


def states_by_pairs(problem: Problem) -> Tensor | None:
    """The states of a mask that differs among queries, by which members without a pair of a tile are left out; else None.

    To look at those of a mask by key, as Hopper's kernel does, was slower here (docs/history.md, "A shared dBias beside masks").
    """
    return problem.states if problem.is_masked and (problem.bits is not None or problem.mask.shape[2] > 1) else None


def tiles_of(d_bias: Tensor, block_m: int, block_n: int) -> int:
    """How many tiles of so many queries and keys a gradient has."""
    bias_batch, bias_heads, len_q, len_k = d_bias.shape
    return triton.cdiv(len_q, block_m) * triton.cdiv(len_k, block_n) * bias_batch * bias_heads


def shared_gradient(problem: Problem, incoming: Incoming, d_bias: Tensor) -> None:
    """Fill `d_bias` (entries of the bias, H or Hk or 1, Sq, Sk)."""
    heads, bias_heads = problem.query.shape[1], d_bias.shape[1]
    tile, sharing = pick("bias", problem), sharing_of(problem, d_bias)
    parts, programs = empty_parts(d_bias, sharing.splits), tiles_of(d_bias, *tile[:2]) * sharing.splits
    tile = tile._replace(registers=_registers(problem, tile, programs))
    launch(
        _shared_gradient_kernel,
        programs,
        rules=rules_of(problem, states=states_by_pairs(problem), packed_blocks=sharing.sequences(problem)),
        incoming=incoming.strided(heads),
        parts=strided(parts, bias_heads),
        sharing=sharing.argument,
        spread=sharing.spread,
        **launch_options(problem, tile, incoming.d_out, parts),
    )
    sum_parts(parts, d_bias)


@triton.jit
def _shared_gradient_kernel(
    q, k, v, rules, incoming, parts, sharing, spread, heads, len_q, len_k,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one tile of dBias of one bias entry, summed over its share of the (batch, head) members, stored once.

    Grid of one axis: blocks of queries fastest, then blocks of keys, bias heads, bias batch entries, parts.
    """
    follow()
    d_out, lse, delta = incoming
    slice_batch, sharing_heads, members, members_per_part = sharing
    program = tl.program_id(0)
    blocks_m = tl.cdiv(len_q, BLOCK_M)
    blocks_n = tl.cdiv(len_k, BLOCK_N)
    bias_heads = heads // sharing_heads
    rows = Span(program % blocks_m * BLOCK_M, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else len_q)
    cols = Span(program // blocks_m % blocks_n * BLOCK_N, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else len_k)
    bias_head = program // (blocks_m * blocks_n) % bias_heads
    part_entry = program // (blocks_m * blocks_n) // bias_heads
    entry = part_entry % slice_batch
    part = part_entry // slice_batch
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM % BLOCK_D == 0 else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM % BLOCK_DV == 0 else VALUE_DIM)
    PIECES: tl.constexpr = ((HEAD_DIM - 1) // BLOCK_D + 1, (VALUE_DIM - 1) // BLOCK_DV + 1)
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    begin = part * members_per_part
    end = tl.minimum(begin + members_per_part, members)
    of_slice = Sequence(entry, bias_head, len_q, len_k)
    tensors = (q, k, v, d_out, lse, delta)
    if rules.ends is None:
        if not any_in_window(rules.left, rules.right, of_slice, rows.start, cols.start, BLOCK_M, BLOCK_N):
            begin = end
        if rules.states is not None or rules.first is not None:  # most tiles may have no pair in any member: they read no bias
            has_pairs = begin > end  # not yet
            while (begin < end) & (not has_pairs):
                has_pairs = _has_pairs(rules, member_of(None, of_slice, begin, sharing_heads, spread), rows, cols, BLOCK_M, BLOCK_N)
                begin = tl.where(has_pairs, begin, begin + 1)
        if begin < end:
            bias2 = load_bias2(rules, member_of(None, of_slice, begin, sharing_heads, spread), rows, cols, KEYS_DOWN=False)  # every member's
            for member in tl.range(begin, end):
                seq = member_of(None, of_slice, member, sharing_heads, spread)
                total = add_member(total, tensors, rules, seq, rows, cols, bias2, dims, value_dims, PIECES, PRECISION=PRECISION)
    else:  # by turns, up to the first sequence that is too short: those after it are, too
        bias2 = load_bias2(rules, member_of(rules.ends, of_slice, 0, sharing_heads, spread), rows, cols, KEYS_DOWN=False)  # every member's
        member = part
        while member < members:
            seq = member_of(rules.ends, of_slice, member, sharing_heads, spread, rules.packed_blocks)
            reaches = rows.start < seq.len_q
            if reaches & (cols.start < seq.len_k) & any_in_window(rules.left, rules.right, seq, rows.start, cols.start, BLOCK_M, BLOCK_N):
                own_rows, own_cols = Span(rows.start, rows.index, seq.len_q), Span(cols.start, cols.index, seq.len_k)
                total = add_member(total, tensors, rules, seq, own_rows, own_cols, bias2, dims, value_dims, PIECES, PRECISION=PRECISION)
            member = tl.where(reaches, member + tl.cdiv(members, members_per_part), members)
    store_tile(parts, Sequence(part_entry, bias_head, len_q, len_k), rows, cols, total)


@triton.jit
def _has_pairs(rules, seq, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether a mask or intervals leave a pair of the tile in one member."""
    if rules.states is not None:
        return tile_state(rules.states, seq, rows, cols, BLOCK_M, BLOCK_N)[0]
    else:
        return any_live_interval(rules, seq, rows, cols, BLOCK_M)


@triton.jit
def add_member(total, tensors, rules, seq, rows, cols, bias2, dims, value_dims, PIECES: tl.constexpr, PRECISION: tl.constexpr):
    """`total` with dS of the tile in one member, where the mask or intervals leave a pair."""
    BLOCK_M: tl.constexpr = total.shape[0]
    BLOCK_N: tl.constexpr = total.shape[1]
    if rules.states is not None:
        live, full = tile_state(rules.states, seq, rows, cols, BLOCK_M, BLOCK_N)
        if full & all_in_window(rules.left, rules.right, seq, rows.start, cols.start, BLOCK_M, BLOCK_N):
            total += _member(tensors, rules, seq, rows, cols, bias2, dims, value_dims, PIECES, EDGE=False, PRECISION=PRECISION)
        elif live:
            total += _member(tensors, rules, seq, rows, cols, bias2, dims, value_dims, PIECES, EDGE=True, PRECISION=PRECISION)
    elif rules.first is not None:
        if any_live_interval(rules, seq, rows, cols, BLOCK_M):
            total += _member(tensors, rules, seq, rows, cols, bias2, dims, value_dims, PIECES, EDGE=True, PRECISION=PRECISION)
    else:
        total += _member(tensors, rules, seq, rows, cols, bias2, dims, value_dims, PIECES, EDGE=True, PRECISION=PRECISION)
    return total


@triton.jit
def _member(tensors, rules, seq, rows, cols, bias2, dims, value_dims, PIECES: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr):
    """dS of the tile in one member."""
    q, k, v, d_out, lse, delta = tensors
    q_tiles = load_pieces(q, seq, rows, dims, PIECES[0])
    k_tiles = load_pieces(k, seq, cols, dims, PIECES[0])
    v_tiles = load_pieces(v, seq, cols, value_dims, PIECES[1])
    d_out_tiles = load_pieces(d_out, seq, rows, value_dims, PIECES[1])
    lse_rows = load_rows(lse, seq, rows, float("-inf"))
    delta_rows = load_rows(delta, seq, rows, 0.0)
    tile = probabilities(
        q_tiles, k_tiles, v_tiles, d_out_tiles, lse_rows, rules, seq, rows, cols, EDGE=EDGE, KEYS_DOWN=False, PRECISION=PRECISION, bias2=bias2
    )
    p = tile.p
    if rules.ends is not None:  # a row past the end has a bias, which may be NaN
        p = tl.where(inside(rows)[:, None], p, 0.0)
    return p * (tile.d_p - delta_rows[:, None])


def _bytes_read(problem: Problem) -> int:
    """Of query, key, value, bias, out and d_out, the last two of which have a row for each query's as long as a value's."""
    query, value = problem.query, problem.value
    outs = 2 * (query.numel() // query.shape[3]) * value.shape[3] * query.element_size()
    return outs + sum(x.numel() * x.element_size() for x in (query, problem.key, value, problem.bias))
