"""The gradient of a table of distances: dS summed over all pairs of a distance, without atomics.

Tiles whose first pairs have one distance form a band: they see the same numbers of the table at the same spots. A program adds their dS tile on
tile in registers, over queries, batch entries and heads that share the table, and in the end sums the tile along its diagonals. Only bands with
a pair strictly between the ends of the table are walked. Most pairs take one of the ends, whose sums are made beside dQ (`query_grad`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Sizes
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...broadcast import sum_to
from ...problem import Problem
from ..base.launch import launch
from ..base.layout import Sequence, Span, SpanFromBefore, sequence
from ..base.leading import spread_of
from ..base.overlap import follow
from ..base.packed_blocks import packed_blocks
from ..base.place import listed_block, member_of
from ..base.query_terms import Incoming
from ..base.rules import Rules, load_bias2, place_of_first, rules_of
from ..base.tiles import Tile, launch_options, pick
from .bias_grad import add_member

PROGRAMS = 4096  # about: a constant, so that the order of sums follows from shapes alone


class Bands(NamedTuple):
    """The bands with a pair that may be visible, and that is strictly between the ends of the table."""

    first_place: int  # of the first pair of a tile of the first band; those of the next are BLOCK_N further on
    count: int
    tiles: int  # of a band, at most

    @classmethod
    def of(cls, problem: Problem, block_m: int, block_n: int) -> Bands:
        """Those of a problem with a table."""
        assert problem.bias is not None
        assert problem.zero is not None
        len_q, len_k, length, zero = problem.query.shape[2], problem.key.shape[2], problem.bias.shape[3], problem.zero
        if problem.ends_q is not None:
            return cls._of_packed(problem, block_m, block_n)
        origin = zero - (len_k - len_q)
        blocks_m, blocks_n = triton.cdiv(len_q, block_m), triton.cdiv(len_k, block_n)
        lowest = max(2 - block_n, origin - (blocks_m - 1) * block_m)
        highest = min(length - 3 + block_m, origin + (blocks_n - 1) * block_n)
        if problem.left is not None:
            lowest = max(lowest, zero - problem.left - block_n + 1)
        if problem.right is not None:
            highest = min(highest, zero + problem.right + block_m - 1)
        first = origin + triton.cdiv(lowest - origin, block_n) * block_n
        tiles = min(blocks_m, triton.cdiv(blocks_n * block_n, block_m))
        return cls(first, max(0, (highest - first) // block_n + 1) if length > 2 and tiles else 0, tiles)

    @classmethod
    def _of_packed(cls, problem: Problem, block_m: int, block_n: int) -> Bands:
        """Those of sequences of any lengths up to the longest, in which tiles begin at any key, or before the first."""
        assert problem.bias is not None
        assert problem.zero is not None
        len_q, len_k, length, zero = problem.query.shape[2], problem.key.shape[2], problem.bias.shape[3], problem.zero
        left = len_k - 1 if problem.left is None else min(problem.left, len_k - 1)
        right = len_q - 1 if problem.right is None else min(problem.right, len_q - 1)
        first = max(2 - block_n, zero - left - block_n + 1)
        highest = min(length - 3 + block_m, zero + right + block_m - 1)
        tiles = min(triton.cdiv(len_q, block_m), triton.cdiv(len_k + block_n - 1, block_m))
        return cls(first, max(0, (highest - first) // block_n + 1) if length > 2 and tiles else 0, tiles)


def table_gradient(problem: Problem, incoming: Incoming, end_sums: Tensor, d_table: Tensor, leading: Sizes[int]) -> None:
    """Fill `d_table` (..., H or Hk or 1, 1, R), which has the `leading` axes of the call, each full or 1.

    `end_sums` (2, B, H, Sq) are those of :func:`.query_grad.query_gradients`.
    """
    slice_heads, length = d_table.shape[-3], d_table.shape[-1]
    slices = math.prod(d_table.shape[:-3])
    tile = tile_of(problem)
    bands = Bands.of(problem, tile.block_m, tile.block_n)
    of_queries = end_sums.view(2, *leading, *end_sums.shape[2:], 1)
    ends = sum_to(of_queries, (2, *d_table.shape[:-2], 1, 1))
    parts = _band_parts(problem, incoming, (slices, slice_heads), tile, bands) if bands.count else None
    lowest = bands.first_place + 1 - tile.block_m  # the place of the first diagonal of the first band
    first = -lowest // tile.block_n  # block of places, from there
    launch(
        _table_kernel,
        (triton.cdiv(length - lowest, tile.block_n) - first) * slices * slice_heads,
        parts=parts,
        ends=ends,
        d_table=d_table,
        places=(lowest, first, length),
        bands=bands.count,
        splits=1 if parts is None else parts.shape[1],
        slices=slices * slice_heads,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=1,
    )


def tile_of(problem: Problem) -> Tile:
    """The tile of a shared dBias, with at least as many queries as keys: sums along diagonals ask for that."""
    tile = pick("bias", problem, is_frozen=True)  # `dmattn tune` times the kernel of a shared bias with it
    return tile if tile.block_m >= tile.block_n else tile._replace(block_m=tile.block_n, block_n=tile.block_m)


def _band_parts(problem: Problem, incoming: Incoming, slices_of: tuple[int, int], tile: Tile, bands: Bands) -> Tensor:
    """The diagonals of bands: (slices, parts of a band, bands, BLOCK_M + BLOCK_N), float32."""
    (batch, heads), (slice_batch, slice_heads) = problem.query.shape[:2], slices_of
    slices = slice_batch * slice_heads
    members = batch * heads // slices
    packed = packed_blocks(problem, tile.block_m) if slice_batch == 1 else None
    if packed is not None:  # as if they were one batch entry
        members, bands = heads // slice_heads, bands._replace(tiles=packed.shape[0])
    longest = bands.tiles * members
    steps = triton.cdiv(longest, min(longest, max(1, PROGRAMS // (bands.count * slices))))
    parts = torch.empty(
        (slices, triton.cdiv(longest, steps), bands.count, tile.block_m + tile.block_n), dtype=torch.float32, device=problem.query.device
    )
    launch(
        _bands_kernel,
        bands.count * parts.shape[1] * slices,
        rules=_rules_of(problem, packed),
        incoming=incoming.strided(heads),
        parts=parts,
        sharing=(slice_batch, heads // slice_heads, members),
        spread=spread_of(problem.bias),
        bands=(bands.first_place, bands.count, steps, None if problem.ends_q is None else bands.tiles),
        **launch_options(problem, tile, incoming.d_out),
    )
    return parts


def _rules_of(problem: Problem, packed: Tensor | None) -> Rules:
    if problem.ends_q is not None:
        return rules_of(problem, unaligned=1, packed_blocks=packed)  # with states of blocks that begin elsewhere
    return rules_of(problem, states=problem.states if problem.is_masked else None)


@triton.jit
def _bands_kernel(
    q, k, v, rules, incoming, parts, sharing, spread, bands, heads, len_q, len_k,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dS of one part of a band, added tile on tile, then along diagonals to BLOCK_M + BLOCK_N numbers of parts.

    The steps of a band are its tiles in one of the members, (batch, head) that share the slice of the table, then those in the next. Tiles of
    packed sequences may begin at keys before the first. Where these share the table, the steps are their listed blocks of queries under one
    head, then the next; else as many whatever the lengths. A part is so many steps; those past the end of a short band store zeros. Grid of
    one axis: bands fastest, then parts, heads of slices, batch entries of slices.
    """
    follow()
    d_out, lse, delta = incoming
    _slice_batch, sharing_heads, members = sharing
    first_place, count, steps, most_tiles = bands
    program = tl.program_id(0)
    slice_heads = heads // sharing_heads
    splits = tl.num_programs(0) // (count * slice_heads * _slice_batch)
    band = program % count
    part = program // count % splits
    number = program // count // splits
    of_slice = Sequence(number // slice_heads, number % slice_heads, len_q, len_k)
    first_seq = member_of(rules.ends, of_slice, 0, sharing_heads, spread)
    shift = first_place + band * BLOCK_N - place_of_first(rules, first_seq, 0, 0)  # from the first query of a tile to its first key
    first_row = tl.cdiv(tl.maximum(-shift, 0), BLOCK_M) * BLOCK_M
    if rules.ends is None:
        tiles = tl.cdiv(tl.maximum(tl.minimum(len_q, len_k - shift) - first_row, 0), BLOCK_M)
    else:
        tiles = most_tiles  # of which a sequence may have fewer
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM % BLOCK_D == 0 else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM % BLOCK_DV == 0 else VALUE_DIM)
    PIECES: tl.constexpr = ((HEAD_DIM - 1) // BLOCK_D + 1, (VALUE_DIM - 1) // BLOCK_DV + 1)
    row_index, col_index = tl.arange(0, BLOCK_M).to(INDEX), tl.arange(0, BLOCK_N).to(INDEX)
    tensors = (q, k, v, d_out, lse, delta)
    first_rows, first_cols = Span(first_row, row_index, None), Span(first_row + shift, col_index, None)
    bias2 = load_bias2(rules, first_seq, first_rows, first_cols, KEYS_DOWN=False)  # every tile's
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for step in tl.range(part * steps, tl.minimum(part * steps + steps, tiles * members)):
        if rules.packed_blocks is None:
            seq = member_of(rules.ends, of_slice, step // tiles, sharing_heads, spread)
        else:
            block, batch = listed_block(rules.packed_blocks, step % tiles)
            seq = sequence(rules.ends, batch, of_slice.head * sharing_heads + step // tiles, len_q, len_k)
        if rules.ends is None:
            row = first_row + step % tiles * BLOCK_M
            rows = Span(row, row_index, None if EVEN_M else len_q)
            cols = Span(row + shift, col_index, None if EVEN_N else len_k)
            total = add_member(total, tensors, rules, seq, rows, cols, bias2, dims, value_dims, PIECES, PRECISION=PRECISION)
        else:
            own_shift = first_place + band * BLOCK_N - place_of_first(rules, seq, 0, 0)
            if rules.packed_blocks is None:
                own_first = tl.cdiv(tl.maximum(1 - BLOCK_N - own_shift, 0), BLOCK_M) * BLOCK_M
                row = own_first + step % tiles * BLOCK_M
            else:
                row = block * BLOCK_M
            col = row + own_shift
            if (row < seq.len_q) & (col < seq.len_k) & (col > -BLOCK_N):
                rows, cols = Span(row, row_index, seq.len_q), SpanFromBefore(col, col_index, seq.len_k, 0)
                total = add_member(total, tensors, rules, seq, rows, cols, bias2, dims, value_dims, PIECES, PRECISION=PRECISION)
    store_diagonals(parts + tl.cast((number * splits + part) * count + band, tl.int64) * (BLOCK_M + BLOCK_N), total)


@triton.jit
def store_diagonals(pointer, total):
    """Write the sums of a tile along its diagonals, of the last row's first pair first. BLOCK_M is BLOCK_N times a power of 2.

    Each row is turned left by its number and 1, which brings the pairs of a diagonal into one column. Diagonals whose places differ by BLOCK_N
    share a column, and are told apart by how often the turn went round.
    """
    BLOCK_M: tl.constexpr = total.shape[0]
    BLOCK_N: tl.constexpr = total.shape[1]
    turn = tl.arange(0, BLOCK_M)[:, None] + tl.arange(0, BLOCK_N)[None, :] + 1
    turned = tl.gather(total, turn & (BLOCK_N - 1), 1)
    for ROUNDS in tl.static_range(BLOCK_M // BLOCK_N + 1):
        sums = tl.sum(tl.where(turn // BLOCK_N == ROUNDS, turned, 0.0), 0)  # [BLOCK_N]
        tl.store(pointer + BLOCK_M - ROUNDS * BLOCK_N + tl.arange(0, BLOCK_N), sums)


@triton.jit
def _table_kernel(parts, ends, d_table, places, bands, splits, slices, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program: BLOCK_N neighbouring places of one slice of the table, from the parts of the bands that see them, in order.

    The first and the last place have the sums of the `ends` alone. Grid of one axis: blocks of places fastest, then slices.
    """
    follow()
    lowest, first, length = places
    blocks = tl.num_programs(0) // slices
    block = first + tl.program_id(0) % blocks
    number = tl.program_id(0) // blocks
    index = tl.arange(0, BLOCK_N)
    place = lowest + block * BLOCK_N + index
    total = tl.full([BLOCK_N], 0.0, tl.float32)
    if parts is not None:
        for BACK in tl.static_range(BLOCK_M // BLOCK_N + 1):
            band = block - BACK
            if (band >= 0) & (band < bands):
                for part in tl.range(0, splits):
                    pointer = parts + tl.cast((number * splits + part) * bands + band, tl.int64) * (BLOCK_M + BLOCK_N)
                    total += tl.load(pointer + BACK * BLOCK_N + index)
    total = tl.where((place > 0) & (place < length - 1), total, 0.0)
    total += tl.where(place == 0, tl.load(ends + number), 0.0)
    total += tl.where(place == length - 1, tl.load(ends + slices + number), 0.0)
    inside = (place >= 0) & (place < length)
    tl.store(d_table + tl.cast(number, tl.int64) * length + place, total.to(d_table.dtype.element_ty), mask=inside)
