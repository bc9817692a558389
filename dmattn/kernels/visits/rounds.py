"""Blocks of queries dealt out evenly to a program for each processor, where lists say how much work each of them is.

A round is as many blocks as there are programs, one after the other as they would be without this: so programs that run side by side still
read the same keys from the L2 cache. Within a round the blocks are sorted by their visits, and the rounds take turns in which way: who gets the
longest block of one gets the shortest of the next.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import launch
from ..base.layout import Sequence, Span
from ..base.overlap import follow
from ..base.place import place_work
from ..base.rules import Rules
from .lists import visits


def even_rounds(rules: Rules, works: int, programs: int, lengths: tuple[int, int, int], block_m: int) -> Tensor:
    """For each of `works` turns the number of its block of queries, int32: program p of so many takes turns p, p + programs, ...

    `lengths` are heads, queries and keys of the problem, and `rules` have its lists.
    """
    numbers = rules.lists.ptr.new_empty(works)
    heads, len_q, len_k = lengths
    launch(
        _even_rounds_kernel,
        triton.cdiv(works, programs),
        numbers=numbers,
        rules=rules,
        works=works,
        together=programs,
        heads=heads,
        len_q=len_q,
        len_k=len_k,
        BLOCK_M=block_m,
        TOGETHER=triton.next_power_of_2(programs),
        num_warps=4,
    )
    return numbers


@triton.jit
def _even_rounds_kernel(numbers, rules, works, together, heads, len_q, len_k, BLOCK_M: tl.constexpr, TOGETHER: tl.constexpr):
    """One program: the blocks of queries of one round, in the order of its turns."""
    follow()
    begin = tl.program_id(0) * together
    count = tl.minimum(together, works - begin)
    index = tl.arange(0, TOGETHER)
    number = begin + tl.minimum(index, count - 1)
    block, head, batch = place_work(number, works, rules, len_q, heads, BLOCK_M)
    partial, full = visits(rules.lists, Sequence(batch, head, len_q, len_k), Span(block * BLOCK_M, 0, None), BLOCK_M)
    work = tl.where(index < count, partial + full, -1)
    longest_first = tl.sort(work * TOGETHER + (TOGETHER - 1 - index), descending=True)  # no two are equal
    number = begin + (TOGETHER - 1 - longest_first % TOGETHER)
    turn = tl.where(tl.program_id(0) % 2 == 0, index, count - 1 - index)
    tl.store(numbers + begin + turn, number, mask=index < count)
