"""Interval masks in the kernels: for every block of queries the list of the blocks of keys that any of them may attend.

The copy engine brings what a tile has to know of its keys beside the tile, if it stands packed by blocks: the interval of each, less what the
window hides, and its bias.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import Sequence, Span, load_rows, slice_pointer, strided
from .lists import append, close, empty_lists, list_pointer, room
from .replay import launch
from .scores import LOG2E
from .sequence import LARGEST, all_in_window, place, window_range

CHUNK = tl.constexpr(512)  # blocks that a program looks at together when it makes a list


def interval_lists(problem: Any, block_m: int, block_n: int) -> Tensor:
    """For every block of queries the list of the blocks of keys to visit, see `lists`, where there are intervals. The window counts too."""
    return _lists(problem, block_bounds(problem, block_n), block_m, block_n)


def packed_intervals(problem: Any, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
    """(lists as of `interval_lists`, what each block of keys has to say): int32 (B or 1, H or Hk or 1, blocks, BLOCK_N times 2 or 4).

    Of each block the first queries of its keys' intervals, then the last ones, both inside the window; and where the bias is one of keys alone,
    that times LOG2E, as the bits of a float32, and as much room that nothing is written to. A key past the end has an empty interval.
    """
    bias = problem.bias if by_key(problem.bias) else None
    batch, heads = torch.broadcast_shapes(*(x.shape[:2] for x in (problem.first, problem.last, bias) if x is not None))
    blocks = triton.cdiv(problem.key.shape[2], block_n)
    packed = problem.first.new_empty((batch, heads, blocks, (2 if bias is None else 4) * block_n))
    return _lists(problem, block_bounds(problem, block_n, packed), block_m, block_n), packed


def by_key(bias: Tensor | None) -> bool:
    """Whether a bias differs by key, and by that alone of query and key."""
    return bias is not None and bias.shape[2] == 1 and bias.shape[3] > 1


def _lists(problem: Any, bounds: Tensor, block_m: int, block_n: int) -> Tensor:
    len_q, len_k = problem.query.shape[2], problem.key.shape[2]
    blocks_m = triton.cdiv(len_q, block_m)
    batch, heads, blocks_n = bounds.shape[:3]
    lists = empty_lists(bounds, batch, heads, blocks_m, blocks_n)
    if not bounds.numel():
        return lists.zero_()
    launch(
        _interval_lists_kernel,
        batch * heads * blocks_m,
        bounds=strided(bounds, heads),
        lists=strided(lists, heads),
        left=problem.left,
        right=problem.right,
        heads=heads,
        len_q=len_q,
        len_k=len_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return lists


def block_bounds(problem: Any, block_n: int, packed: Tensor | None = None) -> Tensor:
    """Of the intervals of each block of keys: smallest first, largest last, largest first, smallest last; (B or 1, H or Hk or 1, blocks, 4).

    A query from the first of these to the second may attend a key of the block, and one from the third to the fourth attends all. Empty
    intervals are left out of the former pair, and leave nothing of the latter. int32. Fills `packed`, where there is any, on the way.
    """
    first, last = torch.broadcast_tensors(problem.first, problem.last)
    len_q, len_k = problem.query.shape[2], first.shape[2]
    bias = None
    if packed is not None:
        first, last = (x.expand(*packed.shape[:2], len_k) for x in (first, last))
        bias = problem.bias[:, :, 0].expand(first.shape) if by_key(problem.bias) else None
    batch, heads = first.shape[:2]
    blocks = triton.cdiv(len_k, block_n)
    bounds = first.new_empty((batch, heads, blocks, 4))
    if bounds.numel():
        launch(
            _block_bounds_kernel,
            batch * heads * blocks,
            first=strided(first, heads),
            last=strided(last, heads),
            bias=strided(bias, heads),
            bounds=strided(bounds, heads),
            packed=strided(packed, heads),
            left=problem.left,
            right=problem.right,
            heads=heads,
            len_q=len_q,
            len_k=len_k,
            BLOCK_N=block_n,
            num_warps=1,
        )
    return bounds


@triton.jit
def any_live_interval(first, last, seq, rows, cols, BLOCK_M: tl.constexpr):
    """Whether a query of the tile lies in the interval of one of its keys."""
    first_cols = load_rows(first, seq, cols, LARGEST)
    last_cols = load_rows(last, seq, cols, 0)
    live = (first_cols < last_cols) & (first_cols < rows.start + BLOCK_M) & (last_cols > rows.start)
    return tl.max(live.to(tl.int32)) != 0


@triton.jit
def _block_bounds_kernel(first, last, bias, bounds, packed, left, right, heads, len_q, len_k, BLOCK_N: tl.constexpr):
    """One program: the bounds of one block of keys of one (batch, head), and the block packed, where that is wanted."""
    block, head, batch = place(len_k, heads, BLOCK_N)
    seq = Sequence(batch, head, len_q, len_k)
    cols = Span(block * BLOCK_N, tl.arange(0, BLOCK_N).to(tl.int64), len_k)
    first_cols = load_rows(first, seq, cols, LARGEST)
    last_cols = load_rows(last, seq, cols, 0)
    alive = first_cols < last_cols
    pointer = slice_pointer(bounds, seq) + tl.cast(block, tl.int64) * bounds.row
    tl.store(pointer, tl.min(tl.where(alive, first_cols, LARGEST)))
    tl.store(pointer + bounds.col, tl.max(tl.where(alive, last_cols, 0)))
    tl.store(pointer + 2 * bounds.col, tl.max(tl.where(alive, first_cols, LARGEST)))
    tl.store(pointer + 3 * bounds.col, tl.min(tl.where(alive, last_cols, 0)))
    if packed is not None:
        index = tl.arange(0, BLOCK_N)
        if right is not None:
            first_cols = tl.maximum(first_cols, block * BLOCK_N + index - (len_k - len_q + right))
        if left is not None:
            last_cols = tl.minimum(last_cols, block * BLOCK_N + index - (len_k - len_q - left) + 1)
        pointers = slice_pointer(packed, seq) + tl.cast(block, tl.int64) * packed.row + index
        tl.store(pointers, first_cols)
        tl.store(pointers + BLOCK_N, last_cols)
        if bias is not None:
            bias2 = load_rows(bias, seq, cols, 0.0).to(tl.float32) * LOG2E
            tl.store(pointers + 2 * BLOCK_N, bias2.to(tl.int32, bitcast=True))


@triton.jit
def _interval_lists_kernel(bounds, lists, left, right, heads, len_q, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program: the list of one block of queries of one (batch, head). Reads the bounds of all blocks of keys."""
    block, head, batch = place(len_q, heads, BLOCK_M)
    seq = Sequence(batch, head, len_q, len_k)
    rows = Span(block * BLOCK_M, 0, len_q)
    row_end = tl.minimum(rows.start + BLOCK_M, len_q)
    begin, end = window_range(left, right, seq, rows, BLOCK_M)
    pointer = list_pointer(lists, seq, rows, BLOCK_M)
    progress = (0, 0, 0, -1)
    for chunk in range(begin // BLOCK_N // CHUNK * CHUNK, tl.cdiv(end, BLOCK_N), CHUNK):
        number = chunk + tl.arange(0, CHUNK)
        bound = slice_pointer(bounds, seq) + tl.cast(number, tl.int64) * bounds.row
        real = (number * BLOCK_N < end) & ((number + 1) * BLOCK_N > begin)
        live = real & (tl.load(bound, mask=real, other=LARGEST) < row_end)
        live = live & (tl.load(bound + bounds.col, mask=real, other=0) > rows.start)
        full = (tl.load(bound + 2 * bounds.col, mask=real, other=LARGEST) <= rows.start) & all_in_window(
            left, right, seq, rows.start, number * BLOCK_N, BLOCK_M, BLOCK_N
        )
        full = full & (tl.load(bound + 3 * bounds.col, mask=real, other=0) >= row_end)
        progress = append(pointer, room(len_k, BLOCK_N), progress, number, live, full)
    close(pointer, progress)
