"""Blocks of packed sequences: a list of those that exist, of which programs take theirs.

As many programs are launched as blocks of so many tokens can be, which the host knows without waiting for the device, instead of those that
sequences of the longest length would have.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from .described import totals_of
from .launch import launch
from .layout import begin_and_length
from .overlap import follow

OWN, OTHERS, STEPS = 32, 128, 32  # sequences of a program, those that it compares with them together, blocks of each that it writes together


def packed_blocks(problem: Problem, block: int, by_key: bool = False) -> Tensor | None:
    """The list (entries, 2), int32, of (block, sequence) of queries, or of keys; None where no sequences are packed.

    First are the blocks of the sequence with the most keys, or queries, for each to walk, so that a launch ends with short work. Blocks of
    queries begin with a sequence's last, to which a causal mask leaves the most keys. Entries beyond the last block name one behind the end of
    the first sequence, for which there is nothing to do.
    """
    if problem.ends_q is None:
        return None
    total, longest = totals_of(problem)[by_key], (problem.key if by_key else problem.query).shape[2]
    return _listed(problem, block, by_key, most_blocks(problem.query.shape[0], total, longest, block))


def packed_sequences(problem: Problem) -> Tensor | None:
    """The same list of packed sequences themselves, those with the most queries first: each that has keys is block 0, others are left over."""
    if problem.ends_q is None:
        return None
    return _listed(problem, triton.next_power_of_2(max(1, problem.key.shape[2])), by_key=True, entries=problem.query.shape[0])


def _listed(problem: Problem, block: int, by_key: bool, entries: int) -> Tensor:
    (total_q, total_k), sequences = totals_of(problem), problem.query.shape[0]
    own, walked = (problem.ends_q, total_q, problem.query.shape[2]), (problem.ends_k, total_k, problem.key.shape[2])
    if by_key:
        own, walked = walked, own
    blocks = problem.query.new_empty((entries, 2), dtype=torch.int32)
    launch(
        _packed_blocks_kernel,
        triton.cdiv(sequences, OWN),
        blocks=blocks,
        own=own,
        walked=walked,
        sequences=sequences,
        entries=entries,
        block=block,
        BACKWARDS=not by_key,
        OWN=OWN,
        OTHERS=OTHERS,
        STEPS=STEPS,
        num_warps=4,
    )
    return blocks


def most_blocks(sequences: int, total: int, longest: int, block: int) -> int:
    """How many blocks sequences of at most the longest length can have, at least 1."""
    return max(1, min(sequences * triton.cdiv(longest, block), (total + min(sequences, total) * (block - 1)) // block))


def count_blocks(problem: Problem, blocks: Tensor | None, block: int, by_key: bool = False) -> int:
    """How many blocks the batch entries of a problem have, or as many as are listed."""
    if blocks is not None:
        return blocks.shape[0]
    x = problem.key if by_key else problem.query
    return triton.cdiv(x.shape[2], block) * x.shape[0]


@triton.jit(do_not_specialize=["sequences", "entries", "block"])
def _packed_blocks_kernel(
    blocks, own, walked, sequences, entries, block, BACKWARDS: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """One program: the entries of OWN sequences, and its share of those that are left over. `own` and `walked` are (ends, total, longest)."""
    follow()
    number = tl.program_id(0) * OWN + tl.arange(0, OWN)
    length, count = _walked_and_count(own, walked, number, sequences, block)
    first = tl.full([OWN], 0, tl.int64)  # of ends that do not rise more blocks than 32 bits count
    total = tl.full([], 0, tl.int64)
    for start in range(0, sequences, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_length, other_count = _walked_and_count(own, walked, other, sequences, block)
        ahead = other_length[None, :] > length[:, None]
        ahead |= (other_length[None, :] == length[:, None]) & (other[None, :] < number[:, None])
        first += tl.sum(tl.where(ahead, other_count[None, :], 0).to(tl.int64), 1)  # [OWN, OTHERS]
        total += tl.sum(other_count.to(tl.int64), 0)
    first = tl.minimum(first, entries).to(tl.int32)
    total = tl.minimum(total, entries).to(tl.int32)
    for start in range(0, tl.max(count, 0), STEPS):
        step = start + tl.arange(0, STEPS)[None, :]
        at = step
        if BACKWARDS:
            at = count[:, None] - 1 - step
        place = first[:, None] + step  # [OWN, STEPS]
        exists = (step < count[:, None]) & (place < entries)  # fewer may have room, where the ends do not rise
        tl.store(blocks + 2 * place, at, mask=exists)
        tl.store(blocks + 2 * place + 1, number[:, None] + tl.zeros([OWN, STEPS], tl.int32), mask=exists)
    for start in range(total + tl.program_id(0) * OTHERS, entries, tl.num_programs(0) * OTHERS):
        place = start + tl.arange(0, OTHERS)
        tl.store(blocks + 2 * place, tl.cdiv(own[2], block) + tl.zeros([OTHERS], tl.int32), mask=place < entries)
        tl.store(blocks + 2 * place + 1, tl.zeros([OTHERS], tl.int32), mask=place < entries)


@triton.jit
def _walked_and_count(own, walked, number, sequences, block):
    """(how many tokens each of a sequence's blocks walks at most, how many blocks it has): none behind the last sequence."""
    real = tl.minimum(number, sequences - 1)
    _, length = begin_and_length(own[0], real, own[1], own[2])
    _, walked_length = begin_and_length(walked[0], real, walked[1], walked[2])
    return walked_length, tl.where(number < sequences, tl.cdiv(length, block), 0)
