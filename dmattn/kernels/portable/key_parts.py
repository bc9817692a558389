"""Into how many parts the keys of blocks of queries are split, and which steps of a walk are those of a part.

Where few blocks of queries would leave processors idle, each has several programs with a part of its keys. What they make, in float32, is put
together by another kernel in order: `merge.merge_splits` for out and lse, `parts.sum_parts` for dQ.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.device import processors
from ..base.parts import room_of_queries
from .merge import MOST_SPLITS
from .split_keys import visible_keys

KEYS_OF_A_PART = 256  # at least: adding parts takes as long as walking about so many
PROGRAMS_PER_PROCESSOR = 2
# NVIDIA H200, 2026-11-30, forward in float32: 8 heads of 512 queries and keys of 64 dims 0.035 and 0.028 ms in 2 and 4 parts, 4 of 700 of 128
# dims 0.072 and 0.046. (1, 1, 2048 x 20000, 128) took 0.365 in 8 parts, one program a processor, 0.472 in 12 (docs/history.md).
KEYS_OF_OUT = 128
DIMS_OF_TWO = 64  # to which two programs of float32 share a processor, or with any dims where blocks of queries see more keys or fewer


def parts_of_out(problem: Problem, works: int, out: Any) -> int:
    """How many parts the keys of so many blocks of queries have in the forward pass, for programs to keep all processors busy.

    Those of float32 alone, as parts of 16 bits are not timed.
    """
    is_even = problem.left is None and problem.right is None
    is_wide = max(problem.query.shape[3], problem.value.shape[3]) > DIMS_OF_TWO
    each = 1 if is_even and is_wide else PROGRAMS_PER_PROCESSOR
    return _parts(problem, works, out, KEYS_OF_OUT, each) if problem.query.element_size() == 4 else 1


def parts_of_queries(problem: Problem, works: int, d_query: Any) -> int:
    """How many they have for dQ."""
    return _parts(problem, works, d_query, KEYS_OF_A_PART, PROGRAMS_PER_PROCESSOR)


def _parts(problem: Problem, works: int, result: Any, least: int, programs_each: int) -> int:
    """Parts for so many programs a processor, of at least so many keys each, if there is room for them (`parts.room_of_queries`).

    `result` is (B, H, Sq, any width). It is 1 for packed sequences, for a `result` that no single strides walk, and beside a table of
    distances, where the walk of dQ has several ranges, and out in parts is not timed.
    """
    if problem.ends_q is not None or problem.zero is not None or not isinstance(result, Tensor) or not result.numel():
        return 1
    keys = visible_keys(problem.query.shape[2], problem.key.shape[2], problem.left, problem.right)
    fill = programs_each * processors(result.device) // works
    return max(1, min(fill, keys // least, room_of_queries(problem, result.numel()), MOST_SPLITS))


@triton.jit
def steps_of_part(begin, full_end, part, parts, BLOCK_N: tl.constexpr):
    """[begin, end) of the steps of BLOCK_N keys within a walk that are those of a part; all of them where `parts` is None."""
    if parts is None:
        return begin, full_end
    else:
        steps = tl.cdiv(full_end - begin, BLOCK_N)
        return begin + steps * part // parts * BLOCK_N, begin + steps * (part + 1) // parts * BLOCK_N
