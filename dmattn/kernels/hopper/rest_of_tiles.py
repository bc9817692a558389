"""Tiles of a shared dBias that are left over when every processor has had as many as the others: several programs make each of them.

A processor makes one tile at once, over all members of a slice. Of 140 tiles on 132 processors 8 would keep most of the GPU waiting for as
long as the 132 before them took. Programs share their members instead, and their sums are added in order. So parts take memory for the tiles
left over alone. Where tiles are fewer than processors all are left over, and parts are whole gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Sequence, Span, store_tile, strided
from ..base.overlap import follow
from ..base.parts import empty_parts, even_parts, sum_parts
from ..portable.bias_grad import MEMORY_OF_FEW, Sharing, bytes_for_parts, tiles_of
from .members import BLOCK_M, BLOCK_N

QUERIES, KEYS = 2 * BLOCK_M.value, BLOCK_N.value  # of a tile
WORTH_WHILE = 0.95  # of the steps of whole tiles, at most, for parts of some
MOST_ROUNDS = 4  # of parts
ROWS = 16  # of a program that adds parts


class Division(NamedTuple):
    """How many tiles are whole, how many are left over, and how many programs make each of those: 1 where none is left over."""

    whole: int
    rest: int
    parts: int

    @property
    def programs(self) -> int:
        return self.whole + self.rest * self.parts

    @property
    def are_all(self) -> bool:
        """Whether every tile is left over."""
        return self.whole == 0 and self.rest > 0

    def empty(self, d_bias: Tensor) -> Tensor | None:
        """Room for the parts, in float32: (parts, rest, QUERIES, KEYS), or of all tiles as `empty_parts` has it."""
        if self.rest == 0:
            return None
        if self.are_all:
            return empty_parts(d_bias, self.parts)
        return torch.empty((self.parts, self.rest, QUERIES, KEYS), dtype=torch.float32, device=d_bias.device)

    def bytes(self, d_bias: Tensor) -> int:
        """What that takes."""
        return 4 * self.parts * (d_bias.numel() if self.are_all else self.rest * QUERIES * KEYS) if self.rest else 0


class Rest(NamedTuple):
    """Tiles left over, as a kernel argument."""

    first: Any  # the number of the first; those before it are whole
    count: Any
    parts: Any


def divided(problem: Problem, d_bias: Tensor) -> tuple[Sharing, Division]:
    """Who shares a slice of the bias, and the division of its gradient's tiles."""
    tiles = tiles_of(d_bias, QUERIES, KEYS)
    sharing = Sharing.of(d_bias, problem, tiles, 0)
    return sharing, divide(problem, d_bias, tiles, sharing.members)


def divide(problem: Problem, d_bias: Tensor, tiles: int, members: int) -> Division:
    """The division that takes the fewest steps, of those that memory is worth. A program takes a step for each of so many members, and one
    besides; to add parts takes one more.
    """
    count = processors(problem.query.device)
    before = (tiles - 1) // count  # rounds of whole tiles
    rest = tiles - before * count
    room = int(bytes_for_parts(problem, MEMORY_OF_FEW) / (4 * (rest * QUERIES * KEYS if before else d_bias.numel())))
    found, steps = Division(tiles, 0, 1), WORTH_WHILE * (before + 1) * (members + 1)
    for asked in range(2, min(members, room, MOST_ROUNDS * count // rest) + 1):
        parts = even_parts(members, asked)
        taken = before * (members + 1) + triton.cdiv(rest * parts, count) * (triton.cdiv(members, parts) + 1) + 1
        if taken < steps:
            found, steps = Division(before * count, rest, parts), taken
    return found


def add_parts(division: Division, parts: Tensor | None, d_bias: Tensor) -> None:
    """Fill the tiles left over of `d_bias` (entries, heads, Sq, Sk)."""
    if parts is None:
        return
    if division.are_all:
        sum_parts(parts, d_bias)
        return
    heads, len_q, len_k = d_bias.shape[1:]
    launch(
        _add_parts_kernel,
        division.rest * (QUERIES // ROWS),
        rest=Rest(division.whole, division.rest, division.parts),
        sums=parts,
        d_bias=strided(d_bias, heads),
        heads=heads,
        len_q=len_q,
        len_k=len_k,
        BLOCK_M=QUERIES,
        BLOCK_N=KEYS,
        BLOCK=ROWS,
    )


@triton.jit
def tile_place(tile, heads, len_q, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(batch entry of the bias, its head, first query, first key) of a tile by its number: blocks of queries fastest, then of keys, heads."""
    blocks_m, blocks_n = tl.cdiv(len_q, BLOCK_M), tl.cdiv(len_k, BLOCK_N)
    head = tile // (blocks_m * blocks_n)
    return head // heads, head % heads, tile % blocks_m * BLOCK_M, tile // blocks_m % blocks_n * BLOCK_N


@triton.jit
def _add_parts_kernel(rest, sums, d_bias, heads, len_q, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK rows of a tile left over, the sum of its parts. Grid of one axis: rows fastest, then tiles."""
    follow()
    STRIPS: tl.constexpr = BLOCK_M // BLOCK
    number, strip = tl.program_id(0) // STRIPS, tl.program_id(0) % STRIPS
    place = (strip * BLOCK + tl.arange(0, BLOCK))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # within a part of the tile
    total = tl.full([BLOCK, BLOCK_N], 0.0, tl.float32)
    for part in tl.range(0, rest.parts, loop_unroll_factor=4):  # loads of several parts under way at once
        total += tl.load(sums + (part * rest.count + number).to(tl.int64) * (BLOCK_M * BLOCK_N) + place)
    batch, head, row, col = tile_place(rest.first + number, heads, len_q, len_k, BLOCK_M, BLOCK_N)
    rows, cols = Span(row + strip * BLOCK, tl.arange(0, BLOCK), len_q), Span(col, tl.arange(0, BLOCK_N), len_k)
    store_tile(d_bias, Sequence(batch, head, len_q, len_k), rows, cols, total)
