"""Interval masks in the kernels: for every block of queries the list of the blocks of keys that any of them may attend.

What a tile has to know of each of its keys, its interval and its bias, is also packed here by blocks of keys, for kernels that copy it with
them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..replay import launch
from .layout import Sequence, Span, load_rows, slice_pointer, strided
from .lists import append, close, empty_lists, list_pointer, room
from .overlap import follow
from .scores import LOG2E
from .sequence import LARGEST, all_in_window, place, window_range

CHUNK = tl.constexpr(256)  # blocks that a program looks at together when it makes a list: four numbers of each
SUMMARY = 512  # keys that a program sums up


def interval_lists(problem: Any, block_m: int, block_n: int) -> Tensor:
    """For every block of queries the list of the blocks of keys to visit, see `lists`, where there are intervals. The window counts too."""
    return _lists(problem, block_bounds(problem, block_n), block_m, block_n)


def packed_keys(problem: Any, block_m: int, block_n: int) -> tuple[Tensor | None, Tensor | None]:
    """(lists as of `interval_lists`, what each block of keys has to say) of a problem.

    The former is None without intervals, the latter also where there is no bias of keys either.

    The latter is int32, (B or 1, H or Hk or 1, blocks, BLOCK_N times 1, 2 or 4). With intervals, the middle of each key's times two and its
    length come first, of what the window leaves of it, as the bits of float32: for them to be exact there may be 2 ** 22 queries. With a
    bias of keys alone follows that times LOG2E, likewise, and with both there is as much room again, which nothing is written to.
    """
    bias = problem.bias if of_keys(problem.bias) else None
    given = [x for x in (problem.first, problem.last, bias) if x is not None]
    if not given:
        return None, None
    batch, heads = (max(sizes) for sizes in zip(*(x.shape[:2] for x in given), strict=True))
    parts = (0 if problem.first is None else 2) + (0 if bias is None else 2 if len(given) > 1 else 1)
    packed = given[0].new_empty((batch, heads, triton.cdiv(problem.key.shape[2], block_n), parts * block_n), dtype=torch.int32)
    bounds = _summary(problem, block_n, packed)
    return (None if bounds is None else _lists(problem, bounds, block_m, block_n)), packed


def of_keys(bias: Tensor | None) -> bool:
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


def block_bounds(problem: Any, block_n: int) -> Tensor:
    """Of the intervals of each block of keys: smallest first, largest last, largest first, smallest last; (B or 1, H or Hk or 1, blocks, 4).

    A query from the first of these to the second may attend a key of the block, and one from the third to the fourth attends all. Empty
    intervals are left out of the former pair, and leave nothing of the latter. int32.
    """
    return _summary(problem, block_n, None)


def _summary(problem: Any, block_n: int, packed: Tensor | None) -> Any:
    """`block_bounds`, or None without intervals; and where there is any, `packed` is filled as :func:`packed_keys` has it."""
    len_q, len_k = problem.query.shape[2], problem.key.shape[2]
    first, last, bias, bounds = problem.first, problem.last, None, None
    if packed is None:
        batch, heads = (max(sizes) for sizes in zip(first.shape[:2], last.shape[:2], strict=True))
    else:
        batch, heads = packed.shape[:2]
        bias = problem.bias[:, :, 0] if of_keys(problem.bias) else None
    blocks = triton.cdiv(len_k, block_n)
    if first is not None:
        bounds = first.new_empty((batch, heads, blocks, 4))
    if batch * heads * blocks:
        launch(
            _summary_kernel,
            batch * heads * triton.cdiv(blocks, max(1, SUMMARY // block_n)),
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
            BLOCKS=max(1, SUMMARY // block_n),
            num_warps=4,
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
def _summary_kernel(
    first, last, bias, bounds, packed, left, right, heads, len_q, len_k, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One program: the bounds of BLOCKS blocks of keys of one (batch, head), and the blocks packed, each where it is wanted."""
    follow()
    part, head, batch = place(len_k, heads, BLOCKS * BLOCK_N)
    seq = Sequence(batch, head, len_q, len_k)
    index = tl.arange(0, BLOCKS * BLOCK_N)
    cols = Span(part * (BLOCKS * BLOCK_N), index.to(tl.int64), len_k)
    real = part * BLOCKS + index // BLOCK_N < tl.cdiv(len_k, BLOCK_N)  # of a block that holds a key
    if first is not None:
        first_cols = load_rows(first, seq, cols, LARGEST)
        last_cols = load_rows(last, seq, cols, 0)
        alive = first_cols < last_cols
        block = part * BLOCKS + tl.arange(0, BLOCKS)
        pointers = slice_pointer(bounds, seq) + block.to(tl.int64) * bounds.row
        inside = block < tl.cdiv(len_k, BLOCK_N)
        tl.store(pointers, tl.min(tl.reshape(tl.where(alive, first_cols, LARGEST), (BLOCKS, BLOCK_N)), 1), mask=inside)
        tl.store(pointers + bounds.col, tl.max(tl.reshape(tl.where(alive, last_cols, 0), (BLOCKS, BLOCK_N)), 1), mask=inside)
        tl.store(pointers + 2 * bounds.col, tl.max(tl.reshape(tl.where(alive, first_cols, LARGEST), (BLOCKS, BLOCK_N)), 1), mask=inside)
        tl.store(pointers + 3 * bounds.col, tl.min(tl.reshape(tl.where(alive, last_cols, 0), (BLOCKS, BLOCK_N)), 1), mask=inside)
    if packed is not None:
        pointers = slice_pointer(packed, seq) + (part * BLOCKS + index // BLOCK_N).to(tl.int64) * packed.row + index % BLOCK_N
        if first is not None:
            position = cols.start + index
            if right is not None:
                first_cols = tl.maximum(first_cols, position - (len_k - len_q + right))
            if left is not None:
                last_cols = tl.minimum(last_cols, position - (len_k - len_q - left) + 1)
            middle2, length = middle_and_length(first_cols, last_cols, len_q)
            tl.store(pointers, middle2.to(tl.int32, bitcast=True), mask=real)
            tl.store(pointers + BLOCK_N, length.to(tl.int32, bitcast=True), mask=real)
            pointers += 2 * BLOCK_N
        if bias is not None:
            bias2 = load_rows(bias, seq, cols, 0.0).to(tl.float32) * LOG2E
            tl.store(pointers, bias2.to(tl.int32, bitcast=True), mask=real)


@triton.jit
def middle_and_length(first, last, len_q):
    """(twice the middle, length) of intervals of queries, in float32: those within have |2 i - middle2| < length."""
    first = tl.maximum(tl.minimum(first, len_q), 0)
    last = tl.maximum(tl.minimum(last, len_q), 0)
    return (first + last - 1).to(tl.float32), (last - first).to(tl.float32)


@triton.jit
def _interval_lists_kernel(bounds, lists, left, right, heads, len_q, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program: the list of one block of queries of one (batch, head). Reads the bounds of all blocks of keys."""
    follow()
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
        if tl.max(live.to(tl.int32)) != 0:
            full = tl.load(bound + 2 * bounds.col, mask=live, other=LARGEST) <= rows.start
            full = full & (tl.load(bound + 3 * bounds.col, mask=live, other=0) >= row_end)
            full = full & all_in_window(left, right, seq, rows.start, number * BLOCK_N, BLOCK_M, BLOCK_N)
            progress = append(pointer, room(len_k, BLOCK_N), progress, number, live, full)
    close(pointer, progress)
