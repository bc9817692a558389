"""The walk of a block of queries over the keys, and of a block of keys over the queries: those in its window, or the blocks in its list.

Every loop goes from `begin` to `end` in steps of a block; what a step visits is asked for with `key_step` or `query_step`.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .intervals import interval_lists
from .layout import load_rows
from .lists import visited_block, visits
from .mask_blocks import mask_lists
from .sequence import LARGEST, query_window, window_range
from .tiles import Tile


def key_lists(problem: Any, tile: Tile) -> Tensor | None:
    """For every block of queries the list of the blocks of keys to visit; None where there is neither a mask nor intervals."""
    if problem.mask is not None:
        return mask_lists(problem, tile.block_m, tile.block_n)
    return None if problem.first is None else interval_lists(problem, tile.block_m, tile.block_n)


def query_lists(problem: Any, tile: Tile) -> Tensor | None:
    """For every block of keys the list of the blocks of queries to visit; None without a mask, as a key's interval is a range anyway."""
    return None if problem.mask is None else mask_lists(problem, tile.block_m, tile.block_n, by_key=True)


@triton.jit
def key_range(rules, seq, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, end) for a loop over keys in steps of BLOCK_N."""
    if rules.lists is None:
        begin, end = window_range(rules.left, rules.right, seq, rows, BLOCK_M)
        return begin // BLOCK_N * BLOCK_N, end
    else:
        return 0, visits(rules.lists, seq, rows, BLOCK_M) * BLOCK_N


@triton.jit
def key_step(rules, seq, rows, step, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(the first key of the loop's step, 1 if the mask is known to hide nothing of the tile else 0)."""
    if rules.lists is None:
        return step, 0
    else:
        number, full = visited_block(rules.lists, seq, rows, step // BLOCK_N, BLOCK_M)
        return number * BLOCK_N, full


@triton.jit
def query_range(rules, seq, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, end) for a loop over queries in steps of BLOCK_M."""
    if rules.lists is None:
        begin, end = query_window(rules.left, rules.right, seq, cols, BLOCK_N)
        if rules.first is not None:
            first = load_rows(rules.first, seq, cols, LARGEST)
            last = load_rows(rules.last, seq, cols, 0)
            end = tl.maximum(tl.minimum(end, tl.max(tl.where(first < last, last, 0))), 0)
            begin = tl.minimum(tl.maximum(begin, tl.min(tl.where(first < last, first, LARGEST))), end)
        return begin // BLOCK_M * BLOCK_M, end
    else:
        return 0, visits(rules.lists, seq, cols, BLOCK_N) * BLOCK_M


@triton.jit
def query_step(rules, seq, cols, step, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(the first query of the loop's step, 1 if the mask is known to hide nothing of the tile else 0)."""
    if rules.lists is None:
        return step, 0
    else:
        number, full = visited_block(rules.lists, seq, cols, step // BLOCK_M, BLOCK_N)
        return number * BLOCK_M, full
