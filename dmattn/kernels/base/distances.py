"""Which tiles beside a table of distances are outer ones: all their pairs take one end of it, so that their bias is one number.

Places count from the first number of the table. Those of Triton and of Gluon call the functions here.
"""

import triton
import triton.language as tl

from .window import next_step

NOWHERE = tl.constexpr(1 << 30)  # beyond every place


@triton.jit
def outer_places(distances, first, last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(up to which place of its first pair all pairs of a tile take the `first` number of a table, from which on all take the `last`).

    No tile is an outer one where that number is -inf or NaN: then pairs have their own, and some may be hidden.
    """
    low = tl.where(first > float("-inf"), 1 - BLOCK_N, -NOWHERE)
    high = tl.where(last > float("-inf"), distances + BLOCK_M - 2, NOWHERE)
    return low, high


@triton.jit
def inner_steps(begin, end, first, after, STEP: tl.constexpr):
    """[begin, end) of the inner tiles, those from position `first` on and before `after`, among the steps from `begin` to `end`."""
    inner_begin = tl.minimum(next_step(begin, first, STEP), end)
    return inner_begin, tl.maximum(tl.minimum(next_step(begin, after, STEP), end), inner_begin)
