"""The walk of a block of queries over the keys, and of a block of keys over the queries: those in its window, or the blocks in its list.

One loop goes from `begin` to `end` in steps of a block. Where there are lists, another follows from `end` to `full_end`, over the blocks of
which no pair is hidden. What a step of either visits is asked for with `walk_step`, or a step ahead with `walk_steps`: a loop whose loads wait
for a number of a list has fewer of them under way.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.layout import load_rows
from ..base.place import LARGEST
from ..base.window import keys_in_window, queries_in_window
from .intervals import interval_lists
from .lists import room, visited_block, visits
from .mask_blocks import mask_lists


def key_lists(problem: Problem, block_m: int, block_n: int, packed: Tensor | None = None) -> Any:
    """For every block of queries the list of the blocks of keys to visit; None without mask and intervals, or where there is but one block.

    Of packed sequences, for every block in their list (`packed_blocks`).
    """
    if problem.key.shape[2] <= block_n:
        return None
    if problem.is_masked:
        return mask_lists(problem, block_m, block_n, packed=packed)
    return None if problem.first is None else interval_lists(problem, block_m, block_n)


def query_lists(problem: Problem, block_m: int, block_n: int, packed: Tensor | None = None) -> Any:
    """For every block of keys the list of the blocks of queries to visit; None without a mask, as one interval of a key is a range anyway."""
    if problem.query.shape[2] <= block_m:
        return None
    if problem.is_masked:
        return mask_lists(problem, block_m, block_n, by_key=True, packed=packed)
    return None if problem.also_first is None else interval_lists(problem, block_m, block_n, by_key=True)


@triton.jit
def key_range(rules, seq, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, end, full_end) of the loops over keys, in steps of BLOCK_N."""
    if rules.lists is None:
        begin, end = keys_in_window(rules.left, rules.right, seq, rows.start, BLOCK_M)
        if rules.ends is not None:
            end = tl.where(rows.start < seq.len_q, end, 0)  # a block past the end walks nothing
        return begin // BLOCK_N * BLOCK_N, end, end
    else:
        partial, full = visits(rules.lists, seq, rows, BLOCK_M)
        return 0, partial * BLOCK_N, (partial + full) * BLOCK_N


@triton.jit
def query_range(rules, seq, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, end, full_end) of the loops over queries, in steps of BLOCK_M."""
    if rules.lists is None:
        begin, end = queries_in_window(rules.left, rules.right, seq, cols.start, BLOCK_N)
        if rules.first is not None:
            first = load_rows(rules.first, seq, cols, LARGEST)
            last = load_rows(rules.last, seq, cols, 0)
            from_first = tl.min(tl.where(first < last, first, LARGEST))
            to_last = tl.max(tl.where(first < last, last, 0))
            if rules.also_first is not None:
                first = load_rows(rules.also_first, seq, cols, LARGEST)
                last = load_rows(rules.also_last, seq, cols, 0)
                from_first = tl.minimum(from_first, tl.min(tl.where(first < last, first, LARGEST)))
                to_last = tl.maximum(to_last, tl.max(tl.where(first < last, last, 0)))
            end = tl.maximum(tl.minimum(end, to_last), 0)
            begin = tl.minimum(tl.maximum(begin, from_first), end)
        if rules.ends is not None:
            end = tl.where(cols.start < seq.len_k, end, 0)
        return begin // BLOCK_M * BLOCK_M, end, end
    else:
        partial, full = visits(rules.lists, seq, cols, BLOCK_N)
        return 0, partial * BLOCK_M, (partial + full) * BLOCK_M


@triton.jit
def walk_step(rules, seq, owner, length, step, end, full_end, OWN: tl.constexpr, WALK: tl.constexpr):
    """The first key, or query, of a step of a loop: the span of OWN places walks over an axis of that length, WALK places a step."""
    if rules.lists is None:
        return step
    else:
        partial, full = end // WALK, (full_end - end) // WALK
        return visited_block(rules.lists, seq, owner, step // WALK, partial, full, room(length, WALK), OWN) * WALK


@triton.jit
def walk_steps(rules, seq, owner, length, step, following, end, full_end, OWN: tl.constexpr, WALK: tl.constexpr):
    """(`walk_step` of a step, `following`: that of the step after it), which the step before has asked for."""
    if rules.lists is None:
        return step, following
    else:
        return following, walk_step(rules, seq, owner, length, step + WALK, end, full_end, OWN, WALK)
