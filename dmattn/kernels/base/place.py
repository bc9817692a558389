"""Which program works where: its block, head and batch entry, and who shares a bias."""

import triton
import triton.language as tl

from ...problem import Problem
from .device import processors
from .layout import sequence, stepped

LARGEST = tl.constexpr(2147483647)
ALL_PROGRAMS = 1 << 30  # and more
TOGETHER = tl.constexpr(8)  # sequences side by side
TOGETHER_BY_INTERVALS = tl.constexpr(16)  # where keys have intervals, and queries attend few of them
# More are side by side where what the blocks of all of them walk stays in the L2 cache beside what else is read. A WALK_UNIT is 512 times 64
# numbers, so many of which are 20 MiB of keys and values in 16 bits; float32 takes 40 MiB, and query heads that share keys count for each of
# them. NVIDIA H200, 2026-11-30, causal, with 8 sequences and with more: forward and backward (1, 20, 2048², 64) 0.040, 0.109 and 0.034,
# 0.089 ms, (1, 40, 1024², 64) 0.028, 0.063 and 0.024, 0.058; (2, 16, 2048², 160) forward 0.095 and 0.097, with 40 MiB 0.098 (docs/history.md).
UNITS_IN_CACHE, WALK_UNIT = tl.constexpr(320), tl.constexpr(512)


@triton.jit
def place(length, heads, BLOCK: tl.constexpr, packed_blocks=None):
    """(block, head, batch) of this program in a grid of one axis, blocks fastest; blocks of packed sequences are those of a list."""
    program = tl.program_id(0)
    if packed_blocks is None:
        blocks = tl.cdiv(length, BLOCK)
        return program % blocks, program // blocks % heads, program // blocks // heads
    else:
        blocks = tl.num_programs(0) // heads
        block, batch = listed_block(packed_blocks, program % blocks)
        return block, program // blocks, batch


@triton.jit
def listed_block(packed_blocks, number):
    """(block, batch entry) of an entry of a list of the blocks of packed sequences (`packed_blocks`)."""
    return tl.load(packed_blocks + 2 * number), tl.load(packed_blocks + 2 * number + 1)


@triton.jit
def place_work(number, numbers, rules, length, heads, BLOCK: tl.constexpr, walked=None):
    """:func:`place` of a block of queries, for the program of that number among so many, in the order of :func:`place_keys`.

    Under a causal mask, and under intervals, the last blocks begin first. Under the former they see the most keys.
    """
    block, head, batch = _place(number, numbers, rules, length, heads, BLOCK, walked)
    if rules.packed_blocks is None and (rules.right is not None or rules.first is not None):
        block = tl.cdiv(length, BLOCK) - 1 - block
    return block, head, batch


def hides_by_place_alone(problem: Problem) -> bool:
    """Whether a causal mask hides pairs, and no window, interval or other mask: last keys have few queries then."""
    hides = problem.right is not None and problem.right < problem.query.shape[2] - 1
    return hides and problem.left is None and problem.first is None and not problem.is_masked


def wave_of(problem: Problem, programs: int, places: int, parts: int) -> int | None:
    """How many programs begin side by side, one on each processor, where a causal mask alone hides pairs and all of a launch run at once.

    Every second so many are then in the reverse order, so that a processor with long work has short work, too. Where the heads of a group are
    dealt out to several programs, which have no queries in common, it is more than all programs. None else, and where batch entries may share a
    bias of pairs, whose tiles they read together.
    """
    if not hides_by_place_alone(problem) or problem.pair_bias is not None or problem.ends_q is not None:
        return None
    count = processors(problem.query.device)
    return count if count < programs <= places else ALL_PROGRAMS if parts > 1 else None


