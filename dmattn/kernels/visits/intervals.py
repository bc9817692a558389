"""Interval masks in the kernels: for every block of queries the list of the blocks of keys that any of them may attend.

Where keys have two intervals, also for every block of keys the list of the blocks of queries, which may lie in two places.

Intervals packed by blocks of keys and bias columns (base/bias_columns.py) are made here, too. Kernels copy them beside their keys.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.bias_columns import COLUMNS, columns_of
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_rows, slice_pointer, strided
from ..base.leading import Nested, by_entry, common_entries, vectors_of, with_entries
from ..base.overlap import follow
from ..base.place import LARGEST, place
from ..base.window import all_in_window, first_query, keys_in_window, last_query, queries_in_window
from .lists import append, close, empty_lists, list_pointer, room

CHUNK = tl.constexpr(256)  # blocks that a program looks at together when it makes a list: four numbers of each
SUMMARY = 512  # keys that a program sums up


def interval_lists(problem: Problem, block_m: int, block_n: int, by_key: bool = False) -> Any:
    """For every block of queries the list of the blocks of keys to visit, or with `by_key` the other way round; see `lists`.

    There must be intervals; the window counts too.
    """
    given = [x for x in (problem.first, problem.last, problem.also_first, problem.also_last) if x is not None]
    batch, owner = common_entries(given, problem.query.shape[0])
    pairs = [given[i : i + 2] for i in range(0, len(given), 2)]
    if not any(isinstance(x, Nested) for x in given):
        bounds = [_bounds(problem, pair, block_n, *common_entries(pair, batch)) for pair in pairs]
    else:
        bounds = [_bounds(problem, pair, block_n, batch, owner) for pair in pairs]
    return with_entries(_lists(problem, bounds, block_m, block_n, by_key), owner)


def described_keys(problem: Problem, block_m: int, block_n: int) -> tuple[Any, Tensor | None, Tensor | None]:
    """(lists as of `interval_lists`, packed intervals, bias columns) of a problem, each None where there are none.

    Packed intervals are int32, (B or 1, H or Hk or 1, blocks, 2 BLOCK_N): twice the middle of each key's interval, then the lengths, as the
    bits of float32. They are intervals as the window leaves them, and exact up to 2 ** 22 queries. Bias columns are bfloat16,
    (B or 1, H or Hk or 1, Sk, COLUMNS); blocks of keys that no query attends have none.
    """
    bias = problem.key_bias
    given = [x for x in (problem.first, problem.last, bias) if x is not None]
    if not given:
        return None, None, None
    (batch, owner), heads = common_entries(given, problem.query.shape[0]), max(x.shape[1] for x in given)
    len_k = problem.key.shape[2]
    bias_columns = None if bias is None else bias.new_empty((batch, heads, len_k, COLUMNS.value), dtype=torch.bfloat16)
    if problem.first is None:
        _summary(problem, block_n, (batch, heads), owner, None, bias_columns)
        return None, None, bias_columns
    packed = problem.first.new_empty((batch, heads, triton.cdiv(len_k, block_n), 2 * block_n))
    bounds = _summary(problem, block_n, (batch, heads), owner, packed, bias_columns)
    return with_entries(_lists(problem, [bounds], block_m, block_n, by_key=False), owner), packed, bias_columns


def _lists(problem: Problem, bounds: list[Tensor], block_m: int, block_n: int, by_key: bool) -> Tensor:
    """Lists by the `block_bounds` of intervals, or of both intervals of each key."""
    len_q, len_k = problem.query.shape[2], problem.key.shape[2]
    blocks_m, blocks_n = triton.cdiv(len_q, block_m), bounds[0].shape[2]
    batch, heads = (max(x.shape[axis] for x in bounds) for axis in (0, 1))
    owners, walked = (blocks_n, blocks_m) if by_key else (blocks_m, blocks_n)
    lists = empty_lists(bounds[0], batch, heads, owners, walked)
    if not lists.numel():
        return lists
    if not blocks_n or not blocks_m:
        return lists.zero_()
    launch(
        _query_interval_lists_kernel if by_key else _interval_lists_kernel,
        batch * heads * owners,
        bounds=strided(bounds[0], heads),
        also_bounds=strided(bounds[1], heads) if len(bounds) > 1 else None,
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


def block_bounds(problem: Problem, block_n: int) -> Any:
    """Of the intervals of each block of keys: smallest first, largest last, largest first, smallest last; (B or 1, H or Hk or 1, blocks, 4).

    A query from the first bound to the second may attend a key of the block; one from the third to the fourth attends all its keys. Empty
    intervals do not count for the first pair, and leave the second pair empty. int32.
    """
    pair = problem.first, problem.last
    batch, owner = common_entries(pair, problem.query.shape[0])
    return with_entries(_bounds(problem, pair, block_n, batch, owner), owner)


def _bounds(problem: Problem, pair: Any, block_n: int, batch: int, owner: Any) -> Tensor:
    """`block_bounds` of a pair, first and last queries, for so many entries of the batch: see :func:`_summary`."""
    entries = batch, max(x.shape[1] for x in pair)
    return _summary(problem._replace(first=pair[0], last=pair[1]), block_n, entries, owner, None, None)


def _summary(
    problem: Problem, block_n: int, entries: tuple[int, int], owner: Any, packed: Tensor | None, bias_columns: Tensor | None
) -> Any:  # fmt: skip
    """`block_bounds` for so many (batch, heads), None without intervals; and what is given is filled as :func:`described_keys` has it.

    The batch entries are those of an `owner`, if there is one (`leading.common_entries`).
    """
    len_q, len_k = problem.query.shape[2], problem.key.shape[2]
    first, last, bounds = problem.first, problem.last, None
    batch, heads = entries
    blocks = triton.cdiv(len_k, block_n)
    read = by_entry if owner is not None else lambda x: x
    if first is not None:
        bounds = first.new_empty((batch, heads, blocks, 4))
    if batch * heads * blocks:
        launch(
            _summary_kernel,
            batch * heads * triton.cdiv(blocks, max(1, SUMMARY // block_n)),
            first=strided(read(first), heads),
            last=strided(read(last), heads),
            bias=None if bias_columns is None else strided(read(vectors_of(problem.bias)), heads),
            bounds=strided(bounds, heads),
            packed=strided(packed, heads),
            bias_columns=strided(bias_columns, heads),
            scale=problem.scale,
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
def any_live_interval(rules, seq, rows, cols, BLOCK_M: tl.constexpr):
    """Whether a query of the tile lies in an interval of one of its keys."""
    live = _reaches(rules.first, rules.last, seq, rows, cols, BLOCK_M)
    if rules.also_first is not None:
        live |= _reaches(rules.also_first, rules.also_last, seq, rows, cols, BLOCK_M)
    return tl.max(live.to(tl.int32)) != 0


@triton.jit
def _reaches(first, last, seq, rows, cols, BLOCK_M: tl.constexpr):
    """For each key, whether a query of the tile lies in its interval."""
    first_cols = load_rows(first, seq, cols, LARGEST)
    last_cols = load_rows(last, seq, cols, 0)
    return (first_cols < last_cols) & (first_cols < rows.start + BLOCK_M) & (last_cols > rows.start)


@triton.jit
def _summary_kernel(
    first, last, bias, bounds, packed, bias_columns, scale, left, right, heads, len_q, len_k, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One program: the bounds of BLOCKS blocks of keys of one (batch, head), their intervals packed, their bias columns, where wanted."""
    follow()
    part, head, batch = place(len_k, heads, BLOCKS * BLOCK_N)
    seq = Sequence(batch, head, len_q, len_k)
    index = tl.arange(0, BLOCKS * BLOCK_N)
    cols = Span(part * (BLOCKS * BLOCK_N), index.to(tl.int64), len_k)
    described = index < len_k - part * (BLOCKS * BLOCK_N)
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
        live = tl.max(tl.reshape(alive.to(tl.int32), (BLOCKS, BLOCK_N)), 1, keep_dims=True)
        described &= tl.reshape(tl.broadcast_to(live, (BLOCKS, BLOCK_N)), (BLOCKS * BLOCK_N,)) != 0
    if packed is not None:
        pointers = slice_pointer(packed, seq) + (part * BLOCKS + index // BLOCK_N).to(tl.int64) * packed.row + index % BLOCK_N
        position = cols.start + index
        if right is not None:
            first_cols = tl.maximum(first_cols, first_query(right, seq, position))
        if left is not None:
            last_cols = tl.minimum(last_cols, last_query(left, seq, position) + 1)
        middle2, length = middle_and_length(first_cols, last_cols, len_q)
        real = part * BLOCKS + index // BLOCK_N < tl.cdiv(len_k, BLOCK_N)  # of a block that holds a key
        tl.store(pointers, middle2.to(tl.int32, bitcast=True), mask=real)
        tl.store(pointers + BLOCK_N, length.to(tl.int32, bitcast=True), mask=real)
    if bias_columns is not None:
        column = tl.arange(0, COLUMNS)[None, :]
        pointers = slice_pointer(bias_columns, seq) + (cols.start + cols.index)[:, None] * bias_columns.row + column
        tl.store(pointers, columns_of(load_rows(bias, seq, cols, 0.0)[:, None], scale, column), mask=described[:, None])


@triton.jit
def middle_and_length(first, last, len_q):
    """(twice the middle, length) of intervals of queries, in float32: those within have |2 i - middle2| < length."""
    first = tl.maximum(tl.minimum(first, len_q), 0)
    last = tl.maximum(tl.minimum(last, len_q), 0)
    return (first + last - 1).to(tl.float32), (last - first).to(tl.float32)


@triton.jit
def _interval_lists_kernel(bounds, also_bounds, lists, left, right, heads, len_q, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program: the list of one block of queries of one (batch, head). Reads the bounds of all blocks of keys."""
    follow()
    block, head, batch = place(len_q, heads, BLOCK_M)
    seq = Sequence(batch, head, len_q, len_k)
    rows = Span(block * BLOCK_M, 0, len_q)
    row_end = tl.minimum(rows.start + BLOCK_M, len_q)
    begin, end = keys_in_window(left, right, seq, rows.start, BLOCK_M)
    pointer = list_pointer(lists, seq, rows, BLOCK_M)
    progress = (0, 0, 0, -1)
    for chunk in range(begin // BLOCK_N // CHUNK * CHUNK, tl.cdiv(end, BLOCK_N), CHUNK):
        number = chunk + tl.arange(0, CHUNK)
        bound = _bounds_of(bounds, seq, number)
        also = bound
        if also_bounds is not None:
            also = _bounds_of(also_bounds, seq, number)
        real = (number * BLOCK_N < end) & ((number + 1) * BLOCK_N > begin)
        live = _touched(bound, real, rows.start, row_end)
        if also_bounds is not None:
            live |= _touched(also, real, rows.start, row_end)
        if tl.max(live.to(tl.int32)) != 0:
            full = _filled(bound, live, rows.start, row_end)
            if also_bounds is not None:
                full |= _filled(also, live, rows.start, row_end)
            full = full & all_in_window(left, right, seq, rows.start, number * BLOCK_N, BLOCK_M, BLOCK_N)
            progress = append(pointer, room(len_k, BLOCK_N), progress, number, live, full)
    close(pointer, progress)


@triton.jit
def _query_interval_lists_kernel(
    bounds, also_bounds, lists, left, right, heads, len_q, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program: the list of one block of keys of one (batch, head), of the blocks of queries. Reads the bounds of that block."""
    follow()
    block, head, batch = place(len_k, heads, BLOCK_N)
    seq = Sequence(batch, head, len_q, len_k)
    cols = Span(block * BLOCK_N, 0, len_k)
    begin, end = queries_in_window(left, right, seq, cols.start, BLOCK_N)
    pointer = list_pointer(lists, seq, cols, BLOCK_N)
    own = block + tl.zeros([CHUNK], tl.int32)
    bound = _bounds_of(bounds, seq, own)
    also = bound
    if also_bounds is not None:
        also = _bounds_of(also_bounds, seq, own)
    progress = (0, 0, 0, -1)
    for chunk in range(begin // BLOCK_M // CHUNK * CHUNK, tl.cdiv(end, BLOCK_M), CHUNK):
        number = chunk + tl.arange(0, CHUNK)
        row = number * BLOCK_M
        row_end = tl.minimum(row + BLOCK_M, len_q)
        real = (row < end) & (row + BLOCK_M > begin)
        live = _touched(bound, real, row, row_end)
        full = _filled(bound, real, row, row_end)
        if also_bounds is not None:
            live |= _touched(also, real, row, row_end)
            full |= _filled(also, real, row, row_end)
        full = full & all_in_window(left, right, seq, row, cols.start, BLOCK_M, BLOCK_N)
        progress = append(pointer, room(len_q, BLOCK_M), progress, number, live, full)
    close(pointer, progress)


@triton.jit
def _bounds_of(bounds, seq, number):
    """(pointers to the first bound of blocks of keys, stride between bounds)."""
    return slice_pointer(bounds, seq) + tl.cast(number, tl.int64) * bounds.row, bounds.col


@triton.jit
def _touched(bound, real, row, row_end):
    """Which of real blocks of keys have a key that a query from `row` to `row_end` may attend."""
    pointer, stride = bound
    live = real & (tl.load(pointer, mask=real, other=LARGEST) < row_end)
    return live & (tl.load(pointer + stride, mask=real, other=0) > row)


@triton.jit
def _filled(bound, live, row, row_end):
    """Of live blocks of keys, those of which all these queries attend all keys."""
    pointer, stride = bound
    full = tl.load(pointer + 2 * stride, mask=live, other=LARGEST) <= row
    return full & (tl.load(pointer + 3 * stride, mask=live, other=0) >= row_end)
