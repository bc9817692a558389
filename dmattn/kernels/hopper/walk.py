"""Which blocks of queries a program takes on Hopper (sm_90), and its walk over tiles of keys, which may be made of listed blocks.

What a tile has to know of its keys (intervals, a bias of keys) is copied with them, by the same blocks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Problem
from ..base.bias_columns import COLUMNS
from ..base.device import processors
from ..base.layout import Span, Strided, copied_entry, sequence
from ..base.packed_blocks import count_blocks, packed_blocks
from ..base.parts import room_of_queries
from ..base.place import place_work
from ..base.rules import Rules, rules_of
from ..base.tiles import block_dim
from ..base.window import own_keys
from ..portable.merge import MOST_SPLITS
from ..portable.split_keys import visible_keys
from ..visits.intervals import described_keys
from ..visits.lists import room, visited_block, visits
from ..visits.walk import key_lists, key_range
from .bias_columns import tiled_columns
from .copies import PANEL, copied_dims, copy, place_of_keys, tiled_vectors

KEYS_OF_A_PART = 256  # at least
KEYS_TOGETHER = 16  # keys of the blocks that a tile is made of under a dynamic mask: smaller ones waste less, and take longer to copy


class Merging(NamedTuple):
    """What it takes to put parts of keys together, in the keys of head dim 128 that a program walks in that time."""

    least: int
    of_mib: int  # more for each MiB of all parts


# NVIDIA H200, 2026-11-30, forward and dQ, unsplit and in parts: (1, 4, 2048², 128) 0.030 and 0.033 ms, 0.039 and 0.034 in 2; (1, 1, 4096², 128)
# 0.047 and 0.028, 0.065 and 0.032 in 4; (1, 4, 1024², 192) 0.026 and 0.027, 0.045 and 0.032 in 4; (1, 5, 1500², 80) 0.023 and 0.028, 0.031 and
# 0.028 in 2; (1, 4, 300 x 8192, 64) 0.089 and 0.026, 0.067 and 0.022 in 8 (docs/history.md).
OF_OUT, OF_QUERIES = Merging(700, 96), Merging(300, 48)


class Lengths(NamedTuple):
    """How many blocks of queries there are in all, heads, heads of a group, queries and keys, and a pointer to how many blocks were drawn.

    Where few blocks of queries would leave processors idle, the keys of each are split into `parts`, and a block counts once for each part. The
    results of a part, in float32, lie behind those of the part before.
    """

    works: Any
    heads: Any
    group: Any
    len_q: Any
    len_k: Any
    walked: Any  # numbers of keys and values, in 64s (`base.place`)
    drawn: Any  # None where a program takes every so many-th block (`even_work`), or there is one for each
    parts: Any  # None where keys are not split


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
    """Whether blocks of queries have about the same work.

    Under a dynamic mask most queries keep as many keys; a bias of keys is its sign. Other intervals may be a causal mask's.
    """
    if problem.first is not None:
        return problem.key_bias is not None
    if problem.ends_q is not None:
        return False  # sequences differ in their lengths
    return not problem.is_masked and problem.left is None and problem.right is None


def lengths_of(problem: Problem, block_m: int, rules: Rules, result: Any, programs_each: int, merging: Merging) -> tuple[Lengths, int]:
    """(lengths, programs that take the blocks of queries) of a pass that writes `result`, whose parts are put together by `merging`.

    The `rules` are those of `key_walk`, whose lists have room for how many blocks were drawn, and a processor has room for `programs_each`.
    """
    (heads, len_q), (kv_heads, len_k) = problem.query.shape[1:3], problem.key.shape[1:3]
    works, most = count_blocks(problem, rules.packed_blocks, block_m) * heads, programs_each * processors(problem.query.device)
    draws = works > most and not even_work(problem)
    drawn = None
    if draws:  # lists bring a 0 to count from, where a launch to clear a number would take 2 us
        drawn = torch.zeros(1, dtype=torch.int32, device=problem.query.device) if rules.lists is None else rules.lists.ptr
    parts, walked = parts_of_keys(problem, works, result, merging), -(-len_k // 64) * (problem.query.shape[3] + problem.value.shape[3])
    if parts == 1:
        return Lengths(works, heads, heads // kv_heads, len_q, len_k, walked, drawn, None), min(works, most)
    return Lengths(parts * works, heads, heads // kv_heads, len_q, len_k, walked, drawn, parts), parts * works


def parts_of_keys(problem: Problem, works: int, result: Any, merging: Merging) -> int:
    """Into how many parts the keys of so many blocks of queries are split, for programs to keep all processors busy.

    The number that saves the most, less what `merging` takes, of those that have room (`parts.room_of_queries`). It is 1 where keys have lists,
    where a table has sums at its ends, which a part would not add to those of others, and for a `result` that no single strides walk.
    """
    return parts_of_numbers(problem, works, result.numel(), merging) if isinstance(result, Tensor) else 1


def parts_of_numbers(problem: Problem, works: int, numbers: int, merging: Merging) -> int:
    """:func:`parts_of_keys` of a result of so many numbers that single strides walk."""
    has_lists = problem.is_masked or problem.first is not None or problem.ends_q is not None
    if has_lists or problem.zero is not None or not 0 < 2 * works <= processors(problem.query.device):
        return 1
    (len_q, head_dim), (len_k, value_dim) = problem.query.shape[2:], problem.value.shape[2:]
    keys, dim = visible_keys(len_q, len_k, problem.left, problem.right), block_dim(max(head_dim, value_dim))
    most = min(MOST_SPLITS, processors(problem.query.device) // works, keys // KEYS_OF_A_PART, room_of_queries(problem, numbers))
    mib, nets = 4 * numbers / (1 << 20), {1: 0.0}
    for parts in range(2, most + 1):
        if parts != 3 or most == 3:  # where it pays, three take longer than four (docs/history.md)
            nets[parts] = (keys - keys / parts) * dim / 128 - merging.least - merging.of_mib * parts * mib
    return max(nets, key=nets.__getitem__)


def key_walk(problem: Problem, block_m: int, block_n: int) -> tuple[Rules, TensorDescriptor | None, TensorDescriptor | None, int]:
    """(rules, packed intervals and bias columns for the copy engine, keys of a block of them) for a walk over tiles of `block_n` keys.

    Where keys have intervals, tiles are made of blocks: of KEYS_TOGETHER beside a bias of keys, as a dynamic mask has it, whose lives are
    short, and else of PANEL, of which a list names more; but of one beside a table of distances, whose places follow one another. The rules
    have no window then, as packed intervals leave out what it hides.
    """
    if problem.first is None:
        sub = block_n
        packed = packed_blocks(problem, block_m)
        rules = rules_of(problem, key_lists(problem, block_m, block_n, packed), packed_blocks=packed, by_words=True)
        _, intervals, bias_columns = described_keys(problem, block_m, sub)
    else:
        if problem.zero is not None:
            sub = block_n
        else:
            sub = KEYS_TOGETHER if problem.key_bias is not None else min(PANEL.value, block_n)
        lists, intervals, bias_columns = described_keys(problem, block_m, sub)
        rules = rules_of(problem._replace(left=None, right=None), lists)
    return rules, None if intervals is None else tiled_vectors(intervals, 1, 2 * sub), tiled_columns(bias_columns, sub), sub


@gluon.jit
def work_of(number, rules, lengths, BLOCK_M: gl.constexpr):
    """(sequence, first query) of a block of queries by its number; `lengths` are :class:`Lengths`."""
    works = _works_of_a_part(lengths)
    if lengths.parts is not None:
        number = number % works
    block, head, batch = place_work(number, works, rules, lengths.len_q, lengths.heads, BLOCK_M, lengths.walked)
    return sequence(rules.ends, batch, head, lengths.len_q, lengths.len_k), block * BLOCK_M


@gluon.jit
def visits_of(rules, seq, row, BLOCK_M: gl.constexpr):
    """How many (partial, full) blocks the list of a block of queries names; 0 without lists."""
    if rules.lists is None:
        return 0, 0
    else:
        return visits(rules.lists, seq, Span(row, 0, None), BLOCK_M)


@gluon.jit
def tile_range(visited, rules, seq, row, number, lengths, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr):
    """The :class:`Walk` over tiles of BLOCK_N keys at the first query of a block by its number: those of its part where keys are split.

    Where there are lists, a tile is made of the blocks of SUB keys that they name, `visited` (partial, full) in number: those of which no pair
    is hidden fill the tiles from `end` on. The tiles are filled up in front, and the first one never counts as full.
    """
    partial, full = visited
    if rules.lists is None:
        begin, end, full_end = key_range(rules, seq, Span(row, 0, None), BLOCK_M, BLOCK_N)
        if lengths.parts is not None:
            part, tiles, first = number // _works_of_a_part(lengths), gl.cdiv(end - begin, BLOCK_N), begin
            begin = first + tiles * part // lengths.parts * BLOCK_N
            end = gl.minimum(first + tiles * (part + 1) // lengths.parts * BLOCK_N, end)
            full_end = end
        return Walk(begin, end, full_end, partial, full)
    else:
        tiles = gl.cdiv(partial + full, BLOCK_N // SUB)
        full_tiles = gl.minimum(full // (BLOCK_N // SUB), gl.maximum(tiles - 1, 0))
        return Walk(0, (tiles - full_tiles) * BLOCK_N, tiles * BLOCK_N, partial, full)


@gluon.jit
def own_tiles(rules, seq, row, walk, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """[begin, end) of the tiles of a walk that BLOCK_M of its queries need (`window.own_keys`); of lists all, unless these are past the end."""
    if rules.lists is None:
        return own_keys(rules.left, rules.right, seq, row, walk.begin, walk.full_end, BLOCK_M, BLOCK_N)
    else:
        return walk.begin, gl.where(row < seq.len_q, walk.full_end, walk.begin)


@gluon.jit
def _works_of_a_part(lengths):
    """How many blocks of queries there are in all, each counted once."""
    if lengths.parts is None:
        return lengths.works
    else:
        return lengths.works // lengths.parts


@gluon.jit
def in_first_part(number, lengths):
    """Whether a block by its number is counted for the first part of its keys, as it is where keys are not split."""
    if lengths.parts is None:
        return True
    else:
        return number < _works_of_a_part(lengths)


@gluon.jit
def results_of(t, number, lengths, BLOCK_M: gl.constexpr, DIM: gl.constexpr):
    """A result (`layout.Strided`) with rows of DIM numbers, moved to those of the part that a block is counted for."""
    if lengths.parts is None:
        return t
    else:
        works = _works_of_a_part(lengths)
        rows = works // gl.cdiv(lengths.len_q, BLOCK_M) * lengths.len_q  # of a part: those of all queries and heads of all batch entries
        pointer = t.ptr + gl.cast(number // works, gl.int64) * rows * DIM
        return Strided(pointer, t.batch, t.head, t.row, t.col, t.group, t.whole)


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
def copy_blocks(t, seq, head, starts, full, tiles, stage, DIM: gl.constexpr):
    """Copy a tile of keys that is made of blocks to its stage of `tiles`, and tell the barrier."""
    SUB: gl.constexpr = t.block_shape[2]
    BLOCKS: gl.constexpr = tiles.shape[3] // SUB
    WIDTH: gl.constexpr = t.block_shape[3]  # a panel, or all of fewer columns
    PANELS: gl.constexpr = copied_dims(DIM) // WIDTH
    chunks = tiles._reinterpret(t.dtype, [tiles.shape[0] * (tiles.shape[4] // WIDTH) * BLOCKS, 1, 1, SUB, WIDTH], t.layout)
    for panel in gl.static_range(PANELS):
        for block in gl.static_range(BLOCKS):
            entry, col = place_of_keys(seq, starts[block])
            copy(t, [entry, head, col, panel * WIDTH], full, chunks.index((stage * PANELS + panel) * BLOCKS + block))


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
