"""The walk of a block of queries over the keys: all in its window, or where there are intervals the blocks in its list."""

import triton
import triton.language as tl

from .intervals import visited_block, visits
from .sequence import window_range


@triton.jit
def key_range(rules, seq, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, end) for a loop in steps of BLOCK_N, from a block's edge; :func:`key_start` gives the keys of a step."""
    if rules.lists is None:
        begin, end = window_range(rules.left, rules.right, seq, rows, BLOCK_M)
        return begin // BLOCK_N * BLOCK_N, end
    else:
        return 0, visits(rules.lists, seq, rows, BLOCK_M) * BLOCK_N


@triton.jit
def key_start(rules, seq, rows, step, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key of the loop's step."""
    if rules.lists is None:
        return step
    else:
        return visited_block(rules.lists, seq, rows, step // BLOCK_N, BLOCK_M) * BLOCK_N
