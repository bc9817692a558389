"""Interval masks in the kernels: for every block of queries the list of the blocks of keys that any of them may attend."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import Sequence, Span, load_rows, slice_pointer, strided
from .lists import CHUNK, append, close, empty_lists, list_pointer
from .sequence import LARGEST, place, window_range


def interval_lists(problem: Any, block_m: int, block_n: int) -> Tensor:
    """For every block of queries the list of the blocks of keys to visit, see `lists`, where there are intervals. The window counts too."""
    first, last = torch.broadcast_tensors(problem.first, problem.last)
    batch, heads = first.shape[:2]
    len_q, len_k = problem.query.shape[2], problem.key.shape[2]
    blocks_m, blocks_n = triton.cdiv(len_q, block_m), triton.cdiv(len_k, block_n)
    bounds = first.new_empty((batch, heads, blocks_n, 2))
    lists = empty_lists(first, batch, heads, blocks_m, blocks_n)
    if not bounds.numel():
        return lists.zero_()
    _block_bounds_kernel[(batch * heads * blocks_n,)](
        first=strided(first, heads),
        last=strided(last, heads),
        bounds=strided(bounds, heads),
        heads=heads,
        len_k=len_k,
        BLOCK_N=block_n,
        num_warps=1,
    )
    _interval_lists_kernel[(batch * heads * blocks_m,)](
        bounds=strided(bounds, heads),
        lists=strided(lists, heads),
        left=problem.left,
        right=problem.right,
        heads=heads,
        len_q=len_q,
        len_k=len_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=1,
    )
    return lists


@triton.jit
def any_live_interval(first, last, seq, rows, cols, BLOCK_M: tl.constexpr):
    """Whether a query of the tile lies in the interval of one of its keys."""
    first_cols = load_rows(first, seq, cols, LARGEST)
    last_cols = load_rows(last, seq, cols, 0)
    live = (first_cols < last_cols) & (first_cols < rows.start + BLOCK_M) & (last_cols > rows.start)
    return tl.max(live.to(tl.int32)) != 0


@triton.jit
def _block_bounds_kernel(first, last, bounds, heads, len_k, BLOCK_N: tl.constexpr):
    """One program: one block of keys of one (batch, head). Writes the smallest first and the largest last of its non-empty intervals."""
    block, head, batch = place(len_k, heads, BLOCK_N)
    seq = Sequence(batch, head, 0, len_k)
    cols = Span(block * BLOCK_N, tl.arange(0, BLOCK_N).to(tl.int64), len_k)
    first_cols = load_rows(first, seq, cols, LARGEST)
    last_cols = load_rows(last, seq, cols, 0)
    alive = first_cols < last_cols
    pointer = slice_pointer(bounds, seq) + tl.cast(block, tl.int64) * bounds.row
    tl.store(pointer, tl.min(tl.where(alive, first_cols, LARGEST)))
    tl.store(pointer + bounds.col, tl.max(tl.where(alive, last_cols, 0)))


@triton.jit
def _interval_lists_kernel(bounds, lists, left, right, heads, len_q, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program: the list of one block of queries of one (batch, head). Reads the bounds of all blocks of keys."""
    block, head, batch = place(len_q, heads, BLOCK_M)
    seq = Sequence(batch, head, len_q, len_k)
    rows = Span(block * BLOCK_M, 0, len_q)
    row_end = tl.minimum(rows.start + BLOCK_M, len_q)
    begin, end = window_range(left, right, seq, rows, BLOCK_M)
    pointer = list_pointer(lists, seq, rows, BLOCK_M)
    progress = (0, 0, -1)
    for chunk in range(begin // BLOCK_N // CHUNK * CHUNK, tl.cdiv(end, BLOCK_N), CHUNK):
        number = chunk + tl.arange(0, CHUNK)
        bound = slice_pointer(bounds, seq) + tl.cast(number, tl.int64) * bounds.row
        real = (number * BLOCK_N < end) & ((number + 1) * BLOCK_N > begin)
        live = real & (tl.load(bound, mask=real, other=LARGEST) < row_end)
        live = live & (tl.load(bound + bounds.col, mask=real, other=0) > rows.start)
        progress = append(pointer, progress, number, live, live)
    close(pointer, progress)
