"""Into how many parts the keys of blocks of queries are split, and which steps of a walk are those of a part.

Where few blocks of queries would leave processors idle, each has several programs with a part of its keys. What they make, in float32, is put
together by another kernel in order: `split_keys.merge_splits` for out and lse, `parts.sum_parts` for dQ.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.device import processors
from ..base.parts import LEAST_ROOM
from .split_keys import MOST_SPLITS, visible_keys

KEYS_OF_A_PART = 256  # at least: putting parts together takes as long as walking about so many
PROGRAMS_PER_PROCESSOR = 2


def parts_of_keys(problem: Problem, works: int, result: Any) -> int:
    """How many parts the keys of so many blocks of queries have, for programs to keep all processors busy.

    All parts of a `result` (B, H, Sq, any width) take up to a twenty-fifth of the memory of keys and values, or LEAST_ROOM if that is more. It
    is 1 for packed sequences, beside a table of distances, whose walk has several ranges, and for a `result` that no single strides walk.
    """
    if problem.ends_q is not None or problem.zero is not None or not isinstance(result, Tensor) or not result.numel():
        return 1
    (len_q, len_k), value = (problem.query.shape[2], problem.key.shape[2]), problem.value
    room = max(LEAST_ROOM, (problem.key.numel() + value.numel()) * value.element_size() // 25) // (4 * result.numel())
    fill = PROGRAMS_PER_PROCESSOR * processors(result.device) // works
    return max(1, min(fill, visible_keys(len_q, len_k, problem.left, problem.right) // KEYS_OF_A_PART, room, MOST_SPLITS))


@triton.jit
def steps_of_part(begin, full_end, part, parts, BLOCK_N: tl.constexpr):
    """[begin, end) of the steps of BLOCK_N keys within a walk that are those of a part; all of them where `parts` is None."""
    if parts is None:
        return begin, full_end
    else:
        steps = tl.cdiv(full_end - begin, BLOCK_N)
        return begin + steps * part // parts * BLOCK_N, begin + steps * (part + 1) // parts * BLOCK_N
