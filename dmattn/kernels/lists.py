"""Lists of the blocks that a program visits: for every block of queries those of keys, or for every block of keys those of queries.

A list is a row of a (B or 1, H or Hk or 1, blocks, 1 + entries) int32 tensor: how many visits, then the entries, ascending. An entry is
twice the number of a block, plus 1 where no pair of it is hidden by the mask. Memory is O(N): the last of LISTED entries also stands for all
blocks that follow it, which are visited one by one up to the last that is live.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import slice_pointer

LISTED = tl.constexpr(1023)
CHUNK = tl.constexpr(128)  # blocks that a program looks at together when it makes a list


def empty_lists(like: Tensor, batch: int, heads: int, owners: int, blocks: int) -> Tensor:
    """Room for a list of up to `blocks` blocks for each of `owners` blocks, on the device of `like`."""
    return like.new_empty((batch, heads, owners, 1 + min(blocks, LISTED.value)), dtype=torch.int32)


@triton.jit
def visits(lists, seq, owner, BLOCK: tl.constexpr):
    """How many blocks the block of a span visits."""
    return tl.load(list_pointer(lists, seq, owner, BLOCK))


@triton.jit
def visited_block(lists, seq, owner, visit, BLOCK: tl.constexpr):
    """(number, 1 if the mask hides nothing of it else 0) of the block of one visit."""
    listed = tl.minimum(visit, LISTED - 1)
    entry = tl.load(list_pointer(lists, seq, owner, BLOCK) + 1 + listed)
    return entry // 2 + (visit - listed), entry % 2


@triton.jit
def list_pointer(lists, seq, owner, BLOCK: tl.constexpr):
    """Where the list of the block of a span begins, with its count."""
    return slice_pointer(lists, seq) + tl.cast(owner.start // BLOCK, tl.int64) * lists.row


@triton.jit
def append(pointer, progress, number, live, full):
    """Add the `live` ones of a chunk of blocks to the list at `pointer`; `progress`, at first (0, 0, -1), is what :func:`close` needs.

    It is (live blocks so far, the block of the last entry, the last live block).
    """
    count, turn, final = progress
    position = count + tl.cumsum(live.to(tl.int32), 0) - 1
    full = full & (position < LISTED - 1)  # the last entry says nothing of those that it stands for
    tl.store(pointer + 1 + position, number * 2 + full.to(tl.int32), mask=live & (position < LISTED))
    turn = tl.maximum(turn, tl.max(tl.where(live & (position == LISTED - 1), number, 0)))
    final = tl.maximum(final, tl.max(tl.where(live, number, -1)))
    return count + tl.sum(live.to(tl.int32)), turn, final


@triton.jit
def close(pointer, progress):
    """Write how many visits the list makes."""
    count, turn, final = progress
    if count > LISTED:
        count = LISTED + final - turn
    tl.store(pointer, count)
