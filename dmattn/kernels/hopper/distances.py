"""A bias by distance on Hopper (sm_90): its table spread out in global memory, and the numbers of a tile from there.

A tile wholly beyond an end of the table takes one number, which goes into the terms of its queries: no instruction a pair. Others load a number
for each pair. Lanes of a warp read places side by side, and the table stays in the first cache.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...problem import Problem
from ..base.bias_columns import bounded
from ..base.launch import launch
from ..base.layout import Sequence, slice_pointer, strided
from ..base.leading import by_entry, common_entries, with_entries
from ..base.overlap import follow
from ..base.rules import Rules, place_of_first

PAD = gl.constexpr(256)  # copies of each end: at least the queries and keys of a tile
BLOCK = 256


class Numbers(NamedTuple):
    """The numbers of a tile, in units of the products."""

    pointer: Any  # to that of the first pair
    apart: Any  # whether pairs are to load one each
    number: Any  # that of all pairs, or 0 where they load their own


def with_spread_table(problem: Problem, rules: Rules) -> Rules:
    """Rules whose table, if there is one, is in float32, in units of the products, and has PAD copies of each end."""
    table = problem.bias
    if table is None or problem.zero is None:
        return rules
    heads, distances = table.shape[1], table.shape[3]
    batch, owner = common_entries([table], problem.query.shape[0])
    spread = torch.empty((batch, heads, 1, distances + 2 * PAD.value), dtype=torch.float32, device=table.device)
    launch(
        _spread_kernel,
        triton.cdiv(spread.shape[3], BLOCK) * batch * heads,
        table=strided(table if owner is None else by_entry(table), heads),
        spread=strided(spread, heads),
        scale=problem.scale,
        heads=heads,
        distances=distances,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return rules._replace(table=strided(with_entries(spread, owner), problem.query.shape[1]))


@triton.jit
def _spread_kernel(table, spread, scale, heads, distances, BLOCK: tl.constexpr):
    """One program: BLOCK places of one slice. Grid of one axis: blocks fastest, then heads, batch entries."""
    follow()
    length = distances + 2 * PAD
    blocks = tl.cdiv(length, BLOCK)
    entry = tl.program_id(0) // blocks
    seq = Sequence(entry // heads, entry % heads, 0, 0)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    source = tl.minimum(tl.maximum(place - PAD, 0), distances - 1)
    number = tl.load(slice_pointer(table, seq) + source.to(tl.int64) * table.col).to(tl.float32)
    tl.store(slice_pointer(spread, seq) + place, tl.div_rn(bounded(number, scale), scale), mask=place < length)


@gluon.jit
def numbers_of(rules, seq, row, col, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The :class:`Numbers` of a tile at a query and a key. A number of -inf, and NaN, are loaded by pairs, which may be hidden."""
    last = rules.distances - 1
    place = place_of_first(rules, seq, row, col)
    table = slice_pointer(rules.table, seq) + PAD
    number = gl.load(table + gl.minimum(gl.maximum(place, 0), last))
    apart = (place + BLOCK_N > 1) & (place - BLOCK_M < last - 1) | ((number > float("-inf")) == 0)
    pointer = table + gl.minimum(gl.maximum(place, -BLOCK_N), last + BLOCK_M)
    return Numbers(pointer, apart, gl.where(apart, 0.0, number))


@gluon.jit
def add_apart(s, numbers, rows, cols):
    """Scores with the numbers that pairs load; `rows` and `cols` count from the first of the tile, and broadcast to it."""
    if numbers.apart:
        s += gl.load(numbers.pointer + (cols - rows))
    return s
