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

# At least, which take as long to walk as putting parts together. Products of float32 take longer: NVIDIA H200, 2026-11-30, 8 heads of 512
# queries and keys of 64 dims forward 0.035 and 0.028 ms in 2 and 4 parts, 4 of 700 of 128 dims 0.072 and 0.046 (docs/history.md).
KEYS_OF_A_PART, KEYS_OF_FLOATS = 256, 128
PROGRAMS_PER_PROCESSOR = 2
# Of float32 with more dims, unless blocks of queries see more keys or fewer: (1, 1, 2048 x 20000, 128) 0.365 ms in 8 parts, 0.472 in 12.
DIMS_OF_ONE = 64


def parts_of_keys(problem: Problem, works: int, result: Any) -> int:
    """How many parts the keys of so many blocks of queries have, for programs to keep all processors busy.

    There is room for them (`parts.room_of_queries`) of a `result` (B, H, Sq, any width). It is 1 for packed sequences, beside a table of
    distances, whose walk has several ranges, and for a `result` that no single strides walk.
    """
    if problem.ends_q is not None or problem.zero is not None or not isinstance(result, Tensor) or not result.numel():
        return 1
    (len_q, len_k), value = (problem.query.shape[2], problem.key.shape[2]), problem.value
    are_floats, is_even = value.element_size() == 4, problem.left is None and problem.right is None
    each = 1 if are_floats and is_even and max(problem.query.shape[3], value.shape[3]) > DIMS_OF_ONE else PROGRAMS_PER_PROCESSOR
    keys = visible_keys(len_q, len_k, problem.left, problem.right) // (KEYS_OF_FLOATS if are_floats else KEYS_OF_A_PART)
    return max(1, min(each * processors(result.device) // works, keys, room_of_queries(problem, result), MOST_SPLITS))


@triton.jit
def steps_of_part(begin, full_end, part, parts, BLOCK_N: tl.constexpr):
    """[begin, end) of the steps of BLOCK_N keys within a walk that are those of a part; all of them where `parts` is None."""
    if parts is None:
        return begin, full_end
    else:
        steps = tl.cdiv(full_end - begin, BLOCK_N)
        return begin + steps * part // parts * BLOCK_N, begin + steps * (part + 1) // parts * BLOCK_N
