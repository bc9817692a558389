"""Tensors in kernels: a pointer with one stride per axis, positions on an axis, and the tiles that these load and store."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...problem import Problem
from .described import Packed, totals_of
from .leading import Nested
from .whole import multiple, whole_of


class Strided(NamedTuple):
    """A (batch, head, row, col) tensor: base pointer and element strides, 0 where the axis is broadcast.

    `group` query heads share one entry of the head axis. A vector per row has col = 0. `whole` says what is known of strides (whole.py).
    """

    ptr: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    group: Any
    whole: Any


class Stepped(NamedTuple):
    """The same with steps from the batch entry to the tensor's own (`leading.Steps`), by one quotient. Kernels tell them by their lengths."""

    ptr: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    group: Any
    whole: Any
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
    whole: Any
    unit: Any
    every: Any
    step: Any
    every2: Any
    step2: Any
    every3: Any
    step3: Any


class OfQueries(NamedTuple):
    """The same of the queries of packed sequences, which lie one after another, `unit` apart. Up to Triton 3.6 no field may be None."""

    ptr: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    group: Any
    whole: Any
    unit: Any


class OfKeys(NamedTuple):
    """The same of keys, of so many in all."""

    ptr: Any
    batch: Any
    head: Any
    row: Any
    col: Any
    group: Any
    whole: Any
    unit: Any
    total: Any


class OfTerms(NamedTuple):
    """The same of query terms (`query_terms.Incoming`), of which each sequence has whole blocks (`first_row_in_blocks`)."""

    ptr: Any
    head: Any
    row: Any
    col: Any
    unit: Any


class Span(NamedTuple):
    """BLOCK consecutive positions on one axis, `start + index`. Those below `length` are real; all are where it is None.

    A span is made in place, not by a helper: up to Triton 3.7 a helper cannot return a None.
    """

    start: Any
    index: Any
    length: Any


class SpanFromBefore(NamedTuple):
    """The same from anywhere on: positions below `first`, which is 0, are not real either. Kernels tell them by their lengths."""

    start: Any
    index: Any
    length: Any
    first: Any


class Sequence(NamedTuple):
    """One sequence under one query head: its batch entry, the head, and the numbers of queries and keys."""

    batch: Any
    head: Any
    len_q: Any
    len_k: Any


class PackedSequence(NamedTuple):
    """The same of packed sequences: the places of the first query and key among all, and how many keys no sequence exceeds.

    Kernels tell them by their lengths.
    """

    batch: Any
    head: Any
    len_q: Any
    len_k: Any
    begin_q: Any
    begin_k: Any
    longest_k: Any


class Ends(NamedTuple):
    """Pointers to where packed sequences end among the queries and keys (`dmattn.problem.Problem`), and how many of these there are in all."""

    ends_q: Any
    ends_k: Any
    total_q: Any
    total_k: Any


PLAIN, ONCE = tl.constexpr(len(Strided._fields)), tl.constexpr(len(Stepped._fields))
FOR_QUERIES, FOR_KEYS, FOR_TERMS = (tl.constexpr(len(kind._fields)) for kind in (OfQueries, OfKeys, OfTerms))
ALONE, FROM_BEFORE = tl.constexpr(len(Sequence._fields)), tl.constexpr(len(SpanFromBefore._fields))
UNIT = tl.constexpr(64)  # of terms


