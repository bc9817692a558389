"""Tensors in kernels: a pointer with one stride per axis, positions on an axis, and the tiles that these load and store."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Strided(NamedTuple):
    """A (batch, head, row, col) tensor: base pointer and element strides, 0 where the axis is broadcast.

    `group` query heads share one entry of the head axis. A vector per row has col = 0.
    """

    ptr: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    group: Any


class Span(NamedTuple):
    """BLOCK consecutive positions on one axis, `start + index`. Those below `length` are real; all are where it is None.

    A span is made in place, not by a helper: up to Triton 3.7 a helper cannot return a None.
    """

    start: Any
    index: Any
    length: Any


class Sequence(NamedTuple):
    """One sequence under one query head: its batch entry, the head, and the numbers of queries and keys."""

    batch: Any
    head: Any
    len_q: Any
    len_k: Any


def strided(x: Tensor | None, heads: int) -> Strided | None:
    """`x` with four axes, or three for a vector per row, as a kernel argument in a problem of `heads` query heads."""
    if x is None:
        return None
    batch, head, row, *col = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return Strided(x, batch, head, row, col[0] if col else 0, heads // x.shape[1])


def strided_by_head(x: Tensor | None) -> Strided | None:
    """`x` (H,) as a kernel argument, a number for each query head."""
    return None if x is None else Strided(x, 0, x.stride(0), 0, 0, 1)


@triton.jit
def slice_pointer(t, seq):
    """Pointer to the first element of one sequence's slice."""
    return t.ptr + tl.cast(seq.batch, tl.int64) * t.batch + tl.cast(seq.head // t.group, tl.int64) * t.head


@triton.jit
def inside(positions):
    """Which positions of a span are real."""
    # Not start + index < length: that costs an addition per element, and LLVM up to Triton 3.6 may pack the start with a thread's index into
    # one 64-bit register where the index overflows into the start (tests/cases.py, fp32-bias-softcap-*).
    return positions.index < positions.length - positions.start


@triton.jit
def load_tile(t, seq, rows, cols):
    """[rows, cols] of one sequence, 0 beyond the bounds."""
    pointers = _tile_pointers(t, seq, rows, cols)
    if rows.length is None and cols.length is None:
        return tl.load(pointers)
    elif cols.length is None:
        return tl.load(pointers, mask=inside(rows)[:, None], other=0)
    elif rows.length is None:
        return tl.load(pointers, mask=inside(cols)[None, :], other=0)
    else:
        return tl.load(pointers, mask=inside(rows)[:, None] & inside(cols)[None, :], other=0)


@triton.jit
def store_tile(t, seq, rows, cols, x):
    """Write [rows, cols] of one sequence inside the bounds, in the tensor's dtype."""
    pointers = _tile_pointers(t, seq, rows, cols)
    x = x.to(t.ptr.dtype.element_ty)
    if rows.length is None and cols.length is None:
        tl.store(pointers, x)
    elif cols.length is None:
        tl.store(pointers, x, mask=inside(rows)[:, None])
    elif rows.length is None:
        tl.store(pointers, x, mask=inside(cols)[None, :])
    else:
        tl.store(pointers, x, mask=inside(rows)[:, None] & inside(cols)[None, :])


@triton.jit
def store_zeros(t, seq, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write 0 to [rows, cols] of one sequence; nothing where there is no tensor."""
    if t is not None:
        store_tile(t, seq, rows, cols, tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32))


@triton.jit
def load_rows(t, seq, rows, other):
    """A vector per row of one sequence, `other` beyond the bounds."""
    if rows.length is None:
        return tl.load(_row_pointers(t, seq, rows))
    else:
        return tl.load(_row_pointers(t, seq, rows), mask=inside(rows), other=other)


@triton.jit
def store_rows(t, seq, rows, x):
    """Write a vector per row of one sequence inside the bounds."""
    if rows.length is None:
        tl.store(_row_pointers(t, seq, rows), x)
    else:
        tl.store(_row_pointers(t, seq, rows), x, mask=inside(rows))


@triton.jit
def _row_pointers(t, seq, rows):
    """Pointers to a vector per row of one sequence."""
    return slice_pointer(t, seq) + tl.cast(rows.start, tl.int64) * t.row + rows.index * t.row


@triton.jit
def _tile_pointers(t, seq, rows, cols):
    """Pointers to [rows, cols] of one sequence; offsets of whole blocks are 64-bit."""
    corner = slice_pointer(t, seq) + tl.cast(rows.start, tl.int64) * t.row + tl.cast(cols.start, tl.int64) * t.col
    return corner + rows.index[:, None] * t.row + cols.index[None, :] * t.col
