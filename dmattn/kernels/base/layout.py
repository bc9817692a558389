"""Tensors in kernels: a pointer with one stride per axis, positions on an axis, and the tiles that these load and store."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .described import OfSequences
from .leading import Nested


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


class Stepped(NamedTuple):
    """The same with steps from the batch entry to the tensor's own (`leading.Steps`), by one quotient. Kernels tell them by their lengths."""

    ptr: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    group: Any
    unit: Any
    every: Any
    step: Any


class SteppedThrice(NamedTuple):
    """The same by up to three quotients."""

    ptr: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    group: Any
    unit: Any
    every: Any
    step: Any
    every2: Any
    step2: Any
    every3: Any
    step3: Any


class OfPacked(NamedTuple):
    """A tensor of pairs whose batch entries are the sequences that lie packed along rows and cols, in the coordinates of each sequence.

    A tile of it is addressed by packed rows and cols. Its pairs within one sequence are loaded and stored, the others are 0 or left alone.
    `places` points to what :func:`sequences.places_of` makes, vectors per packed col, `pitch` apart.
    """

    ptr: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    group: Any
    places: Any
    pitch: Any


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


PLAIN, ONCE, PACKED = tl.constexpr(len(Strided._fields)), tl.constexpr(len(Stepped._fields)), tl.constexpr(len(OfPacked._fields))


def strided(x: Any, heads: int) -> Strided | Stepped | SteppedThrice | OfPacked | None:
    """`x` with four axes, or three for a vector per row, as a kernel argument in a problem of `heads` query heads.

    Or what stands for such a tensor: `leading.Nested`, `described.OfSequences`.
    """
    if x is None:
        return None
    batch, head, row, *col = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    others = head, row, col[0] if col else 0, heads // x.shape[1]
    if isinstance(x, OfSequences):
        return OfPacked(x.tensor, batch, *others, x.places, x.places.stride(0))
    if not isinstance(x, Nested):
        return Strided(x, batch, *others)
    unit, *quotients = x.entries if x.places is None else x.places
    batch = batch if x.places is None else 1
    if len(quotients) == 2:
        return Stepped(x.tensor, batch, *others, unit, *quotients)
    return SteppedThrice(x.tensor, batch, *others, unit, *quotients, *(1, 0) * (3 - len(quotients) // 2))


def strided_by_head(x: Any) -> Strided | None:
    """`x` (H,) as a kernel argument, a number for each query head."""
    return None if x is None else Strided(x, 0, x.stride(0), 0, 0, 1)


@triton.jit
def slice_pointer(t, seq):
    """Pointer to the first element of one sequence's slice."""
    return t.ptr + own_entry(t, tl.cast(seq.batch, tl.int64)) * t.batch + tl.cast(seq.head // t.group, tl.int64) * t.head


@triton.jit
def stepped(number, unit, every, step):
    """A number by `leading.Steps` with one quotient."""
    return number * unit + number // every * step


@triton.jit
def own_entry(t, batch):
    """The entry of a tensor that a batch entry has: the same unless the tensor has steps, as all share the only one by its stride of 0."""
    if len(t) == PLAIN or len(t) == PACKED:
        return batch
    elif len(t) == ONCE:
        return stepped(batch, t.unit, t.every, t.step)
    else:
        return stepped(batch, t.unit, t.every, t.step) + batch // t.every2 * t.step2 + batch // t.every3 * t.step3


@triton.jit
def copied_entry(t, batch):
    """The same as the copy engine counts it: 0 where all batch entries share the only one."""
    if len(t) == PLAIN:
        return tl.where(t.batch == 0, 0, batch)
    else:
        return own_entry(t, batch)


@triton.jit
def inside(positions):
    """Which positions of a span are real."""
    # Not start + index < length: that costs an addition per element, and LLVM up to Triton 3.6 may pack the start with a thread's index into
    # one 64-bit register where the index overflows into the start (tests/cases.py, fp32-bias-softcap-*).
    return positions.index < positions.length - positions.start


@triton.jit
def load_tile(t, seq, rows, cols):
    """[rows, cols] of one sequence, 0 beyond the bounds."""
    if len(t) == PACKED:
        pointers, own = _packed_pointers(t, seq, rows, cols)
        return tl.load(pointers, mask=own, other=0)
    else:
        return _load_bounded(_tile_pointers(t, seq, rows, cols), rows, cols)


@triton.jit
def _load_bounded(pointers, rows, cols):
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
    if len(t) == PACKED:
        pointers, own = _packed_pointers(t, seq, rows, cols)
        tl.store(pointers, x.to(t.ptr.dtype.element_ty), mask=own)
    else:
        _store_bounded(_tile_pointers(t, seq, rows, cols), rows, cols, x.to(t.ptr.dtype.element_ty))


@triton.jit
def _store_bounded(pointers, rows, cols, x):
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


@triton.jit
def _packed_pointers(t, seq, rows, cols):
    """(pointers to [rows, cols] of packed sequences, which of them are pairs of one sequence).

    The sequence is that of the col, for of a pair within one both have it. Few registers hold what belongs to cols: a thread has few of them.
    """
    entry = _place_of(t, cols, 0).to(tl.int64) * t.batch + _place_of(t, cols, 1).to(tl.int64) * t.col
    first = tl.cast(rows.start, tl.int32) - _place_of(t, cols, 2)  # where in the col's sequence the first row would be
    corners = t.ptr + tl.cast(seq.head // t.group, tl.int64) * t.head + entry + first.to(tl.int64) * t.row
    row = first[None, :] + tl.cast(rows.index, tl.int32)[:, None]
    return corners[None, :] + rows.index[:, None] * t.row, (row >= 0) & (row < _place_of(t, cols, 3)[None, :])


@triton.jit
def _place_of(t, cols, number):
    """One of the vectors of places, 0 beyond the bounds."""
    pointers = t.places + number * tl.cast(t.pitch, tl.int64) + cols.start + cols.index
    if cols.length is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside(cols), other=0)
