"""The forward pass on Hopper (sm_90), the order of a consumer's tiles of keys: steps of its walk, which of them it has a pair in, and turns."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..base.window import open_keys, steps_backwards
from .walk import own_tiles

BLOCK_M = gl.constexpr(64)  # queries of a consumer


class Turn(NamedTuple):
    """The tile that is next, of all blocks of queries."""

    parity: Any  # of how many there were
    stage: Any  # where it comes to (`copies.stage_of`), which is carried along, as a quotient would take longer
    phase: Any


@gluon.jit
def step_of(walk, start, config: gl.constexpr):
    """The step at which the loops come to the tile from a key on, and the key of a step; where there are lists, they are the same. The walk
    must have a tile.

    The last keys come first, for theirs is the tile that has to be masked under a causal mask or an odd length, as the first one is here. Not
    beside a bias of pairs, where the order of memory was the faster one (docs/history.md).
    """
    if config.BACKWARDS:
        return 2 * walk.begin + (walk.full_end - 1 - walk.begin) // config.BLOCK_N * config.BLOCK_N - start
    else:
        return start


@gluon.jit
def own_steps(context, which: gl.constexpr, config: gl.constexpr):
    """[begin, end) of the steps of a walk at whose tiles a consumer has a pair (`own_tiles`); without a window all steps."""
    rules, walk = context.rules, context.walk
    if rules.lists is not None or (rules.left is None and rules.right is None):
        return walk.begin, walk.full_end  # where few tiles go past the last query: rows of 197 lost a tenth by looking for them
    else:
        begin, end = own_tiles(rules, context.seq, context.row + which * BLOCK_M, walk, BLOCK_M, config.BLOCK_N)
        if config.BACKWARDS:
            begin, end = steps_backwards(walk.begin, walk.full_end, begin, end, config.BLOCK_N)
        return begin, end


@gluon.jit
def open_steps(context, after, until, which: gl.constexpr, config: gl.constexpr):
    """[begin, end) of the steps within [after, until) whose tiles hide no pair from a consumer."""
    rules, walk = context.rules, context.walk
    if rules.lists is not None:
        return walk.end, walk.full_end
    else:
        row = context.row + which * BLOCK_M
        begin, end = open_keys(rules.left, rules.right, context.seq, row, walk.begin, walk.end, BLOCK_M, config.BLOCK_N)
        if config.BACKWARDS:
            begin, end = steps_backwards(walk.begin, walk.full_end, begin, end, config.BLOCK_N)
        return gl.minimum(gl.maximum(begin, after), until), gl.minimum(gl.maximum(end, after), until)


@gluon.jit
def first_turn():
    """That of the first tile of all. Loops carry tensors, and a 0 that is written down would not be one."""
    zero = gl.program_id(0) * 0
    return Turn(zero, zero, zero)


@gluon.jit
def turn_after(turn, near, STAGES: gl.constexpr):
    """The next one; the same where `near` is 0, and not 1."""
    last = turn.stage + near == STAGES
    return Turn(turn.parity ^ near, gl.where(last, 0, turn.stage + near), gl.where(last, turn.phase ^ 1, turn.phase))


@gluon.jit
def turn_before(turn, STAGES: gl.constexpr):
    """(stage, phase) of the tile before."""
    first = turn.stage == 0
    return gl.where(first, STAGES - 1, turn.stage - 1), gl.where(first, turn.phase ^ 1, turn.phase)
