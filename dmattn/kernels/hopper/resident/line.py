"""The line of work of hopper/resident/query_grad.py, and the pieces into which programs cut it.

All the work, blocks of queries times the members that share their bias, is one line. It is cut into as many equal pieces as there are
processors, and a program takes a piece. Blocks are counted by queries fastest, then heads of the bias.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...base.layout import Sequence
from .bias import slice_of

FILLING = gl.constexpr(3)  # members whose time it takes to fill the bias of a block


class Line(NamedTuple):
    """The line of all the work, blocks of queries times their members, and the lengths of a sequence."""

    part_count: Any  # of each block's gradient of the bias
    block_count: Any
    entries: Any  # of the bias (`slice_of`)
    sharing_heads: Any  # how many share a head of the bias
    spread: Any  # which batch entries share a slice (`member_of`)
    members: Any  # how many share a block
    len_q: Any
    len_k: Any


def most_parts(blocks: int, members: int, programs: int) -> int:
    """How many programs have a piece of one block, at most."""
    span = FILLING.value + members
    size, longer = divmod(blocks * span, programs)

    def owner(place: int) -> int:
        return place // (size + 1) if place < longer * (size + 1) else longer + (place - longer * (size + 1)) // size

    return max(owner((block + 1) * span - 1) - owner(block * span + FILLING.value) + 1 for block in range(blocks))


@gluon.jit
def own_piece(line):
    """[begin, end) of the program's piece of the line; the first pieces may have one place more than the others."""
    total = line.block_count * (FILLING + line.members)
    size = total // gl.num_programs(0)
    longer = total % gl.num_programs(0)
    program = gl.program_id(0)
    begin = program * size + gl.minimum(program, longer)
    return begin, begin + size + gl.where(program < longer, 1, 0)


@gluon.jit
def slice_at(number, line):
    """The slice of the bias with that number."""
    entry, bias_head = slice_of(number, line.entries)
    return Sequence(entry, bias_head, line.len_q, line.len_k)


@gluon.jit
def members_in_piece(block, begin, end, members):
    """[first, last) of the members of a block that are in a piece; the first places of a block are for its start."""
    zeroth = block * (FILLING + members) + FILLING
    return gl.maximum(begin - zeroth, 0), gl.minimum(end - zeroth, members)


@gluon.jit
def piece_at(place, line):
    """Whose piece a place on the line is in."""
    total = line.block_count * (FILLING + line.members)
    size = total // gl.num_programs(0)
    longer = total % gl.num_programs(0)
    return gl.where(place < longer * (size + 1), place // (size + 1), longer + (place - longer * (size + 1)) // size)