def strided(x: Any, heads: int, by_words: bool = False) -> Strided | Stepped | SteppedThrice | OfQueries | OfKeys | OfTerms | None:
    """`x` with four axes, or three for a vector per row, as a kernel argument in a problem of `heads` query heads.

    Or what stands for such a tensor: `leading.Nested`, `described.Packed`. Columns of 16-bit numbers may be read `by_words` of two.
    """
    if x is None:
        return None
    batch, head, row, *col = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    others = head, row, col[0] if col else 0, heads // x.shape[1], whole_of(x, batch | head | row, by_words and col == [1])
    if isinstance(x, Packed):
        if x.in_blocks:
            return OfTerms(x.tensor, *others[:3], x.unit)
        return OfKeys(x.tensor, 0, *others, x.unit, x.tensor.shape[2]) if x.of_keys else OfQueries(x.tensor, 0, *others, x.unit)
    if not isinstance(x, Nested):
        return Strided(x, batch, *others)
    unit, *quotients = x.entries if x.places is None else x.places
    batch = batch if x.places is None else 1
    if len(quotients) == 2:
        return Stepped(x.tensor, batch, *others, unit, *quotients)
    return SteppedThrice(x.tensor, batch, *others, unit, *quotients, *(1, 0) * (3 - len(quotients) // 2))


def strided_by_head(x: Any) -> Strided | None:
    """`x` (H,) as a kernel argument, a number for each query head."""
    return None if x is None else Strided(x, 0, x.stride(0), 0, 0, 1, (1,))


def ends_of(problem: Problem) -> Ends | None:
    """Those of a problem as a kernel argument; None where no sequences are packed."""
    if problem.ends_q is None:
        return None
    return Ends(problem.ends_q, problem.ends_k, *totals_of(problem))


@triton.jit
def sequence(ends, batch, head, len_q, len_k):
    """The sequence of a batch entry, of so many queries and keys, or where it is packed of its own, which are not more."""
    if ends is None:
        return Sequence(batch, head, len_q, len_k)
    else:
        begin_q, own_q = begin_and_length(ends.ends_q, batch, ends.total_q, len_q)
        begin_k, own_k = begin_and_length(ends.ends_k, batch, ends.total_k, len_k)
        return PackedSequence(batch, head, own_q, own_k, begin_q, begin_k, len_k)


@triton.jit
def begin_and_length(ends, batch, total, longest):
    """Where a packed sequence begins and how long it is, inside the tensor and at most the longest, whatever the ends hold."""
    begin = tl.minimum(tl.maximum(tl.load(ends + batch), 0), total)
    end = tl.minimum(tl.maximum(tl.load(ends + batch + 1), begin), total)
    return begin.to(tl.int32), tl.minimum((end - begin).to(tl.int32), longest)


@triton.jit
def under_head(seq, head):
    """The same sequence under another head."""
    if len(seq) == ALONE:
        return Sequence(seq.batch, head, seq.len_q, seq.len_k)
    else:
        return PackedSequence(seq.batch, head, seq.len_q, seq.len_k, seq.begin_q, seq.begin_k, seq.longest_k)


@triton.jit
def slice_pointer(t, seq):
    """Pointer to the first element of one sequence's slice."""
    if len(t) == FOR_TERMS:
        return t.ptr + tl.cast(first_row_in_blocks(seq), tl.int64) * t.unit + tl.cast(seq.head, tl.int64) * t.head
    else:
        of_head = multiple(tl.cast(seq.head // t.group, tl.int64) * t.head, t.whole)
        if len(t) == FOR_QUERIES:
            return t.ptr + multiple(tl.cast(seq.begin_q, tl.int64) * t.unit, t.whole) + of_head
        elif len(t) == FOR_KEYS:
            return t.ptr + multiple(tl.cast(seq.begin_k, tl.int64) * t.unit, t.whole) + of_head
        else:
            return t.ptr + multiple(own_entry(t, tl.cast(seq.batch, tl.int64)) * t.batch, t.whole) + of_head


@triton.jit
def first_row_in_blocks(seq):
    """With which row the terms of a packed sequence begin, of which each has whole blocks of UNIT rows to itself."""
    return (seq.begin_q // UNIT + seq.batch) * UNIT


def first_rows_in_blocks(begins: Any) -> Any:
    """The same of all sequences, whose first queries are these, on the host."""
    return (begins // UNIT.value + torch.arange(len(begins), device=begins.device)) * UNIT.value


def rows_in_blocks(total: int, sequences: int) -> int:
    """How many rows the terms of packed sequences have, of so many queries."""
    return (total // UNIT.value + sequences) * UNIT.value


@triton.jit
def stepped(number, unit, every, step):
    """A number by `leading.Steps` with one quotient."""
    return number * unit + number // every * step


@triton.jit
def own_entry(t, batch):
    """The entry of a tensor that a batch entry has: the same unless the tensor has steps, as all share the only one by its stride of 0."""
    if len(t) == PLAIN:
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
    if len(positions) == FROM_BEFORE:
        return (positions.index < positions.length - positions.start) & (positions.index >= positions.first - positions.start)
    else:
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
def load_tile_across(t, seq, rows, cols):
    """The same as [cols, rows]."""
    corner = slice_pointer(t, seq) + multiple(tl.cast(rows.start, tl.int64) * t.row, t.whole) + tl.cast(cols.start, tl.int64) * t.col
    pointers = corner + rows.index[None, :] * multiple(t.row, t.whole) + cols.index[:, None] * t.col
    if rows.length is None and cols.length is None:
        return tl.load(pointers)
    elif cols.length is None:
        return tl.load(pointers, mask=inside(rows)[None, :], other=0)
    elif rows.length is None:
        return tl.load(pointers, mask=inside(cols)[:, None], other=0)
    else:
        return tl.load(pointers, mask=inside(rows)[None, :] & inside(cols)[:, None], other=0)


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
def load_pairs(t, seq, rows, cols):
    """A tile of a tensor of pairs, which has all cols that any sequence has: of a packed one those past its end, too.

    By its own end, at any place, a tile could not be loaded by many elements at once.
    """
    if len(seq) == ALONE or cols.length is None or len(cols) == FROM_BEFORE:
        return load_tile(t, seq, rows, cols)
    else:
        return load_tile(t, seq, rows, Span(cols.start, cols.index, seq.longest_k))


@triton.jit
def store_pairs(t, seq, rows, cols, x):
    """Write a tile of such a tensor."""
    if len(seq) == ALONE or cols.length is None:
        store_tile(t, seq, rows, cols, x)
    else:
        store_tile(t, seq, rows, Span(cols.start, cols.index, seq.longest_k), x)


@triton.jit
def store_zeros(t, seq, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write 0 to [rows, cols] of one sequence; nothing where there is no tensor."""
    if t is not None:
        store_tile(t, seq, rows, cols, tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32))


@triton.jit
def load_rows(t, seq, rows, other):
    """A vector per row of one sequence, `other` beyond the bounds."""
    if rows.length is None:
        return tl.load(row_pointers(t, seq, rows))
    else:
        return tl.load(row_pointers(t, seq, rows), mask=inside(rows), other=other)


@triton.jit
def store_rows(t, seq, rows, x):
    """Write a vector per row of one sequence inside the bounds."""
    if rows.length is None:
        tl.store(row_pointers(t, seq, rows), x)
    else:
        tl.store(row_pointers(t, seq, rows), x, mask=inside(rows))


@triton.jit
def row_pointers(t, seq, rows):
    """Pointers to a vector per row of one sequence."""
    return slice_pointer(t, seq) + tl.cast(rows.start, tl.int64) * t.row + rows.index * t.row


@triton.jit
def _tile_pointers(t, seq, rows, cols):
    """Pointers to [rows, cols] of one sequence; offsets of whole blocks are 64-bit."""
    corner = slice_pointer(t, seq) + multiple(tl.cast(rows.start, tl.int64) * t.row, t.whole) + tl.cast(cols.start, tl.int64) * t.col
    return corner + rows.index[:, None] * multiple(t.row, t.whole) + cols.index[None, :] * t.col
