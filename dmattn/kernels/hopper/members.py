"""Which members of a slice of a bias have a pair of a tile of dBias, and which have all, for hopper/bias_grad.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..base.layout import slice_pointer
from ..base.place import member_of
from ..base.window import any_in_window
from ..visits.mask_blocks import ATTENDED, GRANULE, HIDDEN
from .registers import load_vector

BLOCK_M = gl.constexpr(64)  # queries of a consumer
BLOCK_N = gl.constexpr(128)


@gluon.jit
def member_after(context, seq, member):
    """The number of the member after a packed sequence's; that after all where no further one is long enough."""
    return gl.where(context.row < seq.len_q, member + context.stride, context.end)


@gluon.jit
def has_tile(context, rules, seq):
    """Whether a packed sequence has a pair of the tile."""
    row, col = context.row, context.col
    seen = any_in_window(rules.left, rules.right, seq, row, col, 2 * BLOCK_M, BLOCK_N)
    return (row < seq.len_q) & (col < seq.len_k) & seen


@gluon.jit
def look(context, rules, member, WARPS: gl.constexpr):
    """What says which pairs of the tile a member has, asked for a member ahead: states of a mask, or the intervals of keys.

    All of it is in each of the WARPS that ask. Behind the last member it is that one's.
    """
    member = gl.minimum(member, context.end - 1)
    seq = member_of(None, context.seq, gl.maximum(member, 0), context.sharing_heads, context.spread)
    if rules.states is not None:
        ACROSS: gl.constexpr = BLOCK_N // GRANULE
        index = gl.arange(0, 2 * BLOCK_M // GRANULE * ACROSS, gl.BlockedLayout([1], [32], [WARPS], [0]))
        row, col = context.row // GRANULE + index // ACROSS, context.col // GRANULE + index % ACROSS
        pointers = slice_pointer(rules.states, seq) + row.to(gl.int64) * rules.states.row + col * rules.states.col
        real = (row * GRANULE < seq.len_q) & (col * GRANULE < seq.len_k)
        return (gl.load(pointers, mask=real, other=0).to(gl.int32),)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
        first = load_vector(rules.first, rules.first.row, seq, context.col, seq.len_k, 0, BLOCK_N, LAYOUT)
        return first, load_vector(rules.last, rules.last.row, seq, context.col, seq.len_k, 0, BLOCK_N, LAYOUT)


@gluon.jit
def found(looked, context, rules):
    """(whether a mask or intervals leave a member a pair of the tile, whether they leave all), from what was looked at."""
    if rules.states is not None:
        return gl.max(looked[0] & ATTENDED, 0) != 0, gl.max(looked[0] & HIDDEN, 0) == 0
    else:
        first, last = looked
        row = context.row
        end = gl.minimum(row + 2 * BLOCK_M, context.seq.len_q)
        live = gl.maximum(first, row) < gl.minimum(last, end)
        return gl.max(live.to(gl.int32), 0) != 0, gl.min(((first <= row) & (last >= end)).to(gl.int32), 0) != 0
