"""Which blocks of queries a program takes on Hopper (sm_90), and its walk over tiles of keys, which may be made of listed blocks.

What a tile has to know of its keys (intervals, a bias of keys) is copied with them, by the same blocks.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Problem
from ..base.bias_columns import COLUMNS
from ..base.device import processors
from ..base.layout import Span, copied_entry, sequence
from ..base.place import place_work
from ..base.rules import Rules, rules_of
from ..visits.intervals import described_keys
from ..visits.lists import room, visited_block, visits
from ..visits.rounds import even_rounds
from ..visits.walk import key_lists, key_range
from .bias_columns import tiled_columns
from .copies import PANEL, copy, place_of_keys, tiled_vectors

KEYS_TOGETHER = 16  # keys of the blocks that a tile is made of under a dynamic mask: smaller ones waste less, and take longer to copy


class Lengths(NamedTuple):
    """How many blocks of queries there are in all, heads, queries and keys, and the order of the blocks."""

    works: Any
    heads: Any
    len_q: Any
    len_k: Any
    turns: Any = None  # which block each turn takes (visits/rounds.py); where there is none, that of its own number


class Walk(NamedTuple):
    """Steps over tiles of keys for a block of queries: from `begin` tiles that may hide pairs, from `end` to `full_end` those that hide none.

    `partial` and `full` are how many blocks of either kind its list names; 0 without lists.
    """

    begin: Any
    end: Any
    full_end: Any
    partial: Any
    full: Any


def even_work(problem: Problem) -> bool:
    """Whether a program for each processor may take every so many-th block of queries, for all have about the same work.

    Under a dynamic mask most queries keep as many keys; a bias of keys is its sign. Other intervals may be a causal mask's.
    """
    if problem.first is not None:
        return problem.key_bias is not None
    if problem.ends_q is not None:
        return False  # sequences differ in their lengths
    return not problem.is_masked and problem.left is None and problem.right is None


def programs_of(problem: Problem, rules: Rules, block_m: int) -> tuple[int, int, Tensor | None]:
    """(blocks of queries, programs that take them, and for each turn which of them) of a walk by these rules.

    Under a block mask lists are all that differs from even work, so that blocks are dealt out by them.
    """
    batch, heads, len_q = problem.query.shape[:3]
    works, most = triton.cdiv(len_q, block_m) * heads * batch, processors(problem.query.device)
    if problem.bits is not None and rules.lists is not None and works > most:
        return works, most, even_rounds(rules, works, most, (heads, len_q, problem.key.shape[2]), block_m)
    return works, min(works, most) if even_work(problem) else works, None


def key_walk(problem: Problem, block_m: int, block_n: int) -> tuple[Rules, TensorDescriptor | None, TensorDescriptor | None, int]:
    """(rules, packed intervals and bias columns for the copy engine, keys of a block of them) for a walk over tiles of `block_n` keys.

    Where keys have intervals, tiles are made of blocks: of KEYS_TOGETHER beside a bias of keys, as a dynamic mask has it, whose lives are
    short, and else of PANEL, of which a list names more. The rules have no window then, as packed intervals leave out what it hides.
    """
    if problem.first is None:
        sub = block_n
        rules = rules_of(problem, key_lists(problem, block_m, block_n))
        _, intervals, bias_columns = described_keys(problem, block_m, sub)
    else:
        sub = KEYS_TOGETHER if problem.key_bias is not None else PANEL.value
        lists, intervals, bias_columns = described_keys(problem, block_m, sub)
        rules = rules_of(problem._replace(left=None, right=None), lists)
    return rules, None if intervals is None else tiled_vectors(intervals, 1, 2 * sub), tiled_columns(bias_columns, sub), sub


@gluon.jit
def work_of(number, rules, lengths, BLOCK_M: gl.constexpr):
    """(sequence, first query) of a block of queries by its number; `lengths` are :class:`Lengths`."""
    block, head, batch = place_work(number, lengths.works, rules, lengths.len_q, lengths.heads, BLOCK_M)
    return sequence(rules.ends, batch, head, lengths.len_q, lengths.len_k), block * BLOCK_M


@gluon.jit
def first_blocks(lengths):
    """The numbers of the blocks of queries that a program takes in its first two turns (`blocks_of`)."""
    if lengths.turns is None:
        return 0, 0
    else:
        return _block_of(gl.program_id(0), lengths), _block_of(gl.program_id(0) + gl.num_programs(0), lengths)


@gluon.jit
def blocks_of(turn, ahead, lengths):
    """The numbers of the blocks of queries of a turn and of the next; `ahead` is what was found of them before."""
    if lengths.turns is None:
        return turn, turn + gl.num_programs(0)
    else:
        return ahead


@gluon.jit
def blocks_ahead(turn, ahead, lengths):
    """What is to be found of the turn after this one: two turns ahead, for nothing to wait for it."""
    if lengths.turns is None:
        return ahead
    else:
        return ahead[1], _block_of(turn + 2 * gl.num_programs(0), lengths)


@gluon.jit
def _block_of(turn, lengths):
    """The number of the block of a turn; of the last one for a turn beyond."""
    return gl.load(lengths.turns + gl.minimum(turn, lengths.works - 1))


@gluon.jit
def visits_of(number, rules, lengths, BLOCK_M: gl.constexpr):
    """How many (partial, full) blocks the list of a block of queries names; those of the last one for a number beyond, and 0 without lists.

    They are asked for while a program is busy with the block before, for nothing to wait for them.
    """
    if rules.lists is None:
        return 0, 0
    else:
        seq, row = work_of(gl.minimum(number, lengths.works - 1), rules, lengths, BLOCK_M)
        return visits(rules.lists, seq, Span(row, 0, None), BLOCK_M)


@gluon.jit
def tile_range(visited, rules, seq, row, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr):
    """The :class:`Walk` over tiles of BLOCK_N keys at a query.

    Where there are lists, a tile is made of the blocks of SUB keys that they name, `visited` (partial, full) in number: those of which no pair
    is hidden fill the tiles from `end` on. The tiles are filled up in front, and the first one never counts as full.
    """
    partial, full = visited
    if rules.lists is None:
        begin, end, full_end = key_range(rules, seq, Span(row, 0, None), BLOCK_M, BLOCK_N)
        return Walk(begin, end, full_end, partial, full)
    else:
        tiles = gl.cdiv(partial + full, BLOCK_N // SUB)
        full_tiles = gl.minimum(full // (BLOCK_N // SUB), gl.maximum(tiles - 1, 0))
        return Walk(0, (tiles - full_tiles) * BLOCK_N, tiles * BLOCK_N, partial, full)


@gluon.jit
def listed_key(rules, seq, row, step, block: gl.constexpr, walk, BLOCK_M: gl.constexpr, SUB: gl.constexpr):
    """The first key of a block of SUB of a tile; before the first key of all where the tile is filled up."""
    if rules.lists is None:
        return step + block * SUB
    else:
        visit = (step - walk.full_end) // SUB + block + walk.partial + walk.full
        at = Span(row, 0, None)
        number = visited_block(rules.lists, seq, at, gl.maximum(visit, 0), walk.partial, walk.full, room(seq.len_k, SUB), BLOCK_M)
        return gl.where(visit < 0, -1, number) * SUB


@gluon.jit
def listed_keys(rules, seq, row, step, walk, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr):
    """The first key of every block of a tile."""
    starts = ()
    for block in gl.static_range(BLOCK_N // SUB):
        starts += (listed_key(rules, seq, row, step, block, walk, BLOCK_M, SUB),)
    return starts


@gluon.jit
def copy_blocks(t, seq, head, starts, full, tiles, stage):
    """Copy a tile of keys that is made of blocks to its stage of `tiles`, and tell the barrier."""
    SUB: gl.constexpr = t.block_shape[2]
    BLOCKS: gl.constexpr = tiles.shape[3] // SUB
    PANELS: gl.constexpr = tiles.shape[4] // PANEL
    chunks = tiles._reinterpret(t.dtype, [tiles.shape[0] * PANELS * BLOCKS, 1, 1, SUB, PANEL], t.layout)
    for panel in gl.static_range(PANELS):
        for block in gl.static_range(BLOCKS):
            entry, col = place_of_keys(seq, starts[block])
            copy(t, [entry, head, col, panel * PANEL], full, chunks.index((stage * PANELS + panel) * BLOCKS + block))


@gluon.jit
def copy_described(sources, tiles, rules, seq, starts, full, stage, BLOCKS: gl.constexpr, SUB: gl.constexpr):
    """Copy packed intervals and bias columns of the blocks of a tile, where there are any, and tell the barrier."""
    if sources.intervals is not None or sources.bias_columns is not None:
        if rules.first is None:
            owner = rules.bias
        else:
            owner = rules.lists
        entry = copied_entry(owner, seq.batch)
        head = seq.head // owner.group
        for block in gl.static_range(BLOCKS):
            if sources.intervals is not None:
                copy(sources.intervals, [entry, head, starts[block] // SUB, 0], full, tiles.intervals.index(stage * BLOCKS + block))
            if sources.bias_columns is not None:
                copy(sources.bias_columns, [entry, head, starts[block], 0], full, tiles.bias_columns.index(stage * BLOCKS + block))


@gluon.jit
def bias_columns_of(column_tiles, stage, BLOCK_N: gl.constexpr):
    """The bias columns of the keys of a tile, whose blocks follow each other."""
    STAGES: gl.constexpr = column_tiles.shape[0] * column_tiles.shape[3] // BLOCK_N
    whole = column_tiles._reinterpret(column_tiles.dtype, [STAGES, 1, 1, BLOCK_N, COLUMNS], column_tiles.layout)
    return whole.index(stage).reshape([BLOCK_N, COLUMNS])


@gluon.jit
def intervals_of(interval_tiles, stage, BLOCK_N: gl.constexpr, SUB: gl.constexpr, PAIRS: gl.constexpr):
    """(twice the middle, length) of the intervals of the keys of a tile, spread over it."""
    middle2 = _key_vector(interval_tiles, stage, 0, BLOCK_N, SUB, PAIRS)
    return middle2, _key_vector(interval_tiles, stage, 1, BLOCK_N, SUB, PAIRS)


@gluon.jit
def _key_vector(interval_tiles, stage, PART: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr, PAIRS: gl.constexpr):
    """One of the two parts of the packed intervals of a tile, [1, BLOCK_N]."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BLOCKS: gl.constexpr = BLOCK_N // SUB
    tile = interval_tiles._reinterpret(gl.float32, [interval_tiles.shape[0] // BLOCKS, BLOCKS, 2 * SUB], LAYOUT).index(stage)
    vector = tile.slice(PART * SUB, SUB, dim=1).load(_by_blocks(BLOCK_N, SUB)).reshape([BLOCK_N])
    return gl.convert_layout(vector, gl.SliceLayout(0, PAIRS))[None, :]


@gluon.constexpr_function
def _by_blocks(length, sub):
    """The layout in registers of [length // sub, sub], row after row, that is a row of the products of a consumer."""
    place = {bit: [bit // sub, bit % sub] for bit in (1 << i for i in range(length.bit_length() - 1))}
    registers = [place[bit] for bit in place if bit not in (2, 4)]
    return gl.DistributedLinearLayout(registers, [place[2], place[4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [length // sub, sub])
