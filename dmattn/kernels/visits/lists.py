"""Lists of the blocks that a program visits: for every block of queries those of keys, or for every block of keys those of queries.

A list is a row of a (B or 1, H or Hk or 1, blocks, 3 + entries) int32 tensor. It begins with 0 and two counts: visits to partial blocks, and
to full ones. The numbers of the partial blocks ascend from the front, those of the full blocks from the back. No pair of a full block is
hidden, be it by mask, intervals, window or the keys' end. The 0 of the first list is where programs may count the blocks that they draw
(hopper/walk.py): whoever makes lists clears it, even if the first list has no block to describe, and no other launch has to.

Memory is O(N), because a list has at most LISTED entries. The last of so many counts as partial, and stands for all blocks behind it: they are
visited one by one up to the last live one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.layout import slice_pointer

LISTED = tl.constexpr(1022)
COUNTS = tl.constexpr(3)  # before the entries
CHUNK = tl.constexpr(128)  # blocks that a program looks at together when it makes a list of a mask: for each it reads many states


def empty_lists(like: Tensor, batch: int, heads: int, owners: int, blocks: int) -> Tensor:
    """Room for a list of up to `blocks` blocks for each of `owners` blocks, on the device of `like`."""
    return like.new_empty((batch, heads, owners, COUNTS.value + min(blocks, LISTED.value)), dtype=torch.int32)


@triton.jit
def visits(lists, seq, owner, BLOCK: tl.constexpr):
    """(partial blocks, full blocks) that the block of a span visits."""
    pointer = list_pointer(lists, seq, owner, BLOCK)
    return tl.load(pointer + 1), tl.load(pointer + 2)


@triton.jit
def visited_block(lists, seq, owner, visit, partial, full, entries, BLOCK: tl.constexpr):
    """The number of the block of one visit: the partial ones come first; 0 after the last. `entries` is how many a list has room for."""
    listed = tl.minimum(visit + full, LISTED - 1) - full
    index = tl.where(visit < partial, listed, entries - 1 - (visit - partial))
    number = tl.load(list_pointer(lists, seq, owner, BLOCK) + COUNTS + index, mask=visit < partial + full, other=0)
    return number + tl.where(visit < partial, visit - listed, 0)


@triton.jit
def room(length, WALK: tl.constexpr):
    """How many entries a list of the blocks of an axis has room for."""
    return tl.minimum(tl.cdiv(length, WALK), LISTED)


@triton.jit
def list_pointer(lists, seq, owner, BLOCK: tl.constexpr):
    """Pointer to the list of a span's block, which begins with its counts."""
    return slice_pointer(lists, seq) + tl.cast(owner.start // BLOCK, tl.int64) * lists.row


@triton.jit
def append(pointer, entries, progress, number, live, full):
    """Add the `live` ones of a chunk of blocks to the list at `pointer`; the new `progress`.

    `progress` is (live blocks so far, full ones, the block of the last entry, the last live block), at first (0, 0, 0, -1).
    """
    count, fulls, turn, final = progress
    position = count + tl.cumsum(live.to(tl.int32), 0) - 1
    full = live & full & (position < LISTED - 1)  # the last entry says nothing of those that it stands for
    full_position = fulls + tl.cumsum(full.to(tl.int32), 0) - 1
    tl.store(pointer + COUNTS + (position - full_position - 1), number, mask=live & (full == 0) & (position < LISTED))
    tl.store(pointer + COUNTS + entries - 1 - full_position, number, mask=full)
    turn = tl.maximum(turn, tl.max(tl.where(live & (position == LISTED - 1), number, 0)))
    final = tl.maximum(final, tl.max(tl.where(live, number, -1)))
    return count + tl.sum(live.to(tl.int32)), fulls + tl.sum(full.to(tl.int32)), turn, final


@triton.jit
def close(pointer, progress):
    """Write how many visits the list makes, and the 0 before."""
    count, fulls, turn, final = progress
    if count > LISTED:
        count = LISTED + final - turn
    tl.store(pointer, 0)
    tl.store(pointer + 1, count - fulls)
    tl.store(pointer + 2, fulls)
