"""A bias by distance on Hopper (sm_90): its table spread out in global memory, and the numbers of a tile from there.

All pairs of an outer tile (base/distances.py) take one number, which joins the maximum or lse of its queries: no instruction a pair. An inner
tile loads numbers before its products, which are added to them, so that they take no registers beside those of scores; a load brings those of
two pairs. Lanes of a warp read places side by side, and the table stays in the first cache.
"""

from typing import Any

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


def spread_table(problem: Problem) -> Any:
    """The table of a problem, if there is one, in float32, in units of the products, and with PAD copies of each end."""
    table = problem.bias
    if table is None or problem.zero is None:
        return None
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
    return with_entries(spread, owner)


def with_spread_table(rules: Rules, table: Any, heads: int) -> Rules:
    """Rules of a problem of so many query heads with that of :func:`spread_table`, if there is one."""
    return rules if table is None else rules._replace(table=strided(table, heads))


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
def end_numbers(rules, seq):
    """The first and the last number of a sequence's table."""
    table = slice_pointer(rules.table, seq) + PAD
    return gl.load(table), gl.load(table + (rules.distances - 1))


@gluon.jit
def numbers_of_pairs(rules, seq, row, col, SHAPE: gl.constexpr, PAIRS: gl.constexpr, KEYS_DOWN: gl.constexpr):
    """The numbers of the pairs of a tile at a query and a key, for products to be added to.

    A lane has pairs of two rows, 8 apart, in every 8 columns: the one row meets the numbers that the other has 8 columns further on, so that
    a number is loaded for about two pairs.
    """
    place = gl.minimum(gl.maximum(place_of_first(rules, seq, row, col), -PAD // 2), rules.distances + PAD // 2)
    down = gl.arange(0, SHAPE[0], gl.SliceLayout(1, PAIRS))[:, None] & ~8
    across = gl.arange(0, SHAPE[1], gl.SliceLayout(0, PAIRS))[None, :] & 6
    if KEYS_DOWN:
        place += down - across
    else:
        place += across - down
    REGISTERS: gl.constexpr = SHAPE[0] * SHAPE[1] // 128
    pointers = slice_pointer(rules.table, seq) + PAD + place
    return gl.inline_asm_elementwise(
        _loads(REGISTERS, KEYS_DOWN), _operands(REGISTERS), [pointers], dtype=gl.float32, is_pure=False, pack=REGISTERS
    )


@gluon.constexpr_function
def _operands(registers):
    return ",".join(["=&f"] * registers + ["l"] * registers)


@gluon.constexpr_function
def _loads(registers, keys_down):
    """A load of each number of a lane to the register of one pair, and a copy to that of the other: by 8 columns, by row, by column."""
    lines = []
    groups = registers // 4
    for along in range(-1, groups):  # by how many groups of 8 columns a pair is further on than its row
        for col in (0, 1):
            places = [4 * group + 2 * row + col for group, row in ((along, 0), (along + 1, 1)) if 0 <= group < groups]
            lines.append(f"ld.global.f32 ${places[0]}, [${registers}+{4 * (8 * along + col) * (-1 if keys_down else 1)}];")
            lines += [f"mov.f32 ${place}, ${places[0]};" for place in places[1:]]
    return " ".join(lines)