@triton.jit
def place_keys(rules, length, heads, BLOCK: tl.constexpr, wave=None, walked=None):
    """:func:`place` of a block of keys; but several sequences work on a block side by side where they share a bias or have a causal mask, a
    window or intervals.

    A bias that batch entries share is read once then. Else the long work of all comes first, and short work is left to end with, when
    processors wait for the last program. Groups have TOGETHER sequences, under intervals TOGETHER_BY_INTERVALS. Under a causal mask that is no
    window, and not packed, they are as even as can be, so that the last does not begin its long work at the end (:func:`_even_group`); there
    blocks of a sequence walk so many numbers, in 64s (`walked`). With a `wave` (:func:`wave_of`) all sequences are one group.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if wave is None:
        return _place(program, programs, rules, length, heads, BLOCK, walked)
    else:
        begin = program // wave * wave
        if program // wave % 2 == 1:
            program = begin + tl.minimum(begin + wave, programs) - 1 - program
        sequences = programs // tl.cdiv(length, BLOCK)
        return program // sequences, program % sequences % heads, program % sequences // heads


@triton.jit
def _place(program, programs, rules, length, heads, BLOCK: tl.constexpr, walked):
    """:func:`place_keys` of a program with that number of so many.

    The listed blocks of packed sequences are as those of one batch entry. They have their order, longest work first, and share no bias.
    """
    if rules.packed_blocks is None:
        return _place_blocks(program, programs, rules, tl.cdiv(length, BLOCK), heads, walked)
    else:
        number, head, _ = _place_blocks(program, programs, rules, programs // heads, heads, walked)
        block, batch = listed_block(rules.packed_blocks, number)
        return block, head, batch


@triton.jit
def _place_blocks(program, programs, rules, blocks, heads, walked):
    """:func:`place_keys` of a program with that number of so many, where a batch entry has so many blocks."""
    if rules.shared is not None:
        begin = program // (blocks * heads * TOGETHER) * TOGETHER
        rest = program - begin * blocks * heads
        together = tl.minimum(programs // (blocks * heads) - begin, TOGETHER)
        return rest // together % blocks, rest // together // blocks, begin + rest % together
    elif rules.right is not None or rules.first is not None:
        if rules.first is None and rules.left is None and rules.packed_blocks is None:
            begin, together = _even_group(program // blocks, programs // blocks, rules, walked)
        else:
            MOST: tl.constexpr = TOGETHER if rules.first is None else TOGETHER_BY_INTERVALS
            begin = program // (blocks * MOST) * MOST
            together = tl.minimum(programs // blocks - begin, MOST)
        rest = program - begin * blocks
        sequence = begin + rest % together
        return rest // together, sequence % heads, sequence // heads
    else:
        return program % blocks, program // blocks % heads, program // blocks // heads


@triton.jit
def _even_group(number, sequences, rules, walked):
    """(the first, how many) of the sequences that are side by side with one of a number, TOGETHER at most. Without a bias, but a table's, they
    are about twice as many or more where UNITS_IN_CACHE has room for them. No group has two more than another.
    """
    groups = tl.cdiv(sequences, TOGETHER)
    if rules.bias is None and walked is not None:
        in_cache = tl.cdiv(sequences * tl.cdiv(walked, WALK_UNIT), UNITS_IN_CACHE)
        groups = tl.where(2 * in_cache <= groups, tl.maximum(in_cache, 1), groups)
    fewer = sequences // groups
    longer = sequences % groups * (fewer + 1)  # sequences of groups that have one more
    base = tl.where(number < longer, 0, longer)
    together = tl.where(number < longer, fewer + 1, fewer)
    return base + (number - base) // together * together, together


@triton.jit
def member_of(ends, seq, member, sharing_heads, spread, packed_blocks=None):
    """The sequence of one of the (batch, head) that share a slice of a bias, by its number; `seq` is the slice's own entry and head.

    A slice is shared by `sharing_heads` heads in each of its batch entries: in all where the bias has no batch axis, in one where it has, and
    in those that the `spread` says (`leading.Spread`) where there is one. `ends` are the rules', None in a kernel that serves no packed
    sequences. Where all of these share the slice, `packed_blocks` lists them (`packed_sequences`); one that is left over has no queries.
    """
    len_q = seq.len_q
    if packed_blocks is not None:
        block, batch = listed_block(packed_blocks, member // sharing_heads)
        len_q = tl.where(block == 0, len_q, 0)
    elif spread is None:
        batch = seq.batch + member // sharing_heads
    else:
        batch = stepped(seq.batch, spread.entry_unit, spread.entry_every, spread.entry_step)
        batch += stepped(member // sharing_heads, spread.member_unit, spread.member_every, spread.member_step)
    return sequence(ends, batch, seq.head * sharing_heads + member % sharing_heads, len_q, seq.len_k)
